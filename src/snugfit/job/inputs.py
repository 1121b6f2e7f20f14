"""Tasks and model inputs other than tokens, such as pictures and sound, which features add. A feature's
module `tasks.py` has an `AddedTask` for each, which is read before there are jobs. Its module `inputs.py` has
one `ModelInputs` for each input type. A batch of tokens belongs to the core (`batch.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from snugfit.feature_folders import feature_objects


@dataclass(frozen=True, kw_only=True)
class AddedTask:
    """A task, such as image classification, that a feature adds."""

    name: str
    """Name of the task: its value in `Task`."""

    head: tuple[str, str]
    """Auto class and model types of the task, in the form of `HEADS` in `architectures.py`."""

    elsewhere: str = ""
    """Name of the task on the Hugging Face hub; empty if it is the same."""


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
