"""The recorder: a dispatch mode that writes allocations, frees and kernels of a run to a trace.

Every operator of the run passes `__torch_dispatch__` once, below autograd and autocast. So the recorder
receives the operators that a device would run. It corrects the differences between `meta` and a device.

The garbage collector is off during a simulation, because it would free cycles at arbitrary moments.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit.rehearsal.device.other_programs import missing_kernel_packages
from snugfit.rehearsal.record.accumulation import sole_owner
from snugfit.rehearsal.record.allocations import Allocations
from snugfit.rehearsal.record.asker import lists_in_index
from snugfit.rehearsal.record.copies import copies_recorded
from snugfit.rehearsal.record.kernels import (
    CONTRACTIONS,
    MATRICES,
    KernelCost,
    copies_in,
    cost_by_lengths,
    cost_of_generated,
    group_of,
    name_of_call,
    reads_groups,
    releases_context,
    split_groups,
)
from snugfit.rehearsal.record.module_tracker import ModuleTracker
from snugfit.rehearsal.record.questions import ValueReads, numbers_watched
from snugfit.rehearsal.record.shadows import Shadows
from snugfit.rehearsal.record.shape_cache import SHAPE_CACHE, ScratchCache
from snugfit.rehearsal.trace.trace import (
    ALONE,
    COPY_IN,
    DEFAULT_STREAM,
    GENERATED,
    STAGE_BACK,
    TRITON,
    Block,
    Kernel,
    Mark,
    MarkKind,
    Recording,
    Trace,
)
from snugfit.results.footprint import Kind
from snugfit.step.step import Observer
from snugfit.techniques.registry import tensors_beside

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.copies import HostCopies
    from snugfit.rehearsal.record.shape_cache import KnownCall, Operator
    from snugfit.techniques.setup import Setup

aten = torch.ops.aten


STEPS_DIFFER = (
    "The allocations of a step depend on the values in its batches, so they differ from step to step. "
    "The figures are for the third step on synthetic batches. snugfit measure shows further steps."
)


class Recorder(TorchDispatchMode, Observer):
    """Dispatch mode that records the allocations, frees and kernels of a run on `meta` tensors."""

    allocations: type[Allocations] = Allocations

    def __init__(
        self, policy: Policy, steps: int, *, routing: str = "balanced", hides_masks: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.steps = policy, steps
        self.rank: int | None = None
        """Number of the rank (process) that is simulated; None for the rank with the highest memory use."""
        self._modules = ModuleTracker()
        self._shadows = Shadows(routing)
        self._questions = ValueReads(
            self._shadows,
            wait=self.wait,
            doubt=self.warn,
            call=lambda: self._modules.call,
            hides_masks=hides_masks,
        )
        self.memory = self.allocations(policy, self._modules)
        """Allocations and frees of the run."""
        self._scratch = ScratchCache(policy)
        self._marks: list[Mark] = [Mark(0, -1, "build")]
        self.kernels: list[Kernel] = []
        self._waits: list[int] = []
        self.times_waited = 0
        self.host_copies = 0
        """Number of copies from the host's memory to the device."""
        self._phase, self._step = "build", -1
        self._views = 0  # since the last kernel
        self._released = False  # True after the driver releases the context's address space
        self._compiled = False  # True while a compiled program runs
        self._programs = 0  # programs started since the last kernel
        self._played = False  # True while a CUDA graph is replayed
        self._recorded_in = -1  # the last step in which a CUDA graph was recorded or scheduled for it
        self._again: Counter[int] | None = None
        """Number of matrix products that the running compiled backward pass has yet to recompute, by their
        FLOPs.

        None in a compiled forward pass, and outside of compiled code.
        """
        self._owners: dict[torch.Tensor, str] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._doubts: dict[str, None] = {}
        self.host: HostCopies | None = None
        """Recorder of weights and optimizer states in host memory; None if there are none."""
        self._undo = contextlib.ExitStack()

    @classmethod
    def micro_batches_to_settle(cls, setup: Setup) -> float:
        """Return the number of additional micro-batches that run before each further one repeats the
        previous; infinite if none repeats.
        """
        return 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not check for compiled code at each operator. Nothing is compiled
        under the recorder."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that the recorder receives the operators of compiled code, and not those of its
        compilation.

        Otherwise torch would silently run the uncompiled code.
        """
        return True

    def _count_host_copy(self) -> None:
        self.host_copies += 1

    def __enter__(self) -> Recorder:
        self._writes_in_place = sole_owner(self.policy).writes_in_place
        self._undo.enter_context(self._modules.follow())
        self._undo.enter_context(numbers_watched(self._questions, self._shadows, self._count_host_copy))
        self._undo.enter_context(copies_recorded(self._add_to_last_step, self.wait))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        self._undo.close()

    def recording(self, attention: Iterable[str]) -> Recording:
        """Return the recording: the trace, with categories of blocks that depend on the whole run, and all
        marks."""
        # Optimizers create their states in the first update, so states are labelled at the end of the run.
        self._claim_states()
        phases = [mark for mark in self._marks if mark.kind is MarkKind.PHASE]
        blocks = self.memory.blocks(phases)
        if self._questions.vary and _last_steps_differ(blocks, self.steps):
            self.warn(STEPS_DIFFER)
        # The other marks are needed only to split the run into relative events (`trace/relative.py`).
        lasting = (MarkKind.PHASE, MarkKind.CONTEXT_RELEASED, MarkKind.CACHE_EMPTIED)
        trace = Trace(
            blocks,
            tuple(self.memory.events),
            tuple(mark for mark in self._marks if mark.kind in lasting),
            tuple(self.kernels),
            tuple(self._waits),
            tuple(sorted(set(attention))),
            tuple(self._doubts),
            self.memory.of_graphs,
            dict(self.memory.streams),
        )
        settled = self._recorded_in < self.steps - 2
        return Recording(trace, tuple(self._marks), self._questions.vary, settled)

    def clear(self) -> None:
        """Clear the recorded lists, which `recording` has copied.

        A model and its recorder reference each other, so the garbage collector would have to traverse these
        lists.
        """
        for written in (self._marks, self.kernels, self._waits):
            written.clear()
        self.memory.clear()

    # ---- methods of the observer ---------------------------------------------------------------------

    def step_begins(self, index: int) -> None:
        """Record in the trace that optimizer step `index` begins."""
        self._step = index
        self.phase("load")

    def step_ends(self, index: int) -> None:
        """Record in the trace that optimizer step `index` ends."""
        self._mark(MarkKind.STEP_END)

    def phase(self, name: str) -> None:
        """Record in the trace that a phase begins; all later events belong to that phase."""
        # Before an update all gradients exist; the update or `zero_grad` may free them.
        if name == "update":
            self._claim_gradients()
        if name == "load":
            self._questions.next_batch()
        self._phase = name
        self.memory.phase, self.memory.step = name, self._step
        self._views = self._programs = 0
        self._modules.reset_counts()
        self._mark(MarkKind.PHASE)

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Assign names and categories (weight, optimizer state, ...) to the memory of the built model and
        optimizer.
        """
        self._optimizer = optimizer
        self._modules.name_modules(model)
        for sentence in missing_kernel_packages(model):
            self.warn(sentence)
        for name, module in model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._owners[tensor] = name
                self.claim(tensor, Kind.WEIGHTS, name)
            # Initial weights are known in the first step only, and every later step would differ from it.
            for parameter in module.parameters(recurse=False):
                if parameter.is_meta:
                    self._shadows.mark_unknown(parameter)
                for owner, beside in tensors_beside(parameter):
                    self.claim(getattr(owner, beside), Kind.WEIGHTS, name)

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "") -> None:
        """Label this tensor's bytes (weight, gradient, optimizer state, ...), with their module if one is
        given.
        """
        self.memory.claim(tensor, kind, module)

    def state(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the value of a tensor on `meta`, which is tracked on the CPU."""
        self._shadows.set(tensor, value)

    def current_phase(self) -> str:
        """Return the current phase of the recorded step."""
        return self._phase

    def warn(self, sentence: str) -> None:
        """Add a warning about an assumption to the trace; equal warnings are added once."""
        self._doubts[sentence] = None

    def _claim_gradients(self) -> None:
        for parameter, name in self._owners.items():
            if parameter.grad is not None:
                self.claim(parameter.grad, Kind.GRADIENTS, name)

    def _claim_states(self) -> None:
        states = self._optimizer.state.items() if self._optimizer else ()
        trained = (owner for owner in self._owners if owner.requires_grad)  # optimizers take attributes over
        for parameter, state in (*states, *((owner, vars(owner)) for owner in trained)):
            for value in state.values():
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        self.claim(tensor, Kind.OPTIMIZER_STATES, self._owners.get(parameter, ""))

    # ---- dispatch --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operator = SHAPE_CACHE.operator(func)
        if operator.is_composite or (types and any(map(_holds_tensors, types))):
            return self._hand_on(func, types, args, kwargs)
        if operator.is_view:  # half of all operators: no kernel, and at most an allocation
            out = func(*args, **kwargs)
            self.memory.add_outputs(operator.name, out)
            self._views += (not isinstance(out, torch.Tensor) or out.is_meta) and not self._compiled
            return out
        if (
            self.host is not None
            and operator.asks
            # Copies of weights and states to the host come first: they move bytes and read no value.
            and (answer := self.host.copy_out(func, args, kwargs)) is not NotImplemented
        ):
            return answer
        if operator.asks and (answer := self._questions.read_value(func, args, kwargs)) is not NotImplemented:
            return answer
        # Under an active mode, autograd adds gradients out of place. A device adds into the first one.
        in_place = not kwargs and self._phase == "backward" and self._writes_in_place(func, args)
        # A GPU finds the positions of a mask's true elements with `nonzero`, which makes the host wait.
        if operator.by_masks and args[0].is_meta:
            args = (args[0], self._indices(args), *args[2:])
        # With `output_size`, the result's shape follows from the call and no value is read.
        shaped = operator.shaped_by_data and args[0].is_meta and "output_size" not in kwargs
        call = None if shaped else SHAPE_CACHE.call(operator, args, kwargs)
        if shaped:
            out = self._questions.results_of(func, args, kwargs)
        else:
            out = args[0] if in_place else SHAPE_CACHE.run(operator, call, args, kwargs)
        if not (isinstance(out, torch.Tensor) and out.is_meta):
            # An operator whose result is not on `meta` ran on the host, with real numbers.
            self._questions.host_ran(args, out)
            if isinstance(out, torch.Tensor):
                return out  # work of the host
        self._write_down(operator, call, args, kwargs, out, in_place=in_place)
        if (
            self.host is not None
            and func is aten._to_copy.default
            and self.host.copies_back(func, args, kwargs)
        ):
            self.claim(out, Kind.WEIGHTS)
        if in_place:
            # The sum is in the storage of the first operand, whose value it replaces.
            self._shadows.mark_unknown(out)
        elif not shaped:
            self._shadows.follow(operator, args, kwargs, out)
        return out

    def _hand_on(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return NotImplemented for an operator on tensors that wrap others.

        Otherwise decompose a composite operator, and return its result. A wrapper later runs operators on its
        inner tensors, and these are recorded. Wrappers run below autograd, which otherwise decomposes
        composite operators.
        """
        if any(map(_holds_tensors, types)):
            return NotImplemented
        # torch switches the mode off inside the dispatch; switched on again, it receives the operators of the
        # parts.
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _write_down(
        self,
        operator: Operator,
        call: KnownCall | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        *,
        in_place: bool,
    ) -> None:
        """Record an operator's allocations and its kernel, after it ran on `meta`."""
        # A product that adds to its own result returns nothing and has it as `out`.
        result = kwargs.get("out") if out is None else out
        # A cached scratch is that of the call out of place.
        scratch = self._scratch.of(operator, None if in_place else call, args, result)
        name = name_of_call(operator.name, args, kwargs)
        self.memory.add_kernel(name, out, scratch, self.policy.workspaces(name, args))
        last_step = self.is_last_step
        # In the last step, `_run` counts the wait and records its position.
        self.times_waited += not last_step and reads_groups(operator.func, args, self.policy)
        copies = copies_in(operator.func, args)
        self.host_copies += copies
        # Earlier steps need kernels only until one releases the address space of the CUDA context.
        if not last_step and self._released:
            return
        cost = SHAPE_CACHE.cost(operator, call, args, kwargs, out)
        if not self._released and cost and releases_context(operator.name) and not copies:
            self._released = True
            self._mark(MarkKind.CONTEXT_RELEASED)
        if last_step:
            self._run(operator.func, args, kwargs, name, cost_by_lengths(cost, name, args, self._shadows.of))

    def _indices(self, args: tuple[Any, ...]) -> list[torch.Tensor | None]:
        """Return an operator's indices, with masks replaced by the positions of their true elements.

        The source is `expandTensors` in `native/IndexingUtils.h`. A single number written by masks alone uses
        `masked_fill`, which reads no value.
        """
        indices: list[torch.Tensor | None] = list(args[1])
        self._read_lists(indices)
        writes_number = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        if writes_number and all(tensor is None or tensor.dtype is torch.bool for tensor in indices):
            return indices
        numbers: list[torch.Tensor | None] = []
        for tensor in indices:
            if tensor is None or tensor.dtype not in (torch.bool, torch.uint8):
                numbers.append(tensor)
                continue
            # The call goes through the dispatch, so that the kernel and the wait of `nonzero` are recorded.
            nonzero = self.__torch_dispatch__(aten.nonzero.default, (), (tensor,))
            selects = ((nonzero, 1, dim) for dim in range(tensor.dim()))
            numbers += [self.__torch_dispatch__(aten.select.int, (), select) for select in selects]
        return numbers

    def _read_lists(self, indices: Sequence[torch.Tensor | None]) -> None:
        """Set the tracked values of index tensors that the source code writes as lists, if number and shapes
        match.
        """
        unknown = [
            tensor
            for tensor in indices
            if tensor is not None and tensor.is_meta and self._shadows.of(tensor) is None
        ]
        values = [torch.tensor(numbers, device="cpu") for numbers in lists_in_index()] if unknown else []
        # The source shows lists in order, without the index that each one belongs to.
        if [(tensor.shape, tensor.dtype) for tensor in unknown] == [
            (value.shape, value.dtype) for value in values
        ]:
            for tensor, value in zip(unknown, values, strict=True):
                self.memory.add_outputs("aten::index", tensor)
                self._shadows.set(tensor, value)

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operator: str,
        cost: KernelCost | None,
    ) -> None:
        """Record an operator of the last step, if it has a kernel."""
        if cost is None:
            self._views += not self._compiled
        elif reads_groups(func, args, self.policy):
            self.wait()
            for product in split_groups(args, kwargs, cost):
                self._views += MATRICES
                self._add_kernel("aten::mm", product)
        else:
            self._add_copy_or(operator, func, args, kwargs, cost)

    def _add_copy_or(
        self, operator: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cost: KernelCost
    ) -> None:
        """Record the kernel of an operator. If the operator copies from the host, record it as a copy."""
        if self.host is not None and self.host.copies_back(func, args, kwargs):
            # The last tensor argument is the source of the copy; its bytes are read and written.
            source = next(argument for argument in reversed(args) if isinstance(argument, torch.Tensor))
            self._add_kernel(STAGE_BACK, cost._replace(nbytes=2 * source.nbytes))
        else:
            self._add_kernel(COPY_IN if copies_in(func, args) else operator, cost)

    def _place(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the simulated CUDA stream of the kernel with this index, and the indices of the kernels for
        which it waits.
        """
        return DEFAULT_STREAM, ()

    def _add_kernel(self, operator: str, cost: KernelCost, peers: tuple[int, int] = ALONE) -> None:
        self._mark(MarkKind.KERNEL)
        modules = self._modules
        stream, after = self._place(len(self.kernels))
        kernel = Kernel(
            operator,
            modules.path(self._phase),
            self._phase,
            *cost,
            recomputed=self._is_recomputed(operator, cost.flops),
            modules=modules.first_kernel_of(),
            views=self._views,
            checkpoints=modules.checkpoints,
            intercepted=modules.intercepted,
            compiled=self._compiled,
            programs=self._programs,
            functions=modules.functions,
            played=self._played,
            stream=stream,
            after=after,
            peers=peers,
        )
        self.kernels.append(kernel)
        self._views = self._programs = 0
        modules.reset_counts()

    @contextlib.contextmanager
    def program(self, again: Counter[int] | None = None, *, lowered: bool = True) -> Iterator[None]:
        """Context in which kernels are recorded as launched by compiled code (`torch.compile`).

        `again` is None for a forward pass. For a backward pass it counts recomputed matrix products by FLOPs.
        Code that is not `lowered` runs torch's own operators.
        """
        self._programs += 1
        self._compiled, self._again = lowered, None if again is None else again.copy()
        try:
            yield
        finally:
            self._compiled = False

    def records_graph(self) -> None:
        """Record that compiled code is recorded as a CUDA graph in this step or later."""
        self._recorded_in = self._step

    @contextlib.contextmanager
    def played_back(self) -> Iterator[None]:
        """Context whose kernels are marked as parts of one CUDA graph, which the host launches as a whole."""
        self._played = True
        try:
            yield
        finally:
            self._played = False

    def _is_recomputed(self, operator: str, flops: int) -> bool:
        """Return True if this kernel recomputes a part of the forward pass in the backward pass."""
        if self._phase != "backward":
            # Uncompiled recomputation has gradient mode on. A forward program in backward belongs to a
            # checkpoint.
            return False
        if not self._compiled or self._again is None:
            return self._compiled or torch.is_grad_enabled()
        # A joint program has recomputed and new matrix products, which only their FLOPs distinguish.
        again = self._again[flops] > 0 and group_of(operator) == CONTRACTIONS
        self._again[flops] -= again
        return again

    def launch(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], layout: str = ""
    ) -> None:
        """Record a kernel that compiled code generated, or a library's Triton kernel, with the tensors that
        it reads and writes."""
        for tensor in writes:
            self._shadows.mark_unknown(tensor)
        if not self._released:
            self._released = True
            self._mark(MarkKind.CONTEXT_RELEASED)
        # Outside of a compiled program, a launch is a library's own Triton kernel.
        if self.is_last_step:
            origin = GENERATED if self._compiled else TRITON
            self._add_kernel(f"{origin}{name}", cost_of_generated(reads, writes, layout))

    def _add_to_last_step(self, operator: str, cost: KernelCost, peers: tuple[int, int] = ALONE) -> None:
        if self.is_last_step:
            self._add_kernel(operator, cost, peers)

    def wait(self) -> None:
        """Record that the host waits for the device, for example at `.item()`."""
        self.times_waited += 1
        if self.is_last_step:
            self._waits.append(len(self.kernels))
            self._mark(MarkKind.WAIT)

    @property
    def is_last_step(self) -> bool:
        """True in the last step, whose kernels are recorded."""
        return self._step == self.steps - 1

    def add_kernels(self, kernels: Sequence[Kernel]) -> None:
        """Add kernels that run again, such as those of a replayed CUDA graph, to the trace."""
        mark = Mark(len(self.memory.events), self._step, self._phase, MarkKind.KERNEL)
        self._marks += [mark] * len(kernels)
        self.kernels += kernels

    def count_function(self) -> None:
        """Count a library's autograd Function in Python that runs before the next kernel."""
        self._modules.functions += 1

    def count_interception(self) -> None:
        """Count a tensor or an operator that passes through Python before the next kernel."""
        self._modules.intercepted += 1

    def empty_cache(self) -> None:
        """Record that the allocator releases its cached memory (`torch.cuda.empty_cache`)."""
        self._mark(MarkKind.CACHE_EMPTIED)

    def _mark(self, kind: MarkKind) -> None:
        self._marks.append(Mark(len(self.memory.events), self._step, self._phase, kind))


@functools.cache
def _holds_tensors(kind: type[Any]) -> bool:
    """Return True if tensors of this class wrap others (`torch.Tensor._make_wrapper_subclass`)."""
    return hasattr(kind, "__tensor_flatten__")


def _last_steps_differ(blocks: Sequence[Block], steps: int) -> bool:
    """Return True if the last two steps allocate different bytes, although both have all optimizer states."""
    by_step = [
        Counter((block.operator, block.nbytes) for block in blocks if block.step == step)
        for step in range(steps)
    ]
    # With two steps, the first has no optimizer states yet, so they always differ.
    return steps > 2 and by_step[-1] != by_step[-2]
