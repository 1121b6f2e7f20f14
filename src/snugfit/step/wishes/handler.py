"""What a wish may change: the small, fixed set of ends that every front-end offers.

A wish is a field of `Setup`. Its `Handler` knows all that is done for it, wherever that is: in a model that
is being built, in one that stands already, around a step, in the process, in `TrainingArguments` and in an
exported script. A handler overrides the methods of the ends that its wish needs, each of which takes the
wish's value first. `step/applier.py` holds the table of handlers and runs them in order, so no front-end
knows a wish by name; one that cannot honour a wish stands in the handler's `refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import RecipeError
from snugfit.techniques import roster

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.feature import InstallStage
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup
    from snugfit.techniques.technique import Slot, Technique

Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context manager; it is entered once."""


@dataclass(kw_only=True)
class LiveTraining:
    """A model that stands and is to be trained otherwise, as a front-end hands it to the applier."""

    front_end: str
    """Its name, one of `applier.FRONT_ENDS`."""

    recipe: Recipe
    """What it is to be trained under."""

    model: Any
    """The model; a handler may put another one here."""

    device: torch.device
    """The device that all of the model is on."""

    own_forwards: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Modules whose forward pass was wrapped for a wish, each with what stood there before."""

    def technique(self, slot: Slot) -> Technique:
        """The recipe's technique of this slot, or of one that shares its wish."""
        return _asking(self.recipe, slot)

    def is_plain(self, slot: Slot) -> bool:
        """Whether the recipe asks for nothing special there."""
        return bool(self.recipe[slot] == roster.plain(slot))


@dataclass(frozen=True, kw_only=True)
class ScriptContext:
    """What a handler may ask when its wish is written as Python."""

    job: Job
    setup: Setup
    recipe: Recipe

    target: str
    """Whose loop the script's is: `torch`, `accelerate`, `hf`, or the name of a tool."""

    trainer: bool
    """Whether that is the Trainer's, which is told of most wishes in its arguments."""

    library: str
    """transformers and its version."""

    checkpointing_name: str
    """What this version calls checkpointing."""

    checkpointing_options: frozenset[str]
    """What it lets one say about it."""

    def refusal(self, slot: Slot, why: str) -> RecipeError:
        """The error that names the technique whose wish cannot be written."""
        technique = _asking(self.recipe, slot)
        return RecipeError(
            f"{technique} cannot be exported: {why}.\nLeave it out or choose another technique for "
            f"{technique.slot} (snugfit techniques). snugfit train takes this recipe as it is."
        )


def _asking(recipe: Recipe, slot: Slot) -> Technique:
    """The recipe's technique of this slot. Those of several GPUs share one wish: the first that asks for
    something."""
    shared = roster.slots_of_several_gpus()
    slots = shared if slot in shared else (slot,)
    asking = [recipe[one] for one in slots if recipe[one] != roster.plain(one)]
    technique: Technique = asking[0] if asking else recipe[slot]
    return technique


class Handler:
    """What one wish does. The methods here do nothing; a handler overrides those that its wish needs."""

    wish: ClassVar[str]
    """The field of `Setup`."""

    slot: ClassVar[Slot]
    """Whose techniques ask for it."""

    stage: ClassVar[InstallStage]
    """When it is done, relative to other wishes."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Front-ends that cannot honour the wish, each with the reason. Elsewhere it is honoured."""

    accelerate_does_it: ClassVar[bool] = False
    """Whether accelerate puts it around a forward pass itself, when its own arguments ask for it."""

    read_by_loops: ClassVar[bool] = False
    """Whether it is a part of every loop's shape, which each reads from the Setup itself."""

    def why_refused(self, value: Any, front_end: str) -> str:
        """Why a front-end that honours the wish otherwise cannot honour this value of it; empty where it
        can."""
        return ""

    # ---- a model ----

    def import_code(self, value: Any) -> None:
        """Imports libraries that must be there before a rehearsal or a measurement begins."""

    def model_arguments(self, value: Any) -> dict[str, Any]:
        """Arguments of the model's constructor."""
        return {}

    def replace_model(self, value: Any, model: Any) -> Any:
        """The model to train in place of this one."""
        return model

    def wrap(self, value: Any, model: Any) -> None:
        """Changes modules of a model that stands on its device."""

    def distribute(self, value: Any, model: Any) -> Any:
        """What to call in the place of the wrapped model, so that this process trains it with others."""
        return model

    def objections(self, value: Any, live: LiveTraining) -> Iterator[str]:
        """Why a live model cannot be given this."""
        return iter(())

    def change(self, value: Any, live: LiveTraining) -> Iterator[str]:
        """Does it to a live model, and gives a line for what is another now."""
        return iter(())

    # ---- a scaler, a loader ----

    def make_scaler(self, value: Any, device: torch.device) -> torch.amp.GradScaler | None:
        """What scales gradients; None where nothing does."""

    def loader_arguments(self, value: Any, device: torch.device) -> dict[str, Any]:
        """Arguments of torch's `DataLoader`."""
        return {}

    # ---- a step, a process ----

    def around_forward(self, value: Any, device: torch.device) -> Context | None:
        """What a forward pass and its loss run in; None where that is nothing."""

    def around_pass(self, value: Any, model: Any, batch: dict[str, Any], *, is_last: bool) -> Context | None:
        """What the passes of a micro-batch on the device run in, which may be the step's last; None where
        that is nothing. Within it a batch may have become this process's part of it."""

    def around_evaluation(self, value: Any, model: Any, batch: dict[str, Any]) -> Context | None:
        """What a forward pass over a batch on the device runs in that no backward pass follows, likewise."""

    def after_update(self, value: Any, model: Any, step: int) -> None:
        """Does what is to be done once this process has made its optimizer step of this number, from 0."""

    def after_evaluation(self, value: Any, model: Any) -> None:
        """Does what is to be done after forward passes that no backward pass follows."""

    def around_run(self, value: Any) -> Context | None:
        """What all of a run's steps run in; None where that is nothing."""

    def around_rehearsal(self, value: Any, *, on_gpu: bool) -> Context | None:
        """What a rehearsal of it runs in, where real code has no shapes to give; a step `on_gpu` may do
        otherwise than one on a CPU."""

    def set_process(self, value: Any, device: torch.device) -> None:
        """Changes the process, before anything is built."""

    def environment(self, value: Any) -> Mapping[str, str | None]:
        """The variables by which a fresh process is told it instead; None for one that it must not have."""
        return {}

    # ---- other libraries ----

    def training_arguments(self, value: Any, job: Job, device: torch.device) -> dict[str, Any]:
        """The `TrainingArguments` that say it."""
        return {}

    def accelerator_arguments(self, value: Any) -> dict[str, Any]:
        """The arguments of accelerate's `Accelerator` that say it."""
        return {}

    def script(self, value: Any, context: ScriptContext) -> dict[str, Any]:
        """Return the values of an exported script's template that express the field."""
        return {}
