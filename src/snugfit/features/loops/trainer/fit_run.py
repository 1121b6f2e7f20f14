"""The state of one call of `train()` under `fit`: output folder, checkpoints, training log and step.

The `FitPlan` in `trainer.snugfit` is immutable. When memory runs out, a new one with a smaller recipe
replaces it. State that changes from step to step is in the `StepState` of the run (`fit_run.py`).

**Modules.** A cached list of a model's modules, for loops that read them in each step.

transformers' Trainer calls `model.train()` and counts the model's parameters for every micro-batch, and lists
them for clipping. Each traversal of all modules takes CPU time, which limits the speed of small steps.
Checking the list for changes is much faster. After a change the modules are traversed again, so the results
equal those of the model's own methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.features.loops.backward_updates import BackwardWatch
from snugfit.features.loops.loader import DataPosition
from snugfit.features.loops.trainer.checkpoints import TrainerCheckpoints, refuse_no_checkpoint
from snugfit.features.loops.trainer.loss import LossTraits
from snugfit.features.loops.trainer.passes import TrainerPasses
from snugfit.features.loops.trainer.plan import compared_job
from snugfit.features.loops.trainer.ranks import ranks_of
from snugfit.features.loops.trainer.step_timer import StepState, StepTimer, logger_for
from snugfit.frontends.next_recipe import next_recipe
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.manager import open_shared_store
from snugfit.training.interrupt import Interrupts, StopSignals
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.recovery import PlanFailure, Recovery
from snugfit.training.rng import preserve_rng
from snugfit.training.run.loader import Prefetcher
from snugfit.training.step_logger import StepLogger

if TYPE_CHECKING:
    from torch import nn

    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.journal import Journal


@dataclass(kw_only=True)
class FitRun:
    """The checkpoints, out-of-memory recovery, training log and data position of one running `train()`
    call.
    """

    checkpoints: TrainerCheckpoints
    logger: StepLogger
    recovery: Recovery
    timer: StepTimer
    data: DataPosition
    """Object that counts trained batches and restores the position in the data."""

    prefetcher: Prefetcher[Any] | None = None
    """Object that fetches the next step's micro-batches, with the Trainer's count of their items; None before
    the first epoch of a run.
    """

    epoch_iterator: Any = None
    """The Trainer's iterator over the micro-batches of the current epoch; None before the first epoch of a
    run.
    """

    ranks: Ranks = ALONE
    """The processes that train together, and this process's rank."""

    ignored_keys: list[str] | None = None
    """The argument `ignore_keys_for_eval` that the user gave to `train()`."""

    last_boundary: int | None = None
    """Number of the step that ended last. A second end of the same step is the end of an epoch."""

    is_stopped: bool = False
    """True after a stop signal at that step. The Trainer then leaves the epoch."""

    tree: ModuleTree | None = None
    """Tree of the modules of the trainer's model, without wrappers."""

    steps: int = 0
    """Number of optimizer steps that have started."""

    step: StepState = field(default_factory=StepState)
    backward: BackwardWatch = field(default_factory=BackwardWatch)

    passes: TrainerPasses | None = None
    """The passes of micro-batches under the current recipe; None before the first one."""

    def passes_of(self, trainer: Any) -> TrainerPasses:
        """Return the passes of the trainer's micro-batches. They are made anew after a change of recipe."""
        if self.passes is None:
            self.passes = TrainerPasses(trainer)
        return self.passes

    def tree_of(self, model: Any) -> ModuleTree:
        """Return the cached module tree of the trainer's model. A previous model's tree is discarded."""
        if self.tree is None or self.tree.model is not model:
            self.tree = ModuleTree(model)
        return self.tree


@contextlib.contextmanager
def open_run(trainer: Any, resume_from: str | bool | None) -> Iterator[FitRun]:
    """Open the run of one `train()` call, whose output folder is locked within this context.

    `checkpoints.resumed` is the checkpoint of a resumed run. `trainer.snugfit_run` is the run, and None
    outside of the context.
    """
    journal = trainer.snugfit.journal
    folder, begin_anew = Path(trainer.args.output_dir), "without resume_from_checkpoint"
    refuse_no_checkpoint(folder, resume_from)
    with (
        ranks_of(trainer) as ranks,
        open_shared_store(folder, ranks, begin_anew=begin_anew) as store,
        Interrupts(store.root if ranks.is_first else None) as interrupts,
        journal.writing_to(store.root) if ranks.is_first else contextlib.nullcontext(),
    ):
        data, stops = DataPosition(), StopSignals(interrupts, ranks)
        checkpoints = TrainerCheckpoints(trainer, store, journal, stops, data, ranks)
        try:
            checkpoints.open(resume_from)
            trainer.snugfit_run = FitRun(
                checkpoints=checkpoints,
                logger=logger_for(trainer, journal),
                recovery=_recovery(trainer, journal),
                timer=StepTimer(trainer.args.device, ranks.size),
                data=data,
                ranks=ranks,
            )
            yield trainer.snugfit_run
        finally:
            checkpoints.wait()  # no process may write after the folder is unlocked
            trainer.snugfit_run = None


