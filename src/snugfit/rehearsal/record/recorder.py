"""The recorder: a dispatch mode that writes allocations, frees and kernels of a run onto a trace.

Every operator of the run passes `__torch_dispatch__` once, below autograd and autocast, so what is seen is
what a device would run. Three things differ between `meta` and a device, and are set right here:

- the autograd engine adds gradients in place when it alone holds the first one, but not while a dispatch
  mode is active (`isTensorSubclassLike`); so an addition that the engine would do in place returns its first
  operand (`accumulation.py`);
- `.item()` and `bool()` have no value to give: `_scalar` answers by meaning;
- some kernels allocate in another order than they return, and take scratch: the policy knows.

The garbage collector is off during a rehearsal: cycles would otherwise be freed at a moment of its choosing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit.rehearsal.device.other_programs import kernels_asked_for
from snugfit.rehearsal.record.accumulation import sole_owner
from snugfit.rehearsal.record.allocations import Allocations
from snugfit.rehearsal.record.kernels import MATRICES, KernelCost, apart, copies_in, releases_context
from snugfit.rehearsal.record.module_tracker import ModuleTracker
from snugfit.rehearsal.record.shape_cache import SHAPE_CACHE, ScratchCache
from snugfit.rehearsal.trace.trace import COPY_IN, Kernel, Mark, MarkKind, Recording, Trace
from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy

aten = torch.ops.aten

ANY = frozenset({"aten::any", "aten::isinf", "aten::isnan"})
"""Operators whose truth ordinary data makes false."""


class Recorder(TorchDispatchMode):
    """Writes a run on `meta` tensors onto a trace; it is the run's observer too."""

    def __init__(self, policy: Policy, steps: int, *, padded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.steps, self.padded = policy, steps, padded
        self._modules = ModuleTracker()
        self._memory = Allocations(policy, self._modules)
        self._scratch = ScratchCache(policy)
        self._marks: list[Mark] = [Mark(0, -1, "build")]
        self._kernels: list[Kernel] = []
        self._waits: list[int] = []
        self._phase, self._step = "build", -1
        self._views = 0  # since the last kernel
        self._released = False  # whether the context is
        self._owners: dict[torch.Tensor, str] = {}
        self._any_results: set[int] = set()
        self._optimizer: torch.optim.Optimizer | None = None
        self._doubts: dict[str, None] = {}
        self._undo = contextlib.ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, says torch's own switch: nothing compiles here, and skipping it costs every operator."""
        return False

    def __enter__(self) -> Recorder:
        self._writes_in_place = sole_owner(self.policy).writes_in_place
        self._undo.enter_context(self._modules.follow())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        self._undo.close()

    def recording(self, attention: Iterable[str]) -> Recording:
        """What was written, with the kinds of bytes that only the end of a run shows."""
        self._claim_states()
        phases = [mark for mark in self._marks if mark.kind is MarkKind.PHASE]
        lasting = (MarkKind.PHASE, MarkKind.CONTEXT_RELEASED)
        trace = Trace(
            self._memory.blocks(phases),
            tuple(self._memory.events),
            tuple(mark for mark in self._marks if mark.kind in lasting),
            tuple(self._kernels),
            tuple(self._waits),
            tuple(sorted(set(attention))),
            tuple(self._doubts),
        )
        return Recording(trace, tuple(self._marks))

    # ---- the observer's side -------------------------------------------------------------------------

    def step_begins(self, index: int) -> None:
        """Optimizer step `index` begins."""
        self._step = index
        self.phase("load")

    def step_ends(self, index: int) -> None:
        """Optimizer step `index` has ended."""
        self._mark(MarkKind.STEP_END)

    def phase(self, name: str) -> None:
        """Everything from here on belongs to this phase."""
        if name == "update":
            self._claim_gradients()
        self._phase = name
        self._memory.phase, self._memory.step = name, self._step
        self._views = self._modules.checkpoints = 0
        self._mark(MarkKind.PHASE)

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Model and optimizer are built: their storages get names and kinds."""
        self._optimizer = optimizer
        self._modules.name_modules(model)
        for sentence in kernels_asked_for(model):
            self.doubt(sentence)
        for name, module in model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._owners[tensor] = name
                self.claim(tensor, Kind.WEIGHTS, name)

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "") -> None:
        """This tensor's bytes are of this kind, and of this module where one is named."""
        self._memory.claim(tensor, kind, module)

    def current_phase(self) -> str:
        """The phase of the step that is on."""
        return self._phase

    def doubt(self, sentence: str) -> None:
        """The trace rests on an assumption, which this sentence states; it is told once."""
        self._doubts[sentence] = None

    def _claim_gradients(self) -> None:
        for parameter, name in self._owners.items():
            if parameter.grad is not None:
                self.claim(parameter.grad, Kind.GRADIENTS, name)

    def _claim_states(self) -> None:
        states = self._optimizer.state.items() if self._optimizer else ()
        for parameter, state in states:
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
        if func is aten._local_scalar_dense.default:
            return self._scalar(func, args, kwargs)
        if func is aten.equal.default and args[0].device.type == "meta":
            self.wait()
            return True
        operator = SHAPE_CACHE.operator(func)
        if operator.is_view:  # every second operator: no kernel, and an allocation at most
            out = func(*args, **kwargs)
            self._memory.add_outputs(operator.name, out)
            self._views += not isinstance(out, torch.Tensor) or out.is_meta
            return out
        in_place = not kwargs and self._phase == "backward" and self._writes_in_place(func, args)
        call = SHAPE_CACHE.call(operator, args, kwargs)
        out = args[0] if in_place else SHAPE_CACHE.run(operator, call, args, kwargs)
        if isinstance(out, torch.Tensor) and not out.is_meta:
            return out  # the host's own work
        scratch = self._scratch.of(operator, None if in_place else call, args, out)
        self._memory.add_kernel(operator.name, out, scratch, self.policy.workspaces(operator.name))
        last_step = self._step == self.steps - 1
        if last_step or not self._released:
            cost = SHAPE_CACHE.cost(operator, call, args, kwargs, out)
            if not self._released and cost and releases_context(operator.name) and not copies_in(func, args):
                self._released = True
                self._mark(MarkKind.CONTEXT_RELEASED)
            if last_step:
                self._run(func, args, kwargs, operator.name, cost)
        if operator.name in ANY and isinstance(out, torch.Tensor):
            self._any_results.add(id(out))
            weakref.finalize(out, self._any_results.discard, id(out)).atexit = False
        return out

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operator: str,
        cost: KernelCost | None,
    ) -> None:
        """An operator of the steady step runs on the device, if it has a kernel."""
        if cost is None:
            self._views += 1
        elif func is aten._grouped_mm.default and not self.policy.fuses_groups(args[0].dtype):
            self.wait()
            for product in apart(args, kwargs, cost):
                self._views += MATRICES
                self._add_kernel("aten::mm", product)
        else:
            self._add_kernel(COPY_IN if copies_in(func, args) else operator, cost)

    def _add_kernel(self, operator: str, cost: KernelCost) -> None:
        self._mark(MarkKind.KERNEL)
        again = self._phase == "backward" and torch.is_grad_enabled()
        modules = self._modules
        host = again, modules.first_kernel_of(), self._views, modules.checkpoints
        self._kernels.append(Kernel(operator, modules.path(self._phase), self._phase, *cost, *host))
        self._views = modules.checkpoints = 0

    def _scalar(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a one-element tensor. Real host tensors have theirs. A device's are unknown: numbers
        are 0; of truths, `any` and its kind are False and the rest True (what ordinary data gives), except
        that a mask is not all True when the job pads."""
        tensor = args[0]
        if tensor.device.type != "meta":
            return func(*args, **kwargs)
        self.wait()
        if tensor.dtype == torch.bool:
            return id(tensor) not in self._any_results and not self.padded
        return 0.0 if tensor.is_floating_point() else 0

    def wait(self) -> None:
        """The host waits for the device."""
        if self._step == self.steps - 1:
            self._waits.append(len(self._kernels))
            self._mark(MarkKind.WAIT)

    def _mark(self, kind: MarkKind) -> None:
        self._marks.append(Mark(len(self._memory.events), self._step, self._phase, kind))
