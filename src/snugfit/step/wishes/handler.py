"""The effects of a wish: the small, fixed set of methods that every front-end calls.

A wish is a field of `Setup`. Its `Handler` has all code for it: for new and live models, steps, the process,
`TrainingArguments` and exported scripts. A handler overrides the methods that its wish needs, each of which
takes the wish's value first. `step/applier.py` holds the table of handlers and runs them in order, so no
front-end names a wish. A handler's `refused` lists the front-ends that cannot implement its wish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import RecipeError
from snugfit.techniques import roster

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import StepEngine, StepPasses
    from snugfit.step.step_runner import StepRunner
    from snugfit.techniques.feature import InstallStage
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import OptimizerWish, Setup
    from snugfit.techniques.technique import Slot, Technique

Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context manager; it is entered once."""

STAYS = "stays"
"""Answer of `Handler.built_on` for a model that `distribute` moves."""


@dataclass(kw_only=True)
class LiveTraining:
    """A live model with a new recipe, as a front-end passes it to the applier."""

    front_end: str
    """Its name, one of `applier.FRONT_ENDS`."""

    recipe: Recipe
    """Recipe of the training to come."""

    model: Any
    """The model; a handler may replace it."""

    device: torch.device
    """The device that all of the model is on."""

    own_forwards: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Modules whose forward pass was wrapped for a wish, each with its earlier forward."""

    def technique(self, slot: Slot) -> Technique:
        """Return the recipe's technique of this slot, or of one that shares its wish."""
        return _asking(self.recipe, slot)

    def is_plain(self, slot: Slot) -> bool:
        """Return whether the recipe has the plain technique in this slot."""
        return bool(self.recipe[slot] == roster.plain(slot))


@dataclass(frozen=True, kw_only=True)
class ScriptContext:
    """Inputs of a handler that writes its wish as Python."""

    job: Job
    setup: Setup
    recipe: Recipe

    target: str
    """Target of the script: `torch`, `accelerate`, `hf`, or the name of a tool."""

    trainer: bool
    """True for the Trainer's loop, whose arguments have most wishes."""

    library: str
    """transformers and its version."""

    checkpointing_name: str
    """Name of checkpointing in this version."""

    checkpointing_options: frozenset[str]
    """Options of checkpointing in this version."""

    def refusal(self, slot: Slot, why: str) -> RecipeError:
        """Return the error for a wish that a script cannot express, with its technique's name."""
        technique = _asking(self.recipe, slot)
        return RecipeError(
            f"{technique} cannot be exported: {why}.\nLeave it out or choose another technique for "
            f"{technique.slot} (snugfit techniques). snugfit train takes this recipe as it is."
        )


def _asking(recipe: Recipe, slot: Slot) -> Technique:
    """Return the recipe's technique of this slot. The slots for several GPUs share one wish: the first that
    is not plain.
    """
    shared = roster.slots_of_several_gpus()
    slots = shared if slot in shared else (slot,)
    asking = [recipe[one] for one in slots if recipe[one] != roster.plain(one)]
    technique: Technique = asking[0] if asking else recipe[slot]
    return technique


