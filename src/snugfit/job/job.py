"""The job: the training task, independent of the recipe that runs it.

No recipe may change its fields: the model, the task, the lengths and the padding, the global batch, clipping,
the decaying parameters. The GPU is not a part of the job. A recipe may cut the global batch into
micro-batches, but their sum is the job's batch, always.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from snugfit.errors import JobError, did_you_mean
from snugfit.job.architectures import class_names, class_of, heads, tasks_of, transformers_version
from snugfit.job.dtype import DTYPES, dtype_name
from snugfit.job.inputs import AddedTask, added_task, added_tasks, has_sequence, has_target, inputs_of
from snugfit.job.limits import length_problem
from snugfit.job.model import Model
from snugfit.job.phases import AddedPhase, PhaseWords, added_phases, words_by_phase

LARGEST_BATCH = 1 << 20
LARGEST_LENGTH = 1 << 24
MOST_IMAGES = 1 << 10
LONGEST_SOUND = 3_600
"""Largest accepted length of a sound in seconds. No dataset of transformers' examples has sounds of an hour.
"""

MOST_LABELS = 1 << 18
"""Largest accepted number of labels. transformers writes each label's name several times, and public label
sets have fewer labels.
"""

UPDATE_FIELDS = ("clip", "decay_groups", "learning_rate")
"""Fields of a job that only an optimizer step reads."""

_HUB_TASKS = {
    "text-classification": "sequence-classification",
    "sentiment-analysis": "sequence-classification",
    "seq-cls": "sequence-classification",
    "ner": "token-classification",
    "token-cls": "token-classification",
    "text-generation": "causal-lm",
    "fill-mask": "masked-lm",
    "mlm": "masked-lm",
    "summarization": "seq2seq-lm",
    "translation": "seq2seq-lm",
    "text2text-generation": "seq2seq-lm",
}
"""Names of tasks of a job, by their names in the hub's pipelines and in peft."""


CUSTOM = "custom"
"""Name of the task of a user's own `nn.Module`, which is given in Python with an example batch."""


class TaskBase(StrEnum):
    """Task of a model (output of its head), named after transformers' heads."""

    @classmethod
    def parse(cls, text: str, model_type: str = "") -> Self:
        """Return the task called `text`, in snugfit's or the hub's words. If several tasks have this name,
        the type of the model decides. Raises `JobError` with the allowed names.

        `custom` is parsed but not listed. It is for modules from Python, and `_refuse_task` rejects it for
        other models.
        """
        legal = [task.value for task in cls if task.value != CUSTOM]
        if text not in (*legal, CUSTOM):
            # The hub and peft write tasks in other ways.
            plain = str(text).lower().replace("_", "-").replace(" ", "-")
            named = [added.name for added in added_tasks() if plain in (added.name, *added.elsewhere)]
            named.sort(key=lambda name: not class_names(name, model_type))
            if (name := next(iter(named), _HUB_TASKS.get(plain, plain))) in legal:
                return cls(name)
            raise JobError(f"Unknown task {text!r}.{did_you_mean(text, legal)} Tasks: {', '.join(legal)}.")
        return cls(text)


# mypy cannot follow an enumeration that is read from the table of heads.
if TYPE_CHECKING:

    class Task(TaskBase):
        """Training tasks, such as `causal-lm`; features add further ones."""

        SEQUENCE_CLASSIFICATION = "sequence-classification"
        TOKEN_CLASSIFICATION = "token-classification"
        CAUSAL_LM = "causal-lm"
        MASKED_LM = "masked-lm"
        SEQ2SEQ_LM = "seq2seq-lm"
        CUSTOM = CUSTOM

else:
    names = (*heads(), CUSTOM)
    Task = TaskBase("Task", {name.upper().replace("-", "_"): name for name in names}, module=__name__)
    Task.__doc__ = TaskBase.__doc__


class PhaseBase(StrEnum):
    """The use of a model in a job: training, evaluation, or one that a feature adds."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the phase called `text`. Raises `JobError` with the allowed names."""
        legal = [phase.value for phase in cls]
        if text not in legal:
            raise JobError(f"Unknown phase {text!r}.{did_you_mean(text, legal)} Phases: {', '.join(legal)}.")
        return cls(text)


# As for tasks, mypy cannot follow an enumeration with members from features.
if TYPE_CHECKING:

    class Phase(PhaseBase):
        """Phases of a model's use, such as training and evaluation; features add further ones."""

        TRAIN = "train"
        EVALUATE = "evaluate"

