"""Base class of handlers, which apply one field of `Setup` (training settings) in every training loop.

A wish is a field of `Setup`. Its `Handler` has all code of that field: for new and live models, steps, the
process, `TrainingArguments` and exported scripts. A handler overrides the methods that its wish needs, each
of which takes the wish's value first. `step/applier.py` holds the table of handlers and runs them in order,
so no front-end names a wish. A handler's `refused` lists the front-ends that cannot implement its wish.
"""

from __future__ import annotations

import contextlib
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
"""Type of a function that returns a context manager, which is entered once."""


STAYS = "stays"
"""Result of `Handler.built_on` for a model that is built on the host and that `distribute` moves to the
devices.
"""


@contextlib.contextmanager
def all_of(contexts: list[Context]) -> Iterator[None]:
    """Return one context manager that enters all of these in order."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@dataclass(kw_only=True)
class LiveTraining:
    """A model already in training, and the new recipe that is applied to it."""

    front_end: str
    """Name of the user's training loop (front-end), one of `applier.FRONT_ENDS`."""

    recipe: Recipe
    """The new recipe that is applied to the model."""

    model: Any
    """Model in training; a handler may replace it."""

    device: torch.device
    """Device on which all of the model's weights are."""

    own_forwards: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Modules with a replaced forward method, each with its attributes before the replacement."""

    code_in_passes: Sequence[str] = ()
    """Names of the user's Python code that runs within each pass, such as hooks."""

    def technique(self, slot: Slot) -> Technique:
        """Return the recipe's technique of this slot (a choice such as precision), or of another slot with
        the same field of `Setup`.
        """
        return _technique_for(self.recipe, slot)

    def is_plain(self, slot: Slot) -> bool:
        """Return True if the recipe has the default technique in this slot (a choice such as precision)."""
        return bool(self.recipe[slot] == roster.plain(slot))


@dataclass(frozen=True, kw_only=True)
class ScriptContext:
    """The job, settings and library of an exported script, for handlers that write their field as Python."""

    job: Job
    setup: Setup
    recipe: Recipe

    target: str
    """Kind of script: `torch`, `accelerate`, `hf`, or the name of a tool."""

    trainer: bool
    """True for a script with a Trainer, whose arguments express most fields."""

    library: str
    """Name and version of `transformers`, for messages."""

    checkpointing_name: str
    """Name of the checkpointing method in this version of transformers."""

    checkpointing_options: frozenset[str]
    """Names of the checkpointing options in this version of transformers."""

    def refusal(self, slot: Slot, reason: str) -> RecipeError:
        """Return the error for a field of the settings that an exported script cannot express, with the
        technique and the reason.
        """
        technique = _technique_for(self.recipe, slot)
        return RecipeError(
            f"{technique} cannot be exported: {reason}.\nLeave it out or choose another technique for "
            f"{technique.slot} (snugfit techniques). snugfit train takes this recipe as it is."
        )


def _technique_for(recipe: Recipe, slot: Slot) -> Technique:
    """Return the recipe's technique of this slot (such as precision). Several slots for several GPUs set one
    field of `Setup`; then the first technique that is no default is returned.
    """
    shared = roster.slots_of_several_gpus()
    slots = shared if slot in shared else (slot,)
    candidates = [recipe[candidate] for candidate in slots if recipe[candidate] != roster.plain(candidate)]
    technique: Technique = candidates[0] if candidates else recipe[slot]
    return technique


