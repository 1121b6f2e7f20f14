"""Tasks and model inputs other than tokens, such as pictures and sound, which features add. A feature's
module `tasks.py` has an `AddedTask` for each, which is read before there are jobs. Its module `inputs.py` has
one `ModelInputs` for each input type. A batch of tokens belongs to the core (`batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    elsewhere: str = ""
    """Name of the task on the Hugging Face hub; empty if it is the same."""

    kind: ClassVar[str] = "task"
    """Noun for the object in messages; that of a phase is `phase`."""

    is_objective: ClassVar[bool] = False
    """True for another loss of a head that has a task already, so that no architecture implies the task."""

    rows: ClassVar[int] = 1
    """Number of token sequences in a sample."""

    doubts: ClassVar[tuple[str, ...]] = ()
    """Warnings that each prediction of the task has."""

    mixing: ClassVar[str] = ""
    """Reason why the loss is not a mean over samples; empty without one."""

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

    def complete(self, config: Any) -> None:
        """Change keys of a transformers config as the task requires."""

    def complete_batch(self, job: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a synthetic batch with the inputs of the loss of this job."""
        return batch

    def counted_labels(self, batch: Mapping[str, Any]) -> Any:
        """Return the labels over which the loss is a mean: (B), or with -100 for tokens outside the loss."""
        return batch["labels"]

    def objections(self, job: Any, recipe: Any) -> Sequence[str]:
        """Return reasons why a recipe cannot run a job of this task, each with a remedy."""
        return ()

    def finish(self, job: Any, setup: Any, model: Any, build: Callable[[], Any]) -> Any:
        """Return the built model, changed for the task's loss. `build` returns another model of the job, with
        random weights and without the recipe's changes.
        """
        return model


class ModelInputs:
    """Interface for one type of non-token inputs of a model, such as pictures or sound."""

    task: ClassVar[str] = ""
    """Name of the added task whose models all take these inputs; empty without one."""

    has_classes: ClassVar[bool] = False
    """True if the labels of the task are classes."""

    has_target: ClassVar[bool] = False
    """True if the labels of the task are the tokens of a target sequence with its own length."""

    def serves(self, task: str, architecture: str) -> bool:
        """Return True if a model of this architecture takes these inputs in this task."""
        return task == self.task

    def complete(self, config: Any) -> None:
        """Add keys that these inputs need to a transformers config, as configs of the hub have them."""

    def of_job(self, job: Any, config: Any) -> Any:
        """Return the `SampleInputs` (`batch.py`) of a job. Raise `JobError` for a model of unknown shapes."""
        raise NotImplementedError


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
    """Return the handlers of non-token inputs, such as pictures, that features add."""
    return tuple(feature_objects("inputs", ModelInputs))


def has_sequence(task: str) -> bool:
    """Return True if the task's batches are token sequences of the job's length. Other lengths follow from
    the model's config or a user's example.
    """
    return task != "custom" and not _kinds_with(task)


def has_target(task: str) -> bool:
    """Return True if the task's labels are sequences with their own length, as for an encoder-decoder
    model.
    """
    return task == "seq2seq-lm" or any(inputs.has_target for inputs in _kinds_with(task))


def has_classes(task: str) -> bool:
    """Return True if the task's labels are classes, as for classification."""
    texts = task in ("sequence-classification", "token-classification")
    return texts or any(inputs.has_classes for inputs in _kinds_with(task))


def _kinds_with(task: str) -> list[ModelInputs]:
    return [inputs for inputs in model_inputs() if task == inputs.task]


def inputs_of(task: str, architecture: str) -> ModelInputs | None:
    """Return the handler of a model's non-token inputs, such as pictures, in this task; None for tokens or a
    user's own module.
    """
    return next((inputs for inputs in model_inputs() if inputs.serves(task, architecture)), None)
