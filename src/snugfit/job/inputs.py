"""Tasks, and inputs of models such as pictures and sound, which features add. A feature's
module `tasks.py` has an `AddedTask` for each, which is read before there are jobs. Its module `inputs.py` has
one `ModelInputs` for each input type. A batch of tokens belongs to the core (`batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from snugfit.errors import JobError
from snugfit.feature_folders import feature_objects
from snugfit.job.phases import added_phases


@dataclass(frozen=True, kw_only=True)
class AddedTask:
    """A task, such as image classification, that a feature adds."""

    name: str
    """Name of the task: its value in `Task`."""

    head: tuple[str, str]
    """Auto class and model types of the task, in the form of `HEADS` in `architectures.py`."""

    classes: Mapping[str, str] = field(default_factory=dict)
    """transformers' class by model type, for types that the auto class does not list."""

    elsewhere: tuple[str, ...] = ()
    """Other names of the task: those of pipelines on the Hugging Face hub. Several tasks may share a name.
    The model's architecture then decides.
    """

    kind: ClassVar[str] = "task"
    """Noun for the object in messages; that of a phase is `phase`."""

    is_objective: ClassVar[bool] = False
    """True for another loss of a head that has a task already, so that no architecture implies the task."""

    doubts: ClassVar[tuple[str, ...]] = ()
    """Warnings that each prediction of the task has."""

    mixing: str = ""
    """Reason why the loss is not a mean over samples; empty if it is."""

    setting_types: ClassVar[Mapping[str, type]] = {}
    """Types of the task's own settings by name. The names are keys of a job file."""

    unused: ClassVar[frozenset[str]] = frozenset()
    """Names of the recipe's slots (choices) that a job of this task does not use."""

    reads_first_weights: ClassVar[bool] = False
    """True if each step also reads the weights with which the run began."""

    def settings(self, job: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the complete settings of a job of this task. Raises `JobError` for unusable ones."""
        if given:
            words = " and ".join(name.replace("_", " ") for name in given)
            owners: list[Any] = [*added_phases().values(), *added_tasks()]
            has = " or ".join(
                f"the {owner.kind} {owner.name}"
                for owner in owners
                if given.keys() <= owner.setting_types.keys()
            )
            remedy = f"Try {has}." if has else "Leave them out."
            raise JobError(f"The task {job.task} in the phase {job.phase} has no setting {words}. {remedy}")
        return {}

    def arguments(self, job: Any) -> list[str]:
        """Return arguments of a command for the job's settings that are not the default."""
        return []

    def objections(self, job: Any, recipe: Any) -> Sequence[str]:
        """Return reasons why a recipe cannot run a job of this task, each with a remedy."""
        return ()

    def finish(self, job: Any, setup: Any, model: Any, build: Callable[[], Any]) -> Any:
        """Return the built model, with the task's loss if transformers' model has none. `build` returns
        another model of the job, with random weights and without the recipe's changes.
        """
        return model


class ModelInputs:
    """Inputs and labels of a model in one task; features define subclasses. This class is for tasks on
    tokens of the core.
    """

    task: ClassVar[str] = ""
    """Name of the added task whose models all take these inputs; empty without one."""

    takes_tokens: ClassVar[bool] = True
    """True if the inputs are token sequences of the job's length; False for pictures and sound."""

    has_classes: ClassVar[bool] = False
    """True if the labels of the task are classes, or choices."""

    has_target: ClassVar[bool] = False
    """True if the labels of the task are the tokens of a target sequence with its own length."""

    has_images: ClassVar[bool] = False
    """True if the samples are texts with the job's number of images."""

    joined: ClassVar[frozenset[str]] = frozenset()
    """Names of inputs, such as patches of images, whose first dimension continues from sample to sample."""

    has_seconds: ClassVar[bool] = False
    """True if the samples are sounds of the job's length in seconds."""

    def serves(self, task: str, architecture: str) -> bool:
        """Return True if a model of this architecture takes these inputs in this task."""
        return task == self.task

    def complete(self, config: Any) -> None:
        """Change keys of a transformers config as these inputs and their loss require."""

    def of_job(self, job: Any, config: Any) -> Any:
        """Return the `SampleInputs` (`batch.py`) of a job; None for those of the core. Raise `JobError` for a
        model of unknown shapes.
        """

    def sequences(self, job: Any) -> int:
        """Return the number of token sequences in a sample, such as those of all choices."""
        return 1

    def label_items(self, batch: Any) -> int | None:
        """Return the number of items over which the loss of this batch is averaged; None if it follows from
        `labels` as in tasks of the core.
        """
        return None

    def correct(self, out: Any, batch: Any) -> Any:
        """Return a boolean tensor with True for each correct answer of an evaluated batch.

        None for tasks without an accuracy, and for classes in `labels`.
        """
        return None


@functools.cache
def added_tasks() -> tuple[AddedTask, ...]:
    """Return the tasks, such as image classification, that features add."""
    return tuple(feature_objects("tasks", AddedTask))


_NO_TASK = AddedTask(name="", head=("", ""))
"""The methods' defaults, for tasks of the core."""


@functools.cache
def _tasks_by_name() -> Mapping[str, AddedTask]:
    return dict(zip(map(attrgetter("name"), added_tasks()), added_tasks(), strict=True))


def added_task(name: str) -> AddedTask:
    """Return the task of this name that a feature adds; for another task, one whose methods change
    nothing.
    """
    return _tasks_by_name().get(name, _NO_TASK)


def objectives() -> frozenset[str]:
    """Return the names of tasks that are a further loss of another task's head."""
    return frozenset(map(attrgetter("name"), filter(attrgetter("is_objective"), added_tasks())))


def setting_keys() -> dict[str, type]:
    """Return the settings of all added phases and tasks with their types."""
    owners: list[Any] = [*added_phases().values(), *added_tasks()]
    return {key: kind for owner in owners for key, kind in owner.setting_types.items()}


@functools.cache
def model_inputs() -> tuple[ModelInputs, ...]:
    """Return the handlers of inputs, such as pictures, that features add."""
    return tuple(feature_objects("inputs", ModelInputs))


def has_sequence(task: str) -> bool:
    """Return True if the task's batches are token sequences of the job's length. Other lengths follow from
    the model's config or a user's example.
    """
    return task != "custom" and all(inputs.takes_tokens for inputs in _kinds_with(task))


def has_target(task: str) -> bool:
    """Return True if the task's labels are sequences with their own length, as for an encoder-decoder
    model.
    """
    return task == "seq2seq-lm" or _some(task, "has_target")


def has_seconds(task: str) -> bool:
    """Return True if the task's samples are sounds of the job's length in seconds."""
    return _some(task, "has_seconds")


def has_images(task: str) -> bool:
    """Return True if the task's samples are texts with the job's number of images."""
    return _some(task, "has_images")


def has_classes(task: str) -> bool:
    """Return True if the task's labels are classes, as for classification."""
    texts = task in ("sequence-classification", "token-classification")
    return texts or _some(task, "has_classes")


def unused_sizes(task: str) -> set[str]:
    """Return the names of the job's sizes that this task does not use."""
    uses = {
        "sequence_length": has_sequence(task),
        "target_length": has_target(task),
        "seconds": has_seconds(task),
        "images": has_images(task),
        "labels": has_classes(task),
    }
    return {name for name, used in uses.items() if not used}


def _some(task: str, attribute: str) -> bool:
    """Return True if the class attribute is true for inputs of this task."""
    return any(getattr(inputs, attribute) for inputs in _kinds_with(task))


def _kinds_with(task: str) -> list[ModelInputs]:
    return [inputs for inputs in model_inputs() if task == inputs.task]


def inputs_of(task: str, architecture: str) -> ModelInputs:
    """Return the handler of a model's inputs in this task. Tokens of the core's tasks, and a user's own
    module, have one that does nothing.
    """
    return next((inputs for inputs in model_inputs() if inputs.serves(task, architecture)), _TOKENS)


_TOKENS = ModelInputs()
