"""CUDA graphs of compiled programs, as torch's trees of them run (torch 2.13,
`torch/_inductor/cudagraph_trees.py`).

A program runs three times in other ways. The *first* time it runs as it is, but allocates from a pool that
belongs to graphs alone. When it is called again after that step, it is *recorded*: what it is given is
copied to the pool, unless it lies where it always does (weights, and what another graph gave), then its
kernels are recorded and what it allocates is the pool's. From then on the graph is *played*: its inputs are
copied to where they were, the host launches it as one, and its results are where they were. Nothing is
allocated: what lived in the pool is free to the allocator once the next step begins, and is reserved for
ever.

Graphs that run one after the other in a step share the pool, each recorded where the one before it left
off; a new step begins with the first program that is called after a backward pass. cuBLAS's workspaces are
given back before and after each first run and each recording, and before a recording the allocator gives
back what it keeps for later.

What torch would do beyond this order (a program that is met first while others are played, or whose inputs
lie elsewhere than before) is refused: it records again and again, and its pool grows.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from snugfit.errors import RehearsalError
from snugfit.rehearsal.trace.trace import GRAPH_STREAM, Memory

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.record.recorder import Recorder

IRREGULAR = (
    "A program of this step would be recorded as a CUDA graph again and again: what it is given lies "
    "elsewhere each time, or is new while others are played back. Leave the mode out of 'compiled'."
)

GENERATOR_BYTES = 8
"""Of each of two numbers on the device, the seed and the offset of a generator that graphs use
(`c10::CUDAGeneratorState::register_graph`)."""


@dataclass(frozen=True, eq=False)
class GraphFunction:
    """A program that is recorded."""

    run: Callable[[list[Any]], Any]
    static: frozenset[int]
    """Inputs that lie where they always do, by number."""
    is_backward: bool
    returned: frozenset[int] = frozenset()
    """Inputs that are given back as they are, beside the graph, which does not read them."""


Place = tuple[int, int]
"""An output of the path: the number of its graph, and its own."""


@dataclass(eq=False)
class _Node:
    """A program where it is recorded: after those that ran before it in its step."""

    function: GraphFunction
    inputs: tuple[Any, ...] = ()
    """Where each input lies: a `Place`, the block of a weight, or None where that was not looked at."""
    outputs: list[weakref.ref[Any] | None] = field(default_factory=list)
    """The storages that its last run gave."""
    children: dict[GraphFunction, list[_Node]] = field(default_factory=lambda: defaultdict(list))


class _State(Enum):
    """How the last program of the step ran."""

    NOTHING = auto()
    FIRST_RUN = auto()
    RECORDING = auto()
    PLAYING = auto()


class GraphTrees:
    """The graphs of one rehearsal."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._state = _State.NOTHING
        self._path: list[_Node] = []
        self._roots = _Node(GraphFunction(list, frozenset(), is_backward=False))
        self._ran: set[GraphFunction] = set()
        self._calls = self._calls_then = 0  # of what is compiled: now, and when a program last ran
        self._pending = False  # a forward pass whose backward pass has not begun
        self._generator: list[torch.Tensor] = []

    def begin_call(self) -> None:
        """Something that is compiled is called."""
        self._calls += 1

    def call(self, function: GraphFunction, arguments: list[Any]) -> Any:
        """Runs a program, in the way that its turn is."""
        self._start()
        out = self._run(function, arguments)
        self._pending = not function.is_backward
        self._calls_then = self._calls
        return out

    def _start(self) -> None:
        """Makes the pool, at the first call."""
        import torch

        if not self._generator:
            self._recorder.empty_cache()
            before = self._recorder.memory.use_stream(GRAPH_STREAM)
            self._generator = [
                torch.empty(GENERATOR_BYTES, dtype=torch.uint8, device="meta") for _ in range(2)
            ]
            self._recorder.memory.use_stream(before)

    def _run(self, function: GraphFunction, arguments: list[Any]) -> Any:
        if self._state in (_State.FIRST_RUN, _State.RECORDING):
            self._try_to_end()
        if function not in self._ran or self._state is _State.FIRST_RUN:
            if self._state is _State.PLAYING:
                raise RehearsalError(IRREGULAR)
            return self._first_run(function, arguments)
        if self._state is not _State.RECORDING:
            inputs = self._places(function, arguments)
            for node in self._last.children[function]:
                if node.inputs == inputs:
                    return self._play(node, arguments)
            if self._path and function in self._roots.children:
                self._try_to_end()
                if not self._path:
                    return self._run(function, arguments)
            if self._state is _State.PLAYING:
                raise RehearsalError(IRREGULAR)
        return self._record(function, arguments)

    @property
    def _last(self) -> _Node:
        """The program that ran last in this step."""
        return self._path[-1] if self._path else self._roots

    def _try_to_end(self) -> None:
        """Ends the path where a new step has begun, or where nothing of it lives any more."""
        begins = self._calls != self._calls_then and not self._pending
        if not (begins or not any(True for _ in self._live())):
            return
        if self._state is not _State.PLAYING:
            self._recorder.memory.release_graphs()
        self._path, self._state = [], _State.NOTHING

    def _live(self) -> Iterator[tuple[Place, Any]]:
        """What programs of the path gave and still lives."""
        for depth, node in enumerate(self._path):
            for number, reference in enumerate(node.outputs):
                if reference is not None and (storage := reference()) is not None:
                    yield (depth, number), storage

    def _places(self, function: GraphFunction, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Where each of these inputs lies. Of what is static but no weight the address is taken for the same
        in each step."""
        managed = {storage._cdata: output for output, storage in self._live()}
        places: list[Any] = []
        for number, one in enumerate(arguments):
            storage = one.untyped_storage() if _is_tensor(one) else None
            lies_at: Any = managed.get(storage._cdata) if storage is not None else None
            if lies_at is None and storage is not None and number in function.static:
                lies_at = self._recorder.memory.built_block(storage)
            places.append(lies_at)
        return tuple(places)

    def _first_run(self, function: GraphFunction, arguments: list[Any]) -> Any:
        self._ran.add(function)
        self._recorder.records_graph()
        memory = self._recorder.memory
        node = _Node(function)
        memory.give_workspaces_back()
        with memory.allocating(Memory.GRAPHS):
            out = function.run(arguments)
        memory.give_workspaces_back()
        return self._after(node, out, _State.FIRST_RUN)

    def _record(self, function: GraphFunction, arguments: list[Any]) -> Any:
        self._recorder.records_graph()
        memory = self._recorder.memory
        node = _Node(function, self._places(function, arguments))
        originals = {number: arguments[number] for number in function.returned}
        with memory.allocating(Memory.GRAPHS):
            given = self._copy_inputs(node, arguments)
        memory.give_workspaces_back()
        self._recorder.empty_cache()
        with memory.allocating(Memory.GRAPHS):
            out = _run_on(function, given, originals)
        memory.give_workspaces_back()
        self._last.children[function].append(node)
        return self._after(node, out, _State.RECORDING)

    def _play(self, node: _Node, arguments: list[Any]) -> Any:
        originals = {number: arguments[number] for number in node.function.returned}
        with self._recorder.memory.allocating(Memory.NOWHERE):
            given = self._copy_inputs(node, arguments)
            with self._recorder.played_back():
                out = _run_on(node.function, given, originals)
        return self._after(node, out, _State.PLAYING)

    def _after(self, node: _Node, out: Any, state: _State) -> Any:
        """A program has run, and gave this."""
        known = {storage._cdata for _, storage in self._live()}
        node.outputs = []
        for one in out:
            reference = None
            if _is_tensor(one) and self._recorder.memory.is_of_graphs(storage := one.untyped_storage()):
                reference = None if storage._cdata in known else weakref.ref(storage)
            node.outputs.append(reference)
        self._path.append(node)
        self._state = state
        return out

    def _copy_inputs(self, node: _Node, arguments: list[Any]) -> list[Any]:
        """The program's inputs, those that lie elsewhere each time copied to where they were recorded; the
        list that was given is emptied."""
        import torch

        given = list(arguments)
        arguments.clear()
        moves = [
            number
            for number, (one, lies_at) in enumerate(zip(given, node.inputs, strict=True))
            if _is_tensor(one) and lies_at is None and number not in node.function.static
        ]
        with torch.no_grad():
            copies = [
                torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")
                for one in (given[number] for number in moves)
            ]
            if copies:
                torch._foreach_copy_(copies, [given[number] for number in moves])
        for number, copy in zip(moves, copies, strict=True):
            given[number] = copy
        return given


def _run_on(function: GraphFunction, given: list[Any], originals: dict[int, Any]) -> Any:
    """What a program gives; inputs that it gives back are those that were not copied."""
    if not originals:
        return function.run(given)
    numbers = {id(given[number]): number for number in originals}
    same = [given[number] for number in originals]  # so that no other object has their ids
    out = [originals[numbers[id(one)]] if id(one) in numbers else one for one in function.run(given)]
    del same
    return out


def _is_tensor(one: Any) -> bool:
    import torch

    return isinstance(one, torch.Tensor) and one.is_meta