else:
    names = ("train", "evaluate", *added_phases())
    Phase = PhaseBase("Phase", {name.upper(): name for name in names}, module=__name__)
    Phase.__doc__ = PhaseBase.__doc__


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training task: model, task, lengths, global batch, clipping, decay groups."""

    model: Model
    """Architecture of the model, from a preset, a config, a directory, the hub's cache, or Python."""

    task: Task = ""  # type: ignore[assignment]  # becomes a Task
    """Task for which the model has a head. It determines the shapes of a batch. The default is the task of
    the architecture in the config.
    """

    phase: Phase = Phase.TRAIN
    """Use of the model: `train` takes optimizer steps; `evaluate` runs the forward pass without gradients."""

    phase_settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings, by name, of a phase or a task that a feature adds; empty for other jobs."""

    batch_size: int = 4
    """Number of samples in one optimizer step (global batch size). A recipe may split the batch, but never
    changes its size.
    """

    sequence_length: int = 512
    """Number of tokens in one input sequence (encoder side); not used by images and speech."""

    target_length: int = 128
    """Number of tokens in one target sequence, for models with a separate decoder (T5, Whisper)."""

    images: int = 1
    """Number of images in a sample of text."""

    seconds: float = 30.0
    """Length in seconds of a sample's sound, for encoders that take sounds of any length."""

    padding: float = 0.0
    """Fraction of each sequence that is padding, in [0, 1). If it is 0, no attention mask is passed."""

    labels: int = 2
    """Number of classes of a classification head."""

    clip: float | None = None
    """Largest global gradient norm. With None the loop decides: the plain and the accelerate loop do not
    clip, the HF Trainer clips at 1.0. With 0 no loop clips.
    """

    decay_groups: bool = False
    """True if biases and norms are excluded from weight decay, by two parameter groups in place of one."""

    learning_rate: float = 5e-5
    """Learning rate of the optimizer. It changes no predicted bytes, but a training run needs it."""

    build_on: str = "device"
    """Place where the model is constructed: `device`, on which it trains, or `host` (the CPU), from which it
    is moved.
    """

    dtype: str = "auto"
    """Dtype in which the weights are loaded: `float32`, `bfloat16` or `float16`.

    `auto`, or None, is the dtype of the model's config, as transformers loads it. If the config has none, it
    is `float32`.
    """

    mixes_samples: str = field(default="", compare=False, repr=False)
    """Reason, found with example data, why the loss is not a mean over samples; empty without one.
    `mixing_of` also examines the model.
    """

    unclear_cut: str = field(default="", compare=False, repr=False)
    """Reason why example data could not show that a batch may be split; empty if it could, or without data.
    """

    routing: str = "balanced"
    """Assumption about the experts that a router chooses, since the choice depends on weights. `balanced`
    sends tokens evenly to experts, `worst` all to the same ones.
    """

    def __post_init__(self) -> None:
        _refuse_what_is_no_model(self.model)
        if self.task == "":
            # The class is frozen, so text becomes an enum around its own assignment.
            object.__setattr__(self, "task", _task_of(self.model))
        if not isinstance(self.task, Task):  # people write plain strings
            object.__setattr__(self, "task", Task.parse(self.task, self.model.architecture))
        if not isinstance(self.phase, Phase):
            object.__setattr__(self, "phase", Phase.parse(self.phase))
        object.__setattr__(self, "dtype", _loaded_dtype(self.dtype, self.model))
        _in_range("batch size", self.batch_size, LARGEST_BATCH)
        _in_range("sequence length", self.sequence_length, LARGEST_LENGTH)
        _in_range("target length", self.target_length, LARGEST_LENGTH)
        _in_range("labels", self.labels, MOST_LABELS)
        _in_range("images", self.images, MOST_IMAGES)
        if not _is_number(self.seconds) or not 0 < self.seconds <= LONGEST_SOUND:
            raise JobError(
                f"seconds is {self.seconds!r}; it must be a number above 0, up to {LONGEST_SOUND:,}."
            )
        if not _is_number(self.padding) or not 0 <= self.padding < 1:
            raise JobError(
                f"padding is {self.padding!r}; it must be a fraction of each sequence, from 0 to below 1."
            )
        if self.clip is not None and not (_is_number(self.clip) and 0 <= self.clip < math.inf):
            raise JobError(
                f"clip is {self.clip!r}; it must be a gradient norm above 0, or 0 or None for no clipping."
            )
        if not _is_number(self.learning_rate) or not 0 <= self.learning_rate < math.inf:
            raise JobError(
                f"learning rate is {self.learning_rate!r}; it must be a number from 0, such as 5e-5."
            )
        if not isinstance(self.decay_groups, bool):
            raise JobError(f"decay_groups is {self.decay_groups!r}; it must be True or False.")
        if self.build_on not in ("device", "host"):
            raise JobError(
                f"build_on is {self.build_on!r}; it must be 'device' or 'host', where the model is built."
            )
        if self.routing not in ("balanced", "worst"):
            raise JobError(
                f"routing is {self.routing!r}; it must be 'balanced' (tokens go evenly to all experts) or "
                "'worst' (all to the same)."
            )
        # Only sequences and targets can be padded.
        if self.padding and not (has_sequence(self.task) or has_target(self.task)):
            raise JobError(
                f"padding is {self.padding}, but the batches of the task {self.task} have no padding."
            )
        _refuse_task(self)
        if self.model.module is None:
            # A module from Python has no config that could limit its positions.
            refuse_lengths(self, self.model.config)
        object.__setattr__(self, "phase_settings", _complete_settings(self))

    @property
    def words(self) -> PhaseWords:
        """Words of reports for the job's phase."""
        return words_by_phase()[self.phase]

    @property
    def added_phase(self) -> AddedPhase | None:
        """The feature's phase (use of the model) that the job has; None for training and evaluation."""
        return added_phases().get(self.phase)

    @property
    def added_task(self) -> AddedTask:
        """The feature's task that the job has; for a task of the core, one whose methods change nothing."""
        return added_task(self.task)

    @property
    def trains(self) -> bool:
        """True if the job trains, so that it takes optimizer steps."""
        return self.phase is Phase.TRAIN

    @property
    def tokens(self) -> int:
        """Number of tokens in a step's batch, or in a user's example; 0 if inputs are not tokens."""
        if (added := self.added_phase) is not None:
            return added.tokens(self)
        if has_sequence(self.task):
            sequences = self.batch_size * inputs_of(self.task, self.model.architecture).sequences(self)
            return sequences * self.sequence_length
        ids = (self.model.example or {}).get("input_ids")
        # If a user's example has token ids, their sizes count.
        return self.batch_size * (int(ids.numel()) // max(1, len(ids))) if ids is not None else 0

    def transformers_config(self) -> Any:
        """Return a fresh transformers config of the model for this job's task and labels."""
        return self.model.transformers_config(self.task, self.labels)

    def config_to_read(self) -> Any:
        """Return the transformers config of the job's model as one shared, read-only object, since a
        simulation reads it often.
        """
        return _config_to_read(self.model, self.task, self.labels)

    def stated_dropout(self, of: str = "") -> str:
        """Return a description of the dropout in the model's config, such as `dropout=0.1`. `of` limits it to
        keys with this text. Empty without dropout or config.
        """
        return "" if self.model.module is not None else dropout_among(vars(self.config_to_read()), of)

    def ties_embeddings(self) -> bool:
        """Return True if the model's head and its embedding are one matrix."""
        return bool(getattr(self.config_to_read().get_text_config(), "tie_word_embeddings", False))

    def model_class(self) -> Any:
        """Return the class of the job's model, without any adapters around a module from Python."""
        # Adapters wrap the model, and their class has another name.
        module: Any = self.model.module
        if module is None:
            return class_of(self.task, self.config_to_read())
        return type(module.get_base_model() if hasattr(module, "get_base_model") else module)

    def to_json(self) -> dict[str, Any]:
        """Return the job as a JSON object; `Job.from_json` reads it back."""
        # Fields that do not compare are findings about the data, not the job.
        document = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.compare}
        return {**document, "model": self.model.to_json()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Return the job from the JSON object of `to_json`. Raises `JobError` if the model existed only in
        Python.
        """
        if not isinstance(document, dict):
            raise JobError(
                f"This is not a job document of snugfit, but of type {type(document).__name__}. Give "
                "what Job.to_json() returned."
            )
        if lacking := {"model", "task"} - set(document):
            raise JobError(
                f"This is not a job document of snugfit: it has no {' and no '.join(sorted(lacking))}. "
                "Give what Job.to_json() returned."
            )
        if unknown := set(document) - {entry.name for entry in fields(cls) if entry.compare}:
            raise JobError(
                "This job was written by another version of snugfit. Unknown keys: "
                f"{', '.join(sorted(unknown))}. Read it with that version."
            )
        earlier = {"dtype": "float32"}  # the dtype of weights before jobs had this key
        return cls(**{**earlier, **document, "model": Model.from_json(document["model"])})


@lru_cache(maxsize=64)
def _config_to_read(model: Model, task: str, labels: int) -> Any:
    return model.transformers_config(task, labels)


def dropout_among(facts: Mapping[str, Any], part: str = "") -> str:
    """Return the first dropout in a config as text, such as `dropout=0.1`, from keys that contain `part`;
    empty without dropout.
    """
    return next(
        (
            f"{key}={value}"
            for key, value in facts.items()
            if part in key and "drop" in key and isinstance(value, float) and value
        ),
        "",
    )


def refuse_what_is_no_job(job: object) -> None:
    """Raise `JobError` if the object is not a `Job` but, for example, a model's name or a `Model`."""
    if isinstance(job, Job):
        return
    shown = repr(job) if isinstance(job, str | os.PathLike) else type(job).__name__
    model = f"Model.find({str(job)!r})" if isinstance(job, str | os.PathLike) else "model"
    raise JobError(
        f"job is {shown}; it must be a snugfit.Job, such as Job(model={model}, "
        "task='sequence-classification')."
    )


def _refuse_what_is_no_model(model: object) -> None:
    """Raise `JobError` if the object is not a `Model` but, for example, a name, a path or a module."""
    if isinstance(model, Model):
        return
    shown = repr(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    named = f"Model.find({str(model)!r})" if isinstance(model, str | os.PathLike) else "Model.find(name)"
    raise JobError(
        f"model is {shown}; it must be a snugfit.Model: {named}, or Model.from_module(module, example)."
    )


def _loaded_dtype(dtype: object, model: Model) -> str:
    """Return the dtype in which a model's weights are loaded. Raises `JobError` for an unsupported dtype, and
    for another one than a module's weights have.
    """
    name = dtype_name("auto" if dtype is None else dtype)
    # A module already has a dtype, so another one in the job is a contradiction.
    if model.module is not None:
        if name not in ("auto", model.dtype):
            raise JobError(
                f"dtype is {name!r}, and the weights of the module {model.name} are {model.dtype}. Cast the"
                f" module itself, module.to(torch.{name}), or leave dtype out."
            )
        return model.dtype or DTYPES[0]
    source = ""
    if name == "auto":
        name, source = model.dtype or DTYPES[0], f", as the checkpoint of {model.name} is"
    if name not in DTYPES:
        guess = did_you_mean(name, DTYPES)
        raise JobError(f"dtype is {name!r}{source}.{guess} Allowed are {', '.join(DTYPES)}, and auto.")
    return name


def refuse_lengths(job: Job, config: Mapping[str, Any]) -> None:
    """Raise `JobError` when a sequence of the job is longer than the positions of its model.

    The keys of `config` are read first. If their limit is too short, the architecture's complete config is
    read, since old files omit defaults of their class. That imports transformers.
    """
    lengths = (job.task, job.sequence_length, job.target_length)
    # Most configs have the length of their position table, and need no import of transformers.
    if length_problem(config, *lengths) is None:
        return
    if problem := length_problem(job.config_to_read().to_dict(), *lengths):
        raise JobError(f"{job.model.name}: {problem}")


def _refuse_task(job: Job) -> None:
    """Raise `JobError` when the model has no head for the task. If it has one, no large package is
    imported.
    """
    model = job.model
    if model.module is not None:
        if job.task is not Task.CUSTOM:
            raise JobError(
                f"{model.name} is a module from Python, so its task must be 'custom', not {job.task}."
            )
        return
    possible = tasks_of(model.architecture)
    if job.task not in possible:
        raise JobError(
            f"{model.name} ({model.architecture}) has no head for {job.task} in transformers"
            f" {transformers_version()}. Tasks it has: {', '.join(possible) or 'none'}."
        )


def _complete_settings(job: Job) -> dict[str, Any]:
    """Return the complete settings of the job's phase, or else of its task. Raises `JobError` for settings
    that it does not have.
    """
    owner = job.added_phase or job.added_task
    return dict(owner.settings(job, job.phase_settings))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_range(field_name: str, value: object, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise JobError(f"{field_name} is {value!r}; allowed are whole numbers from 1 to {high:,}.")


def _task_of(model: Model) -> str:
    """Return the task that the model implies, for a job without one. Raises `JobError` if several are
    possible.
    """
    task = "custom" if model.module is not None else model.task
    if task is None:
        possible = ", ".join(tasks_of(model.architecture))
        several = f"several. Give one of: {possible}." if possible else "none that is installed here."
        raise JobError(f"No task: {model.name} ({model.architecture}) has {several}")
    return task
