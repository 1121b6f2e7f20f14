"""The recorder: a dispatch mode that writes births, deaths and kernels of a rehearsed run onto a trace.

Every operator of the run passes `__torch_dispatch__` once, below autograd and autocast, so what is seen is
what a device would be asked to run. A storage's birth is the first operator that returns it; its death is
the moment Python's and autograd's last reference goes (a weak reference's callback). Three things differ
between `meta` and a device, and are set right here:

- the autograd engine adds gradients in place when it alone holds the first one, but not while a dispatch
  mode is active (`isTensorSubclassLike`); so an addition that the engine would do in place returns its first
  operand (`accumulation.py`);
- `.item()` and `bool()` have no value to give: `_scalar` answers by meaning;
- some kernels allocate in another order than they return, and take scratch: the policy knows.

The garbage collector is off during a rehearsal: cycles would otherwise die at a moment of its choosing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit.rehearsal.device.buffers import ONE_OUTPUT, OUTPUTS, Scratch
from snugfit.rehearsal.device.context import KEEPING, SETTLED
from snugfit.rehearsal.record.accumulation import sole_owner
from snugfit.rehearsal.record.checkpoints import tell_of_checkpoints
from snugfit.rehearsal.record.described import described
from snugfit.rehearsal.record.kernels import MATRICES, Description, apart, copies_in
from snugfit.rehearsal.record.kinds import kinds
from snugfit.rehearsal.record.module_tracker import Whereabouts
from snugfit.rehearsal.record.shape_cache import REMEMBERED, key_of
from snugfit.rehearsal.record.taken import taken_under
from snugfit.rehearsal.trace.score import Note
from snugfit.rehearsal.trace.trace import COPY_IN, Block, Kernel, Mark, Trace
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
        self.blocks: list[list[Any]] = []  # nbytes, operator, module, phase, step, kind
        self.events: list[int] = []
        self.marks: list[Mark] = [Mark(0, -1, "build")]
        self.kernels: list[Kernel] = []
        self.notes: list[Note] = []
        self.waits: list[int] = []
        self.current_phase, self.current_step = "build", -1
        self._living: dict[int, tuple[int, Any]] = {}  # storage's address -> block, weak reference
        self._workspaces: set[tuple[str, str]] = set()
        self._taken = taken_under(policy)
        self._where = Whereabouts()
        self._owners: dict[torch.Tensor, str] = {}
        self._any_results: set[int] = set()
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._recomputed: set[int] = set()
        self._hooks: list[Any] = []
        self._begun = self._viewed = 0  # checkpointed parts and views since the last kernel
        self._settled = False  # whether the context has

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, says torch's own switch: nothing compiles here, and skipping it costs every operator."""
        return False

    # ---- the observer's side -------------------------------------------------------------------------

    def step_begins(self, index: int) -> None:
        """Optimizer step `index` begins."""
        self.current_step = index
        self.phase("load")

    def step_ends(self, index: int) -> None:
        """Optimizer step `index` has ended."""
        self._note_down("end")

    def phase(self, name: str) -> None:
        """Everything from here on belongs to this phase."""
        if name == "update" and self._model is not None:
            self._claim_gradients()
        self.current_phase = name
        self._viewed = self._begun = 0
        self.marks.append(Mark(len(self.events), self.current_step, name))

    def built(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Model and optimizer stand: their storages get names and kinds."""
        self._model, self._optimizer = model, optimizer
        self._where.name(model)
        for name, module in model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._owners[tensor] = name
                self.claim(tensor, Kind.WEIGHTS, name)

    def __enter__(self) -> Recorder:
        self._writes_in_place = sole_owner(self.policy).writes_in_place
        self._hooks = [*self._where.follow(), tell_of_checkpoints(self._checkpoints)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def trace(self, attention: Iterable[str], doubts: Iterable[str] = ()) -> Trace:
        """What was written, with the kinds that only the end of a run shows."""
        self._claim_states()
        claimed = [block[5] for block in self.blocks]
        phases = [block[3] for block in self.blocks]
        decided = kinds(claimed, phases, frozenset(self._recomputed), self.events, self.marks)
        return Trace(
            tuple(Block._make((*block[:5], kind)) for block, kind in zip(self.blocks, decided, strict=True)),
            tuple(self.events),
            tuple(self.marks),
            tuple(self.kernels),
            tuple(self.waits),
            tuple(sorted(set(attention))),
            tuple(doubts),
        )

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
            self._sync()
            return True
        known = REMEMBERED.operator(func)
        if known.is_view:  # every second operator: no kernel, and nothing but a birth at most
            out = func(*args, **kwargs)
            self._born(known.name, out)
            self._viewed += not isinstance(out, torch.Tensor) or out.is_meta
            return out
        in_place = not kwargs and self.current_phase == "backward" and self._writes_in_place(func, args)
        key, operator = key_of(args, kwargs), known.name
        out = args[0] if in_place else REMEMBERED.run(known, key, args, kwargs)
        if isinstance(out, torch.Tensor) and not out.is_meta:
            return out  # the host's own work
        scratch = self._taken.scratch(known, None if in_place else key, args, out)
        self._run(operator, out, scratch, self.policy.workspaces(operator))
        if not self._settled and operator not in KEEPING and not copies_in(func, args):
            self._settled = described(known, key, args, kwargs, out) is not None
            if self._settled:
                self._birth(SETTLED, 0, Kind.WORKSPACES)
        if operator in ANY and isinstance(out, torch.Tensor):
            self._any_results.add(id(out))
            weakref.finalize(out, self._any_results.discard, id(out)).atexit = False
        if self.current_step == self.steps - 1:
            kernel = described(known, key, args, kwargs, out)
            if kernel and func is aten._grouped_mm.default and not self.policy.fuses_groups(args[0].dtype):
                self._sync()
                for each in apart(args, kwargs, kernel):
                    self._viewed += MATRICES
                    self._ran("aten::mm", each)
            elif kernel:
                self._ran(COPY_IN if copies_in(func, args) else operator, kernel)
            else:
                self._viewed += 1
        return out

    def _ran(self, operator: str, kernel: Description) -> None:
        """The steady step's device is asked for this kernel."""
        self._note_down("kernel")
        again = self.current_phase == "backward" and torch.is_grad_enabled()
        hosts = again, self._where.entered(), self._viewed, self._begun
        path = self._where.path(self.current_phase)
        self.kernels.append(Kernel(operator, path, self.current_phase, *kernel, *hosts))
        self._viewed = self._begun = 0

    def _scalar(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a one-element tensor. Real host tensors have theirs. A device's are unknown: numbers
        are 0; of truths, `any` and its kind are False and the rest True (what ordinary data gives), except
        that a mask is not all True when the job pads."""
        tensor = args[0]
        if tensor.device.type != "meta":
            return func(*args, **kwargs)
        self._sync()
        if tensor.dtype == torch.bool:
            return id(tensor) not in self._any_results and not self.padded
        return 0.0 if tensor.is_floating_point() else 0

    def _sync(self) -> None:
        if self.current_step == self.steps - 1:
            self.waits.append(len(self.kernels))
            self._note_down("wait")

    def _note_down(self, what: str) -> None:
        self.notes.append(Note(len(self.events), len(self.marks), what))

    def _checkpoints(self) -> None:
        self._begun += 1

    # ---- births and deaths ---------------------------------------------------------------------------

    def _born(self, operator: str, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._see(operator, out)
        elif isinstance(out, (list, tuple)):
            for item in self.policy.births(operator, out):
                if isinstance(item, torch.Tensor):
                    self._see(operator, item)
                elif isinstance(item, (list, tuple)):
                    self._born(operator, item)

    def _see(self, operator: str, tensor: torch.Tensor) -> int | None:
        """The block of this tensor's storage, born now if it was not known."""
        if not tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        found = self._living.get(address)
        if found is not None:
            return found[0]
        index = self._birth(operator, storage.nbytes())
        self._living[address] = (index, weakref.ref(storage, self._death_of(address, index)))
        return index

    def _birth(self, operator: str, nbytes: int, kind: str = "") -> int:
        index = len(self.blocks)
        path = self._where.path(self.current_phase)
        self.blocks.append([nbytes, operator, path, self.current_phase, self.current_step, kind])
        if self.current_phase == "backward" and torch.is_grad_enabled():
            self._recomputed.add(index)
        if nbytes:
            self.events.append(index + 1)
        return index

    def _death_of(self, address: int, index: int) -> Callable[[Any], None]:
        def dies(_: Any) -> None:
            if self._living.get(address, (None,))[0] == index:
                del self._living[address]
            if self.blocks[index][0]:
                self.events.append(-(index + 1))

        return dies

    def _run(self, operator: str, out: Any, scratch: Scratch, workspaces: Iterable[tuple[str, int]]) -> None:
        """Everything a kernel allocates: its outputs, workspaces when it is its thread's first, scratch."""
        if not scratch or (OUTPUTS not in scratch and ONE_OUTPUT.keys().isdisjoint(scratch)):
            self._born(operator, out)
        thread = "backward" if self.current_phase == "backward" else "main"
        for name, nbytes in workspaces:
            if (name, thread) not in self._workspaces:
                self._workspaces.add((name, thread))
                self._birth(name, nbytes, Kind.WORKSPACES)
        held: dict[str, int] = {}
        for name, nbytes in scratch:
            if (name, nbytes) == OUTPUTS:
                self._born(operator, out)
            elif nbytes > 0:
                held[name] = self._birth(f"{operator}: {name}", nbytes, Kind.WORKSPACES)
            elif nbytes < 0:
                self.events.append(-(held.pop(name) + 1))
            elif (name, nbytes) in ONE_OUTPUT:
                self._born(operator, out[ONE_OUTPUT[name, nbytes]])

    # ---- what for: kinds -------------------------------------------------------------------------------

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "") -> None:
        """This tensor's bytes are of this kind, and of this module where one is named."""
        found = self._living.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None
        if found is not None and not self.blocks[found[0]][5]:
            block = self.blocks[found[0]]
            block[2], block[5] = module or block[2], kind

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