class Handler:
    """Base class that applies one field of `Setup` to models, loops and exported scripts. The methods of this
    class do nothing; a handler overrides those that its field needs.

    A feature's methods are called only where the value differs from the plain loop's, except for `undo`. So
    are the core's methods that distribute a model or surround its passes (`applier._used`).
    """

    wish: ClassVar[str]
    """Name of the field of `Setup` that the handler applies."""

    slot: ClassVar[Slot]
    """Slot (choice of a recipe) of the techniques that set the field."""

    stage: ClassVar[InstallStage]
    """Stage of the model's preparation at which the handler runs. Stages run in order."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Front-ends (training loops) that cannot implement the field, each with the reason."""

    accelerate_does_it: ClassVar[bool] = False
    """True if accelerate's own arguments apply the field around a forward pass."""

    change_words: ClassVar[str] = ""
    """Words before the technique's name in the message of `change`, which wraps a model in training. Empty if
    `change` does nothing, or the handler overrides it.
    """

    read_by_loops: ClassVar[bool] = False
    """True if every training loop reads the field from the Setup and implements it itself."""

    def why_refused(self, value: Any, front_end: str) -> str:
        """Return the reason why a loop that implements the field cannot implement this value; empty if it
        can.
        """
        return ""

    # ---- a model ----

    def import_code(self, value: Any) -> None:
        """Import libraries of the field that must be imported before a simulation or a measurement."""

    def model_arguments(self, value: Any) -> dict[str, Any]:
        """Return keyword arguments of the model's constructor, as a dict."""
        return {}

    def replace_model(self, value: Any, model: Any) -> Any:
        """Return the model to train: `model`, or one that replaces it, such as a model with adapters."""
        return model

    def wrap(self, value: Any, model: Any) -> None:
        """Change modules of a model that is on its device, for example by wrapping layers."""

    def distribute(self, value: Any, model: Any) -> Any:
        """Return the module to call in place of the wrapped model, such as DDP, for training in several
        processes.
        """
        return model

    def built_on(self, value: Any, job: Job) -> str:
        """Return the place where the model is built: `host` if it is moved afterwards, `stays` if
        `distribute` moves it, else an empty text.
        """
        return ""

    def make_optimizer(
        self, value: Any, wish: OptimizerWish, model: Any, groups: Any, **numbers: Any
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer over this process's shard of the weights, or None if the usual optimizer is
        used.
        """

    def step_passes(
        self, value: Any, model: Any, runs: Any, around: Callable[[], AbstractContextManager[Any]]
    ) -> StepPasses | None:
        """Return the object that runs a pipeline's forward and backward passes; None if each process has all
        layers. `around` returns the context of the forward pass.
        """

    def engine(self, value: Any) -> StepEngine | None:
        """Return another library's engine that runs the optimizer steps in place of the training loop; None
        without one.
        """

    def evaluated_model(self, value: Any, loop: Any, build: Callable[[], Any]) -> Any:
        """Return the model whose forward pass an evaluation runs, such as one of another library. None for
        the usual model, which `build` returns.
        """

    def refuse_rehearsal(self, value: Any, job: Job) -> None:
        """Raise `UsageError` for a field's value that can be measured in this job, but not simulated."""

    def refuse_training(self, value: Any, recipe: Recipe) -> None:
        """Raise `UsageError` for a field's value that can be predicted and measured, but not trained."""

    def objections(self, value: Any, live: LiveTraining) -> Iterator[str]:
        """Yield reasons why a model in training (live) cannot continue with the field's new value."""
        return iter(())

    def undo(self, live: LiveTraining) -> None:
        """Remove the field's changes of the code of a model in training, which another recipe made."""

    def change(self, value: Any, live: LiveTraining) -> Iterator[str]:
        """Apply the field's new value to a model in training, and yield a message for each change."""
        if self.change_words:
            self.wrap(value, live.model)
            yield f"{self.change_words} {live.technique(self.slot)}"

    # ---- a scaler, a loader ----

    def make_scaler(self, value: Any, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the gradient scaler of the training loop, or None without one."""

    def loader_arguments(self, value: Any, device: torch.device) -> dict[str, Any]:
        """Return keyword arguments of torch's `DataLoader`, as a dict."""
        return {}

    # ---- a step of the plain loop ----

    def fill_multiple(self, value: Any, loop: Any) -> int:
        """Return the number whose multiples are the padded lengths of batches, in tokens; 0 adds no
        padding.
        """
        return 0

    def prepare_pieces(
        self, value: Any, loop: Any, model: Any, pieces: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the host micro-batches of a step, changed as the field requires, such as without padding."""
        return pieces

    def step_runner(self, value: Any, loop: Any, runner: StepRunner | None) -> StepRunner | None:
        """Return the object that runs the training loop's steps in place of `runner`; None leaves them to the
        loop.
        """
        return runner

    # ---- a step, a process ----

    def around_forward(self, value: Any, device: torch.device) -> Context | None:
        """Return the context of a forward pass and its loss; None if the field needs none."""

    def around_pass(self, value: Any, model: Any, batch: dict[str, Any], *, is_last: bool) -> Context | None:
        """Return the context around a micro-batch's forward and backward on the device; None if the field
        needs none. `is_last` marks the last micro-batch of the step. The context may replace the batch's
        tensors by this process's part.
        """

    def around_evaluation(self, value: Any, model: Any, batch: dict[str, Any]) -> Context | None:
        """Return the context of an evaluation's forward pass over a batch on the device; None if the field
        needs none.
        """

    def after_update(self, value: Any, model: Any, step: int) -> None:
        """Run the work that the field needs after an optimizer step of this process; `step` counts from 0."""

    def after_evaluation(self, value: Any, model: Any) -> None:
        """Run the work that the field needs after an evaluation's forward passes."""

    def around_run(self, value: Any) -> Context | None:
        """Return the context around all steps of a run; None if the field needs none."""

    def around_rehearsal(self, value: Any, *, on_gpu: bool) -> Context | None:
        """Return the context of a simulated step, in which compiled code computes shapes instead of data;
        None if the field needs none. With `on_gpu` a GPU's step is simulated, else a CPU's.
        """

    def set_process(self, value: Any, device: torch.device) -> None:
        """Set process-wide options, such as the allocator's, before the model is built."""

    def environment(self, value: Any) -> Mapping[str, str | None]:
        """Return environment variables for a new process with the effect of `set_process`; None removes a
        variable."""
        return {}

    # ---- other libraries ----

    def training_arguments(self, value: Any, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments of `TrainingArguments` that express this value, as a dict."""
        return {}

    def accelerator_arguments(self, value: Any) -> dict[str, Any]:
        """Return the keyword arguments of accelerate's `Accelerator` for this value, as a dict."""
        return {}

    def setup_for_accelerate(self, value: Any, setup: Setup) -> Setup:
        """Return the Setup without the fields that accelerate implements by its own settings."""
        return setup

    def around_accelerate(self, value: Any, device: torch.device) -> Context | None:
        """Return the context around all of accelerate's work, from its set-up on; None if the field needs
        none.
        """

    def build_for_accelerate(self, value: Any, setup: Setup, build: Callable[..., Any]) -> Any:
        """Return the model that is passed to accelerate, or None for the usual one. `build` takes further
        arguments of `build_model`."""

    def set_accelerator(self, value: Any, accelerator: Any, model: Any) -> None:
        """Set options of a new `Accelerator` for this model."""

    def script(self, value: Any, context: ScriptContext) -> dict[str, Any]:
        """Return the values that express the field in the template of an exported script, as a dict."""
        return {}
