"""Simulation of compiled layers, or of a model compiled as a whole (`compiling.py`).

Dynamo and AOTAutograd run as in a real step, on tensors without data. The simulation's replacements of torch
functions are active, and these stages are not recorded. Inductor compiles their graphs for the simulated
device (`lowering.py`). The resulting program runs on shapes, and its kernels and memory are recorded
(`program.py`). Equal layers share one program, and so do simulations in the same process.

Two modes of Inductor are simulated: `default` and `reduce-overhead`. Another mode is simulated as the nearer
of these, and another backend as uncompiled code: both with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import RehearsalError
from snugfit.features.compile import compiling
from snugfit.features.compile.memory_budget import plain_refusals, within_budget
from snugfit.features.compile.simulation.caches import BEYOND_LIMIT, layers_with_cache
from snugfit.features.compile.simulation.decisions import Decisions, noted_decisions
from snugfit.features.compile.simulation.graph_trees import GraphFunction, GraphTrees
from snugfit.features.compile.simulation.joint_passes import joint_passes_for
from snugfit.features.compile.simulation.lowering import computed_again, lower
from snugfit.features.compile.simulation.program import Run, as_boxed, attention_in, load
from snugfit.features.compile.simulation.timed_padding import PaddedProduct, time_padding
from snugfit.rehearsal.device.autocast import SWITCH
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record.first_launches import times_anything

if TYPE_CHECKING:
    import torch

    from snugfit.features.compile.fields import CompileWish
    from snugfit.rehearsal.device.notes import PolicyNotes
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.recorder import Recorder
    from snugfit.rehearsal.trace.trace import Kernel


NOT_COMPILED = (
    "torch did not compile {name}, so a prediction would be that of the uncompiled step. Leave "
    "'compiled' out of the recipe, or measure it with snugfit measure."
)

PARTLY_COMPILED = (
    "torch compiled only parts of {name}: {operator}{where} ran outside its programs{why}. A GPU may "
    "run other code there, so nothing is predicted. Try 'compiled', which compiles layers, or measure "
    "it with snugfit measure."
)

NOT_SIMULATED = (
    "Bytes and seconds are uncertain: {setting} of 'compiled' is not simulated, so they are those of "
    "{nearest}. `snugfit measure` shows the real ones."
)

_REPLACED_FUNCTIONS = ("tensor", "is_autocast_enabled", "get_autocast_gpu_dtype")
"""Functions of torch that a simulation replaces, and whose originals Dynamo must trace."""

_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")


@dataclass
class _Program:
    """One of the programs (forward or backward code) that Inductor generates from a traced graph."""

    call: Callable[[list[Any]], Any]
    strides: list[tuple[int, ...] | None]
    again: Counter[int] | None
    """Matrix products and convolutions that a backward pass recomputes, counted by their FLOPs. None for a
    forward pass."""
    decisions: Decisions
    attention: tuple[str, ...]
    """Names of the attention kernels in the program."""


_PROGRAMS: dict[Any, _Program] = {}
"""Compiled programs by graph and simulated device, shared by the simulations of a plan."""

_GRAPHS: dict[Any, Any] = {}
"""Functions that run a traced graph forward and backward, with keys like those of `_PROGRAMS`."""


class Compiler:
    """Simulated `torch.compile`: it compiles layers on the CPU, and records their kernels and memory."""

    def __init__(
        self, policy: Policy, recorder: Recorder, notes: PolicyNotes, eager_callback: Callable[..., Any]
    ) -> None:
        import torch

        self._policy, self._recorder, self._callback = policy, recorder, eager_callback
        self._notes = notes
        self._run = 0
        self._within: list[range] = []  # indices of compiled programs' kernels in the last step
        self._trees = GraphTrees(recorder)
        self._assumed: list[str] = []  # sentences on assumptions about the graph being compiled
        self._timed: list[PaddedProduct] = []  # products to benchmark for the current graph
        self._chosen: set[str] = set()  # sources of benchmarked kernels
        self._sizes = FirstSizes()
        self._padded: set[str] = set()  # products that were benchmarked with and without padding
        # Dynamo must trace torch's own functions, so the simulation's replacements are undone meanwhile.
        self._own = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "__format__")}
        self._functions = {name: getattr(torch, name) for name in _REPLACED_FUNCTIONS}

    def compiled_function(self, forward: Callable[..., Any], wish: CompileWish) -> Callable[..., Any]:
        """Return this layer's compiled forward pass, or the original one for a backend that is not
        simulated."""
        import torch._dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit
        from torch._dynamo.utils import counters

        if wish.backend != "inductor":
            self._warn(f"backend={wish.backend}", "'uncompiled'")
            return forward
        mode = "reduce-overhead" if wish.records_graphs else "default"
        if mode != wish.mode:
            self._warn(f"mode={wish.mode}", f"mode={mode}")
        backend = _backend_of(wish.records_graphs, wish.budget, wish.autocast)
        compiled = torch._dynamo.optimize(backend)(forward)
        name = getattr(forward, "__qualname__", "a layer")

        def run(*arguments: Any, **keywords: Any) -> Any:
            before, kernels = self._run, len(self._recorder.kernels)
            breaks = counters["graph_break"].copy()
            self._trees.begin_call()
            try:
                with self._real_surroundings(), plain_refusals():
                    out = compiled(*arguments, **keywords)
            except FailOnRecompileLimitHit:
                # A real step runs this layer uncompiled. Here Dynamo raises, and nothing has run yet.
                self._recorder.warn(BEYOND_LIMIT.format(limit=wish.limit))
                return forward(*arguments, **keywords)
            # If another dispatch mode is active, Dynamo runs the code uncompiled without an error.
            if self._run == before:
                raise RehearsalError(NOT_COMPILED.format(name=name))
            # Dynamo may split the graph of a whole model, and run the code between the parts uncompiled.
            if wish.is_one_program and (beside := self._first_beside(kernels)):
                raise RehearsalError(_about_breaks(name, beside, counters["graph_break"] - breaks))
            return out

        return run

    def _warn(self, setting: str, nearest: str) -> None:
        self._recorder.warn(NOT_SIMULATED.format(setting=setting, nearest=nearest))

    def _first_beside(self, start: int) -> Kernel | None:
        """Return the first recorded kernel, from index `start` on, that ran outside of compiled programs.
        None without one.
        """
        spans = [span for span in self._within if span.stop > start]
        kernels = enumerate(self._recorder.kernels[start:], start)
        return next((kernel for at, kernel in kernels if not any(at in span for span in spans)), None)

    def time_products_padded(self, products: Sequence[PaddedProduct]) -> None:
        """Benchmark these products with and without padding, unless they were benchmarked before."""
        with self._inside():
            time_padding(self._policy, products, self._padded)

    def play(self, function: GraphFunction, arguments: list[Any]) -> Any:
        """Run a compiled program as a simulated CUDA graph, with the copies of its inputs."""
        with self._inside():
            return self._trees.call(function, arguments)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Context in which recorded kernels are marked as parts of compiled programs."""
        start = len(self._recorder.kernels)
        yield
        self._within.append(range(start, len(self._recorder.kernels)))

    @contextlib.contextmanager
    def _program(self, attention: tuple[str, ...] = (), **options: Any) -> Iterator[None]:
        """Context in which kernels are recorded as those of a compiled program; `attention` names its
        attention kernels.
        """
        import torch

        # Within an operator's dispatch, the program is torch's own Python code, which Dynamo compiles too.
        self._run += bool(torch._C._len_torch_dispatch_stack())
        self._notes.attention.extend(attention)
        with self._inside(), self._recorder.program(**options):
            yield

    @contextlib.contextmanager
    def _real_surroundings(self) -> Iterator[None]:
        """Context in which the recorder's global module hooks and modes are hidden from Dynamo, which would
        trace them into the program.
        """
        import torch
        from torch._dynamo import eval_frame
        from torch.nn.modules import module as hooked

        hooks = [getattr(hooked, name) for name in _HOOKS]
        before = [dict(hook) for hook in hooks]
        # Dynamo would trace the global hooks of the simulation into the program.
        for hook in hooks:
            hook.clear()
        try:
            with (
                patch.object(eval_frame, "_callback_from_stance", self._callback),
                # The simulation forces eager mode for a user's own compiled code.
                torch.compiler.set_stance("default"),
                patch.multiple(torch.Tensor, **self._own),
                patch.multiple(torch, **self._functions),
                self._autocast_of_cuda(),
            ):
                yield
        finally:
            for hook, was in zip(hooks, before, strict=True):
                hook.update(was)

    @contextlib.contextmanager
    def _autocast_of_cuda(self) -> Iterator[None]:
        """Context in which CUDA's autocast has the same state as the simulated autocast, for code that reads
        it.

        It casts nothing itself, because no tensor here is on CUDA.
        """
        import torch

        on, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # The model's code may query CUDA's autocast, but since no tensor is on CUDA, it casts nothing.
        if isinstance(self._policy, CudaPolicy):
            torch.set_autocast_enabled("cuda", torch.is_autocast_enabled(SWITCH))
            torch.set_autocast_dtype("cuda", torch.get_autocast_dtype(SWITCH))
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", on)
            torch.set_autocast_dtype("cuda", dtype)

    def compiled_graph(self, graph: Any, inputs: Sequence[Any], records: bool, budget: float) -> Any:
        """Return a function that runs a graph from Dynamo; it is cached for the process.

        With `records` (as CUDA graphs), the function is not cached.
        """
        with self._sizes.switch_to_dynamic(inputs) as any_sizes:
            key = self._policy, budget, graph.code, _surroundings(), any_sizes, _shape_of(inputs)
            # The key contains the graph's code without that of submodules, so only graphs without any are
            # shared.
            shared = not records and not list(graph.children())
            if shared and key in _GRAPHS:
                return _GRAPHS[key]
            compiled = self._lower(graph, inputs, records, budget)
            if shared:
                _GRAPHS[key] = compiled
            return compiled

    def _lower(self, graph: Any, inputs: Sequence[Any], records: bool, budget: float) -> Any:
        """Compile a graph with Inductor (its lowering to kernels), and return a function that runs the
        generated programs.
        """
        from torch._inductor import compile_fx as fx

        self._assumed, self._timed = [], []
        make = functools.partial(self._make, records=records)
        with (
            joint_passes_for(self._policy, self._assumed.append, self._timed.append),
            within_budget(budget),
        ):
            return fx.compile_fx(graph, inputs, inner_compile=make)

    def _make(self, graph: Any, inputs: Sequence[Any], *, records: bool, **options: Any) -> Any:
        # The key contains all inputs of AOTAutograd and Inductor, so equal layers are compiled once.
        key = (self._policy, str(_shape_of(inputs)), *_key_of(graph, options))
        program = _PROGRAMS.get(key)
        if program is None:
            strides: list[tuple[int, ...] | None] = []
            again = computed_again(graph) if options.get("is_backward") else None
            with noted_decisions() as decisions:
                text = lower(
                    graph, inputs, self._policy, lambda outs: strides.extend(_strides(outs)), **options
                )
            call = load(text, _launch, _choose)
            program = _Program(call, strides, again, decisions, attention_in(text))
            _PROGRAMS[key] = program
        # AOTAutograd needs the strides of the outputs, even from a stored program.
        _report_strides(program.strides)
        assumed = tuple(dict.fromkeys(self._assumed))
        run = _runs_program(program, assumed, tuple(self._timed))
        # Only CUDA has graphs, so on the CPU the program runs unchanged.
        if records and isinstance(self._policy, CudaPolicy):
            static = frozenset(options.get("static_input_idxs") or ())
            function = GraphFunction(run, static, bool(options.get("is_backward")), _inputs_given_back(graph))
            # Programs outlive the simulation that created them, so the current simulation is looked up.
            run = as_boxed(lambda arguments: _CURRENT_COMPILER[-1].play(function, arguments))
        return run


