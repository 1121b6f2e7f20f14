"""CUDA graphs of compiled programs, by the rules of torch's CUDA graph trees.

The source is `torch/_inductor/cudagraph_trees.py` of torch 2.13. A program has three kinds of runs: a first
run that launches kernels, a recording, and replays.

A replay allocates nothing. When the next step begins, the allocator may reuse blocks of the graphs' memory
pool. The pool's memory is never released to the device.

Two other cases raise an error: a new program while others are replayed, and inputs at changed addresses. In
these cases torch would record again and again, and its pool would grow.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from snugfit.errors import RehearsalError
from snugfit.rehearsal.trace.trace import GENERATOR_BYTES, GRAPH_STREAM, Memory

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.record.recorder import Recorder

IRREGULAR = (
    "A program of this step would be recorded as a CUDA graph in each step. Its inputs have other "
    "addresses each time, or it is new while others are replayed. Leave the mode out of 'compiled'."
)


@dataclass(frozen=True, eq=False)
class GraphFunction:
    """A compiled program that is recorded as a CUDA graph."""

    run: Callable[[list[Any]], Any]
    static: frozenset[int]
    """Indices of inputs whose memory address never changes, such as weights."""
    is_backward: bool
    returned: frozenset[int] = frozenset()
    """Indices of inputs that are returned unchanged. The graph does not read them."""


Place = tuple[int, int]
"""The type of an output's position: the index of its CUDA graph, and its index among the graph's outputs."""


@dataclass(eq=False)
class _Node:
    """A program recorded as a CUDA graph: a node of the tree of programs, below the one that ran
    before it.
    """

    function: GraphFunction
    inputs: tuple[Any, ...] = ()
    """Origin of each input: a `Place`, the memory block of a weight, or None if it was not examined."""
    outputs: list[weakref.ref[Any] | None] = field(default_factory=list)
    """The storages of the outputs of the program's last run."""
    children: dict[GraphFunction, list[_Node]] = field(default_factory=lambda: defaultdict(list))


class _State(Enum):
    """Enum: a compiled program's last run in this step launched kernels, recorded a CUDA graph, or replayed
    one.
    """

    NOTHING = auto()
    FIRST_RUN = auto()
    RECORDING = auto()
    PLAYING = auto()