class Handler:
    """The effects of one wish. The methods here do nothing; a handler overrides those that its wish needs.

    Methods for the code, distribution and passes of a model are called only where the value differs from the
    plain loop's (`applier._used`).
    """

    wish: ClassVar[str]
    """The field of `Setup`."""

    slot: ClassVar[Slot]
    """Slot of the techniques that set the wish."""

    stage: ClassVar[InstallStage]
    """Time of its effect, relative to other wishes."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Front-ends that cannot honour the wish, each with the reason. Elsewhere it is honoured."""

    accelerate_does_it: ClassVar[bool] = False
    """True if accelerate itself adds it around a forward pass, by its own arguments."""

    read_by_loops: ClassVar[bool] = False
    """True if it is a part of every loop's structure, which each reads from the Setup itself."""

    def why_refused(self, value: Any, front_end: str) -> str:
        """Return why a front-end that implements the wish cannot implement this value; empty if it can."""
        return ""

    # ---- a model ----

    def import_code(self, value: Any) -> None:
        """Import libraries that must be there before a rehearsal or a measurement begins."""

    def model_arguments(self, value: Any) -> dict[str, Any]:
        """Return arguments of the model's constructor."""
        return {}

    def replace_model(self, value: Any, model: Any) -> Any:
        """Return the model to train in place of this one."""
        return model

    def wrap(self, value: Any, model: Any) -> None:
        """Change modules of a model that is on its device."""

    def distribute(self, value: Any, model: Any) -> Any:
        """Return the module to call instead of the wrapped model, so that this process trains it with
        others.
        """
        return model

    def built_on(self, value: Any, job: Job) -> str:
        """Return `host` for a model that is built on the host and then moved, `stays` for one that
        `distribute` moves, else an empty text."""
        return ""

    def make_optimizer(
        self, value: Any, wish: OptimizerWish, model: Any, groups: Any, **numbers: Any
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer over this process's part of the weights, or None for the usual one."""

    def step_passes(
        self, value: Any, model: Any, runs: Any, around: Callable[[], AbstractContextManager[Any]]
    ) -> StepPasses | None:
        """Return the passes of steps whose layers several processes share, or None. `around` makes the
        context of the model's computation."""

    def engine(self, value: Any) -> StepEngine | None:
        """Return the engine that runs the steps in place of a loop's, or None."""

    def refuse_training(self, value: Any, recipe: Recipe) -> None:
        """Raise `UsageError` for a value that can be predicted and measured, but not trained."""

    def objections(self, value: Any, live: LiveTraining) -> Iterator[str]:
        """Yield why a live model cannot have this value."""
        return iter(())

    def change(self, value: Any, live: LiveTraining) -> Iterator[str]:
        """Change a live model, and yield a line for each change."""
        return iter(())

    # ---- a scaler, a loader ----

    def make_scaler(self, value: Any, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the gradient scaler, or None without one."""

    def loader_arguments(self, value: Any, device: torch.device) -> dict[str, Any]:
        """Return arguments of torch's `DataLoader`."""
        return {}

    # ---- a step of the plain loop ----

    def fill_multiple(self, value: Any, loop: Any) -> int:
        """Return a number of tokens; the lengths of batches are filled up to its multiples. 0 leaves them."""
        return 0

    def prepare_pieces(
        self, value: Any, loop: Any, model: Any, pieces: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the host micro-batches of a step in the form that its passes need."""
        return pieces

    def step_runner(self, value: Any, loop: Any, runner: StepRunner | None) -> StepRunner | None:
        """Return the object that runs the loop's steps in place of `runner`; None leaves them to the loop."""
        return runner

    # ---- a step, a process ----

    def around_forward(self, value: Any, device: torch.device) -> Context | None:
        """Return the context of a forward pass and its loss, or None without one."""

    def around_pass(self, value: Any, model: Any, batch: dict[str, Any], *, is_last: bool) -> Context | None:
        """Return the context of a micro-batch's passes on the device, or None without one. `is_last` marks
        the step's last. Inside of it the batch may be replaced by this process's part.
        """

    def around_evaluation(self, value: Any, model: Any, batch: dict[str, Any]) -> Context | None:
        """Return the context of a forward pass without a backward pass, over a batch on the device, or
        None.
        """

    def after_update(self, value: Any, model: Any, step: int) -> None:
        """Run work after an optimizer step of this process; `step` counts from 0."""

    def after_evaluation(self, value: Any, model: Any) -> None:
        """Run work after forward passes without a backward pass."""

    def around_run(self, value: Any) -> Context | None:
        """Return the context of all steps of a run, or None without one."""

    def around_rehearsal(self, value: Any, *, on_gpu: bool) -> Context | None:
        """Return the context of a rehearsal, in which real code has no shapes to return. A step `on_gpu` may
        differ from one on a CPU.
        """

    def set_process(self, value: Any, device: torch.device) -> None:
        """Change the process, before the model is built."""

    def environment(self, value: Any) -> Mapping[str, str | None]:
        """Return the environment variables that replace `set_process` in a new process; None removes a
        variable.
        """
        return {}

    # ---- other libraries ----

    def training_arguments(self, value: Any, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the `TrainingArguments` of this value."""
        return {}

    def accelerator_arguments(self, value: Any) -> dict[str, Any]:
        """Return the arguments of accelerate's `Accelerator` for this value."""
        return {}

    def setup_for_accelerate(self, value: Any, setup: Setup) -> Setup:
        """Return the Setup in accelerate's terms."""
        return setup

    def around_accelerate(self, value: Any, device: torch.device) -> Context | None:
        """Return the context of accelerate's whole work, or None without one."""

    def build_for_accelerate(self, value: Any, setup: Setup, build: Callable[..., Any]) -> Any:
        """Return the model that accelerate moves and distributes, or None for one that needs nothing else.
        `build` takes further arguments of `build_model`."""

    def set_accelerator(self, value: Any, accelerator: Any, model: Any) -> None:
        """Change a new `Accelerator` for this model."""

    def script(self, value: Any, context: ScriptContext) -> dict[str, Any]:
        """Return the values of an exported script's template that express the field."""
        return {}