def _inputs_given_back(graph: Any) -> frozenset[int]:
    """Return the indices of inputs that a graph returns and does not use otherwise.

    Inductor returns them outside of the recorded graph. An input that the graph also reads is an input of the
    recorded part, which returns its copy (`get_graph_partition_signature`, `torch/_inductor/scheduler.py`).
    Its original can be freed.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output = next(iter(reversed(graph.graph.nodes)))
    return frozenset(number for number, node in enumerate(inputs) if set(node.users) == {output})


def _runs_program(program: _Program, assumed: Sequence[str], timed: Sequence[PaddedProduct]) -> Run:
    """Return a function that runs a program of Inductor, after the simulated benchmarks of the matrix
    products `timed`.
    """
    call, again, attention = program.call, program.again, program.attention

    def run(arguments: list[Any]) -> Any:
        now = _CURRENT_COMPILER[-1]
        for sentence in assumed:
            now._recorder.warn(sentence)
        # Inductor benchmarks products while it compiles, before the program's first run.
        now.time_products_padded(timed)
        for ran in _RUN_DECISIONS:
            ran.append(program.decisions)
        with now._program(attention, again=again):
            return call(arguments)

    return as_boxed(run)


def _about_breaks(name: str, kernel: Kernel, breaks: Counter[str]) -> str:
    """Return a warning that a kernel runs outside of compiled code, with Dynamo's reasons for graph
    breaks.
    """
    reasons = [str(reason).strip().splitlines()[0] for reason in breaks]
    location = f" in {kernel.module}" if kernel.module else ""
    breaks_text = f" (torch broke the graph: {reasons[-1]})" if reasons else ""
    return PARTLY_COMPILED.format(name=name, operator=kernel.operator, where=location, why=breaks_text)


_TRACED_POLICY: list[Policy] = []
"""The simulated device whose decisions are in Dynamo's caches; empty without one.