class GraphTrees:
    """The simulated CUDA graphs of one step's compiled programs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._state = _State.NOTHING
        self._path: list[_Node] = []
        self._roots = _Node(GraphFunction(list, frozenset(), is_backward=False))
        self._ran: set[GraphFunction] = set()
        self._calls = self._calls_then = 0  # numbers of calls so far: now, and at the last program
        self._pending = False  # True between a forward pass and its backward pass
        self._generator: list[torch.Tensor] = []

    def begin_call(self) -> None:
        """Count a call of compiled code, so that the beginning of a new step can be detected."""
        self._calls += 1

    def call(self, function: GraphFunction, arguments: list[Any]) -> Any:
        """Run a compiled program: the first time as kernels, then recorded as a CUDA graph, then as a replay.
        Return its outputs.
        """
        self._start()
        out = self._run(function, arguments)
        # A new step cannot begin between a forward pass and its backward pass.
        self._pending = not function.is_backward
        self._calls_then = self._calls
        return out

    def _start(self) -> None:
        """Create the memory pool of the simulated CUDA graphs at the first call of a program."""
        import torch

        if not self._generator:
            # The first allocations in the graphs' memory pool are the seed and offset of the random
            # generator.
            self._recorder.empty_cache()
            before = self._recorder.memory.use_stream(GRAPH_STREAM)
            self._generator = [
                torch.empty(GENERATOR_BYTES, dtype=torch.uint8, device="meta") for _ in range(2)
            ]
            self._recorder.memory.use_stream(before)

    def _run(self, function: GraphFunction, arguments: list[Any]) -> Any:
        if self._state in (_State.FIRST_RUN, _State.RECORDING):
            self._try_to_end()
        # If any program runs for the first time, all later ones of the step launch kernels instead of
        # replaying.
        if function not in self._ran or self._state is _State.FIRST_RUN:
            if self._state is _State.PLAYING:
                raise RehearsalError(IRREGULAR)
            return self._first_run(function, arguments)
        if self._state is not _State.RECORDING:
            # The graphs of a step share a memory pool, so a graph is valid only after the same programs.
            inputs = self._places(function, arguments)
            # A graph can be replayed only with inputs at the same addresses.
            for node in self._last.children[function]:
                if node.inputs == inputs:
                    return self._play(node, arguments)
            if self._path and function in self._roots.children:
                self._try_to_end()
                # A program that is called first after a backward pass begins a new step.
                if not self._path:
                    return self._run(function, arguments)
            if self._state is _State.PLAYING:
                raise RehearsalError(IRREGULAR)
        return self._record(function, arguments)

    @property
    def _last(self) -> _Node:
        """Return the compiled program that ran last in this step."""
        return self._path[-1] if self._path else self._roots

    def _try_to_end(self) -> None:
        """End the sequence of programs if a new step has begun, or if none of its outputs is alive."""
        begins = self._calls != self._calls_then and not self._pending
        if not (begins or not any(True for _ in self._live())):
            return
        # The next step may reuse the memory of a first run or a recording.
        if self._state is not _State.PLAYING:
            self._recorder.memory.release_graphs()
        self._path, self._state = [], _State.NOTHING

    def _live(self) -> Iterator[tuple[Place, Any]]:
        """Yield the live outputs of the compiled programs of this step, with their positions (program and
        output index).
        """
        for depth, node in enumerate(self._path):
            for number, reference in enumerate(node.outputs):
                if reference is not None and (storage := reference()) is not None:
                    yield (depth, number), storage

    def _places(self, function: GraphFunction, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return where each input of a compiled program comes from: a live output of another program, or an
        address.

        A static input that is no weight is assumed to have the same address in each step.
        """
        managed = {storage._cdata: output for output, storage in self._live()}
        places: list[Any] = []
        for number, argument in enumerate(arguments):
            storage = argument.untyped_storage() if _is_tensor(argument) else None
            output_place: Any = managed.get(storage._cdata) if storage is not None else None
            # A weight's address is constant; any other static input is assumed to be so too.
            if output_place is None and storage is not None and number in function.static:
                output_place = self._recorder.memory.built_block(storage)
            places.append(output_place)
        return tuple(places)

    def _first_run(self, function: GraphFunction, arguments: list[Any]) -> Any:
        self._ran.add(function)
        self._recorder.records_graph()
        memory = self._recorder.memory
        node = _Node(function)
        # torch frees cuBLAS's workspaces before and after each first run and each recording of a program.
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
            # Inputs with a changing address are copied into the pool.
            given = self._copy_inputs(node, arguments)
        memory.give_workspaces_back()
        # torch frees the allocator's cached memory before it records a graph.
        self._recorder.empty_cache()
        with memory.allocating(Memory.GRAPHS):
            out = _run_on(function, given, originals)
        memory.give_workspaces_back()
        self._last.children[function].append(node)
        return self._after(node, out, _State.RECORDING)

    def _play(self, node: _Node, arguments: list[Any]) -> Any:
        originals = {number: arguments[number] for number in node.function.returned}
        # A replay allocates nothing, because its outputs have the recorded addresses.
        with self._recorder.memory.allocating(Memory.NOWHERE):
            given = self._copy_inputs(node, arguments)
            with self._recorder.played_back():
                out = _run_on(node.function, given, originals)
        return self._after(node, out, _State.PLAYING)

    def _after(self, node: _Node, out: Any, state: _State) -> Any:
        """Record the outputs of a program's run and how it ran (`_State`), and return the outputs."""
        known = {storage._cdata for _, storage in self._live()}
        node.outputs = []
        for output in out:
            reference = None
            if _is_tensor(output) and self._recorder.memory.is_of_graphs(storage := output.untyped_storage()):
                # If an output's storage existed before, it is the output of an earlier program.
                reference = None if storage._cdata in known else weakref.ref(storage)
            node.outputs.append(reference)
        self._path.append(node)
        self._state = state
        return out

    def _copy_inputs(self, node: _Node, arguments: list[Any]) -> list[Any]:
        """Return a CUDA graph's inputs, where inputs with changed addresses are copied to the recorded
        addresses. The given list is emptied.
        """
        import torch

        given = list(arguments)
        # The caller's list is emptied, so that inputs can be freed during the program.
        arguments.clear()
        moves = [
            number
            for number, (argument, output_place) in enumerate(zip(given, node.inputs, strict=True))
            if _is_tensor(argument) and output_place is None and number not in node.function.static
        ]
        with torch.no_grad():
            copies = [
                torch.empty_strided(argument.size(), argument.stride(), dtype=argument.dtype, device="meta")
                for argument in (given[number] for number in moves)
            ]
            if copies:
                torch._foreach_copy_(copies, [given[number] for number in moves])
        for number, copy in zip(moves, copies, strict=True):
            given[number] = copy
        return given


def _run_on(function: GraphFunction, inputs: list[Any], originals: dict[int, Any]) -> Any:
    """Run a program on copied inputs, and return its outputs; an output that is an input is the original."""
    if not originals:
        return function.run(inputs)
    numbers = {id(inputs[number]): number for number in originals}
    same = [inputs[number] for number in originals]  # holding the objects keeps their ids unique
    out = [
        originals[numbers[id(output)]] if id(output) in numbers else output for output in function.run(inputs)
    ]
    del same
    return out


def _is_tensor(one: Any) -> bool:
    import torch

    return isinstance(one, torch.Tensor) and one.is_meta