def _recovery(trainer: Any, journal: Journal) -> Recovery:
    """Return the object that chooses the next recipe when memory runs out in this trainer's run."""
    device, plan = trainer.args.device, trainer.snugfit
    changing = {Slot.BATCHING, Slot.CHECKPOINTING} - (plan.user_slots - {Slot.BATCHING})

    def replan(job: Job, recipe: Recipe, cause: str) -> Recipe | PlanFailure | None:
        with preserve_rng(device):
            recovery.job = compared_job(trainer, job, trainer.snugfit.samples, pieces=recipe.pieces)
            return next_recipe(device, live=True, changing=changing)(recovery.job, recipe, cause)

    recovery = Recovery(plan.job, journal, replan)
    return recovery


# ---- the plan of a fitted trainer -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Job, recipe and training log of a trainer that `fit` prepared."""

    job: Job
    recipe: Recipe
    user_slots: frozenset[Slot]
    """Slots (choices of a recipe) that stay as the user configured them."""

    journal: Journal
    """The training log. It sends events to `watch`, and during `train()` also to the run's folder."""

    compare_code: bool = True
    """True if a run is resumed only if the user's code is unchanged."""

    samples: Mapping[str, Any] | None = None
    """A batch on the host for comparisons of losses during a run; None uses the job's example."""

    loss: LossTraits = field(default_factory=LossTraits)
    """Properties of the model's loss function."""

    max_rows: int | None = None
    """Largest number of samples in a forward pass, if micro-batches are split further after memory ran out;
    None otherwise.
    """

    def cut_finer(self, recipe: Recipe) -> FitPlan:
        """Return a copy of this plan with a recipe that splits the loader's micro-batches further."""
        return replace(self, recipe=recipe, max_rows=recipe.setup().per_piece(self.job.batch_size))


# ---- modules -----------------------------------------------------------------------------------------------


REPLACEABLE_MODULES = ("torch.nn.modules.module", "transformers.modeling_utils")
"""Modules of libraries whose methods may be replaced. A method that the model overrides is kept."""

_TRAVERSALS = ("parameters", "named_parameters", "modules", "named_modules")
USED_BY = {"train": ("train",), "parameters": _TRAVERSALS, "num_parameters": ("num_parameters", *_TRAVERSALS)}
"""Names of the methods that each replaced method calls. All of them must be the library's."""

_VALUES = methodcaller("values")
_IS_TRAINING = attrgetter("training")


class ModuleTree:
    """A cached list of a model's modules with their children and parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._counted: dict[bool, tuple[list[nn.Parameter], int]] = {}
        self._answers: dict[str, Any] = {}
        self._list_modules()

    def _list_modules(self) -> None:
        self._modules = list(self.model.modules())
        self._child_dicts = [module._modules for module in self._modules]
        self._parameter_dicts = [module._parameters for module in self._modules]
        self._children = self._current_children()
        self._has_known_train = all(_is_known(module, "train") for module in self._modules)

    def _current_children(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, self._child_dicts)))

    def modules(self) -> list[nn.Module]:
        """Return each module once, as `model.modules()` does, including changes since the last call."""
        if not _are_same(self._current_children(), self._children):
            self._list_modules()
        return self._modules

    def train(self, mode: bool = True) -> nn.Module:
        """Set the training mode of all modules, as `model.train(mode)` does."""
        if mode is True and all(map(_IS_TRAINING, self.modules())) and self._has_known_train:
            return self.model
        return type(self.model).train(self.model, mode)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the parameters as `model.parameters(recurse)` does, each once, in the order of the
        modules.
        """
        return iter(self._all_parameters()) if recurse else type(self.model).parameters(self.model, recurse)

    def _all_parameters(self) -> list[nn.Parameter]:
        self.modules()
        parameters = dict.fromkeys(chain.from_iterable(map(_VALUES, self._parameter_dicts)))
        parameters.pop(None, None)  # a layer without a bias has None here
        return list(parameters)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of elements of all parameters, as transformers' `model.num_parameters(...)` does.

        All parameters are counted again after one was added, removed or replaced; trainable ones at each
        call.
        """
        kind: Any = type(self.model)
        count = kind.num_parameters
        if only_trainable:
            return int(count(self.model, True, exclude_embeddings))
        parameters = self._all_parameters()
        known = self._counted.get(exclude_embeddings)
        if known is None or not _are_same(known[0], parameters):
            known = self._counted[exclude_embeddings] = (
                parameters,
                count(self.model, False, exclude_embeddings),
            )
        return known[1]

    @contextlib.contextmanager
    def use_cache(self, name: str) -> Iterator[None]:
        """Context in which the model's method `name`, one of `USED_BY`, is replaced by the cached one here.
        `withdraw` ends it earlier.

        A model class that overrides this method keeps its own.
        """
        if all(_is_known(self.model, used) for used in USED_BY[name]):
            self.model.__dict__[name] = self._answers[name] = getattr(self, name)
        try:
            yield
        finally:
            self.withdraw()

    def withdraw(self) -> None:
        """Restore the model's own methods in place of the cached ones."""
        for name, answer in self._answers.items():
            if self.model.__dict__.get(name) is answer:
                del self.model.__dict__[name]
        self._answers.clear()


def _is_known(module: nn.Module, name: str) -> bool:
    method = getattr(type(module), name, None)
    return name not in module.__dict__ and getattr(method, "__module__", "") in REPLACEABLE_MODULES


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