Tracing a layer again takes as long as simulating it.
"""

MAX_COMPILATIONS = 4096
"""Largest number of compilations that Dynamo allows for one layer's code."""

_RUN_DECISIONS: list[list[Decisions]] = []
"""Lists that collect Inductor's decisions for the programs that run."""

_CURRENT_COMPILER: list[Compiler] = []
"""The `Compiler` of the current simulation. Programs outlive the `Compiler` that created them."""


@functools.cache
def _backend_of(records: bool, budget: float, autocast: str) -> Callable[[Any, Sequence[Any]], Any]:
    """Return the `torch.compile` backend for these settings. It is cached: Dynamo's cache has the backend
    object in its keys.
    """

    def compile_graph(graph: Any, inputs: Sequence[Any]) -> Any:
        with compiling.autocast_begins(autocast):
            return _CURRENT_COMPILER[-1].compiled_graph(graph, inputs, records, budget)

    return compile_graph


@contextlib.contextmanager
def decisions_of_programs() -> Iterator[list[Decisions]]:
    """Yield a list that receives the decisions of each program at each of its runs inside the context."""
    ran: list[Decisions] = []
    _RUN_DECISIONS.append(ran)
    try:
        yield ran
    finally:
        _RUN_DECISIONS.pop()


def _launch(name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], layout: str) -> None:
    _CURRENT_COMPILER[-1]._recorder.launch(name, reads, writes, layout)


def _choose(source: str, changes: Sequence[torch.Tensor]) -> None:
    """At a generated kernel's first launch in a process, simulate the memory of Triton's benchmark of its
    configurations.
    """
    now = _CURRENT_COMPILER[-1]
    if source not in now._chosen:
        now._chosen.add(source)
        time_settings(now._policy, changes)


def _surroundings() -> tuple[Any, ...]:
    """Return the global state that AOTAutograd and Inductor read in addition to the graph, as a part of a
    cache key.
    """
    import torch
    from torch._functorch import config as functorch

    switch = torch.is_autocast_enabled(SWITCH), torch.get_autocast_dtype(SWITCH)
    tf32 = torch.backends.cuda.matmul.fp32_precision
    backward = functorch.backward_pass_autocast
    return *switch, torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), tf32, backward


@contextlib.contextmanager
def compiled_layers(
    policy: Policy, recorder: Recorder, notes: PolicyNotes, wish: CompileWish
) -> Iterator[None]:
    """Context in which a Setup's compiled layers are compiled for the simulated device.

    The recorder receives their memory and kernels. Layers with a cache have torch's recompile limit.
    """
    import torch
    import torch._dynamo
    from torch._dynamo import eval_frame
    from torch._functorch import config as functorch
    from torch._prims import rng_prims

    compiler = Compiler(policy, recorder, notes, eval_frame._callback_from_stance)
    nothing_else_compiles = os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # as in a plan search
    # Nothing else is compiled in such a worker, so Dynamo's traces for the same policy stay valid.
    # A limit counts the programs of one run, so earlier ones are dropped.
    if wish.cache or not (nothing_else_compiles and [policy] == _TRACED_POLICY):
        torch._dynamo.reset()
        _TRACED_POLICY[:] = [] if wish.cache else [policy]
    # torch caches the kernel of each operator in traced graphs, but the simulation overrides kernels.
    clear_traced_kernels()
    _CURRENT_COMPILER.append(compiler)
    try:
        with (
            patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}),
            patch.object(compiling, "compiled_function", compiler.compiled_function),
            patch.object(torch._ops, "resolve_key", composed_as_elsewhere(torch._ops.resolve_key)),
            patch.object(rng_prims, "get_device", _where_numbers_are_drawn(rng_prims.get_device)),
            # torch would load a cached graph without running Inductor, and so without its decisions.
            functorch.patch(enable_autograd_cache=False),
            # Each size is compiled by itself, so that buffer sizes are numbers (`FirstSizes`).
            torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=MAX_COMPILATIONS),
            torch._dynamo.config.patch(accumulated_recompile_limit=MAX_COMPILATIONS),
            compiling.whole_layers(),
            layers_with_cache(wish.limit) if wish.cache else contextlib.nullcontext(),
        ):
            yield
    finally:
        _CURRENT_COMPILER.pop()
        if not nothing_else_compiles:
            torch._dynamo.reset()  # restores the limited number of compilations per layer for the user
            _TRACED_POLICY.clear()
        clear_traced_kernels()


def _where_numbers_are_drawn(get_device: Callable[..., str | None]) -> Callable[..., str | None]:
    """Return a replacement of `get_device`: it returns the device whose random state compiled code saves for
    recomputation.

    That is the host, because the state of a GPU's generator is on the host too, and no GPU exists. torch's
    own function returns `meta` for tensors on `meta`, and None before 2.13.
    """

    def device_of(args: Any, kwargs: Any) -> str | None:
        device = get_device(args, kwargs)
        return "cpu" if device in ("meta", "cuda", None) else device

    return device_of


def _key_of(graph: Any, options: Any) -> tuple[Any, ...]:
    nodes = str([_shape_of(node.meta.get("val")) for node in graph.graph.nodes])  # some sizes are symbols
    visible = tuple(next(iter(reversed(graph.graph.nodes))).meta.get("user_visible_output_idxs", ()))
    settings = tuple(str(options.get(name)) for name in ("is_backward", "is_inference", "static_input_idxs"))
    return graph.code, nodes, visible, settings


def _shape_of(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        kind = type(value) is torch.nn.Parameter, value.requires_grad, value.is_leaf
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset(), *kind
    return tuple(map(_shape_of, value)) if isinstance(value, (list, tuple)) else str(value)


def _strides(outputs: Any) -> Iterator[tuple[int, ...] | None]:
    """Yield the strides of each output of a compiled graph; None for an output that is no tensor."""
    from torch._inductor.ir import IRNode

    for out in outputs or ():
        is_tensor = isinstance(out, IRNode) and out.has_tensor_output()
        yield tuple(int(stride) for stride in out.get_layout().stride) if is_tensor else None


def _report_strides(strides: Sequence[tuple[int, ...] | None]) -> None:
    """Report the strides of a graph's outputs to AOTAutograd, as Inductor does."""
    import torch

    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides[:] = strides


class FirstSizes:
    """Records the input sizes with which each function was first compiled in a simulation, to detect
    recompilations with dynamic shapes.

    torch compiles a function with dynamic shapes the second time. An example is T5's decoder, whose layers
    share their code with the encoder's. Here each is compiled for its own sizes, so that buffer sizes are
    numbers. One allocation differs. With dynamic shapes AOTAutograd expects contiguous gradients, and
    otherwise gradients with the strides of the outputs. It copies all others (`MemoryFormatMeta.from_tensor`,
    `torch/_functorch/_aot_autograd/schemas.py`). torch 2.11 expects the same in both cases, unless its
    setting is changed.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, Any] = {}  # shape of the first input that is no weight, by Dynamo's frame

    @contextlib.contextmanager
    def switch_to_dynamic(self, inputs: Sequence[Any]) -> Iterator[bool]:
        """Context that yields True if torch would compile Dynamo's current graph with dynamic shapes, given
        these inputs.

        Inside the context, AOTAutograd uses the layout of gradients for that case.
        """
        import torch
        from torch._functorch import config as functorch
        from torch._guards import CompileContext

        number = getattr(CompileContext.current_compile_id(), "frame_id", None)
        sizes = next(
            (tensor.shape for tensor in inputs if isinstance(tensor, torch.Tensor) and not tensor.is_leaf),
            None,
        )
        # torch compiles a function with dynamic shapes when it meets a second size.
        any_sizes = number is not None and self._sizes.setdefault(number, sizes) != sizes
        # With dynamic shapes, AOTAutograd expects contiguous gradients and copies all others.
        as_outputs = functorch.guess_tangent_strides_as_outputs and not any_sizes
        with functorch.patch(guess_tangent_strides_as_outputs=as_outputs):
            yield any_sizes


def clear_traced_kernels() -> None:
    """Clear torch's caches of operators' kernels for traced graphs."""
    import torch

    for packet in vars(torch.ops.aten).values():
        for overload in vars(packet).values() if hasattr(packet, "_qualified_op_name") else ():
            if isinstance(overload, torch._ops.OpOverload):
                overload._dispatch_cache.clear()


def composed_as_elsewhere(resolve_key: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `resolve_key` for traced operators that composes operators as on a device.

    torch gives some composite operators (a loss) a shape function in Python, and treats it as a kernel below
    autograd. On `meta` alone they would have no gradient.
    """
    import torch

    key = torch._C.DispatchKey
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

    def resolve(operator: Any, mode: Any) -> Any:
        composed = mode == key.AutogradMeta and isinstance(operator, torch._ops.OpOverload)
        if composed and not operator.has_kernel_for_dispatch_key(mode):
            name = operator.name()
            if has_kernel(name, key.CompositeImplicitAutograd) and not has_kernel(name, key.CPU):
                return key.CompositeImplicitAutograd
        return resolve_key(operator, mode)

    return resolve


def time_settings(policy: Policy, changes: Sequence[torch.Tensor]) -> None:
    """Allocate and free the memory that Inductor's benchmark takes on this GPU, for a kernel that changes
    these tensors."""
    import torch

    nbytes = getattr(policy, "cache_bytes", 0)
    if nbytes and times_anything():
        # The buffers are alive together until the function returns, as in Inductor's benchmark.
        beside = [torch.empty(nbytes, dtype=torch.uint8, device="meta")]
        beside += [
            torch.empty_like(tensor) for tensor in changes if tensor.numel() * tensor.itemsize <= nbytes
        ]
