"""A student that learns the next-token distributions of a teacher: the task `distill`, TRL's GKDTrainer.

A step runs the student over B sequences, then the teacher without gradients, and compares their logits at
the tokens of answers. In a share `lmbda` of the steps, the student first generates these answers. The bytes
are those of such a step, which has all tensors of the other one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError, SnugfitError
from snugfit.features.preferences.losses import distillation_loss
from snugfit.features.preferences.passes import (
    Losses,
    RolloutForward,
    arguments_of,
    refuse_processes,
    replace_forward,
)
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.step.own_forward import forward_of

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup


@dataclass(frozen=True, kw_only=True)
class DistillForward(RolloutForward):
    """The forward pass of a student beside its teacher, after a generation if `lmbda` is above 0."""

    teacher: Any
    """The frozen model whose next-token distributions the student learns."""

    in_fp32: bool
    """True if logits are cast to fp32, as accelerate does with the outputs of autocast regions."""

    def takes(self, batch: Mapping[str, Any]) -> bool:
        """Return True for a batch with labels."""
        return "labels" in batch

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Losses:
        """Return the mean divergence of student and teacher over the tokens of answers, as a loss and without
        gradients.
        """
        import torch

        ids = batch["input_ids"]
        length = self.answer_length(ids)
        # TRL generates in each micro-batch, and never in an evaluation.
        if model.training and self.settings["lmbda"]:
            self.generate(model, ids[:, :-length], length)
        student = self._in_fp32(self.inner(**arguments_of(model, batch)))
        with torch.no_grad():
            # TRL calls the teacher with its cache, which is alive until the loss is computed.
            given = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
            teacher = self._in_fp32(self.teacher(**given))
        labels = batch["labels"][:, 1:]
        loss = distillation_loss(
            student.logits[:, :-1], teacher.logits[:, :-1], labels, self.settings["beta"]
        )
        return loss, loss.detach()

    def _in_fp32(self, outputs: Any) -> Any:
        if self.in_fp32:
            outputs.logits = outputs.logits.float()
        return outputs


def teacher_job(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the evaluation of a job's teacher, from settings with the JSON object of its `Model`. Raises
    `JobError` for a teacher without a head for causal language models, or with too few positions.
    """
    try:
        return replace(
            job,
            model=Model.from_json(settings["teacher"]),
            task=Task.CAUSAL_LM,
            phase=Phase.EVALUATE,
            phase_settings={},
            dtype=settings["teacher_dtype"],
        )
    except SnugfitError as error:
        raise JobError(f"The teacher cannot be used. {error}") from None


def complete_teacher(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the teacher as the JSON object of its `Model`.

    Raises `JobError` for a missing or unusable teacher, for another vocabulary than the student's, and for
    shares outside of 0 to 1.
    """
    for name in ("beta", "lmbda"):
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise JobError(f"{name} is {value!r}; allowed for the task {job.task} are numbers from 0 to 1.")
    teacher = settings["teacher"]
    if not teacher:
        raise JobError(
            f"The task {job.task} needs a teacher with the vocabulary of {job.model.name}. Give its name or "
            "its folder: --teacher NAME."
        )
    if job.sequence_length < 2:
        raise JobError(f"sequence length is {job.sequence_length}; a prompt with an answer needs 2.")
    if not isinstance(teacher, Mapping):
        teacher = (teacher if isinstance(teacher, Model) else Model.find(teacher)).to_json()
    settings = {**settings, "teacher": teacher}
    other = teacher_job(job, settings).model
    # A config may leave its vocabulary to the defaults of its class.
    if job.model.vocabulary and other.vocabulary and job.model.vocabulary != other.vocabulary:
        raise JobError(
            f"{job.model.name} has {job.model.vocabulary:,} tokens, and the teacher {other.name} "
            f"{other.vocabulary:,}. The loss compares probabilities of equal tokens. Give a teacher with the "
            "student's vocabulary."
        )
    return settings


def add_teacher(job: Job, setup: Setup, model: Any) -> Any:
    """Replace the forward pass of a built student by one that also runs its teacher. Return the student.

    Raises `UsageError` for several processes.
    """
    from snugfit.job.build import instantiate

    refuse_processes(job, setup)
    settings = job.phase_settings
    with next(model.parameters()).device:
        # TRL loads the teacher unquantized, in a dtype of its own.
        teacher = instantiate(
            teacher_job(job, settings), dtype=None, attention=setup.attention
        ).requires_grad_(False)
    forward = DistillForward(
        inner=forward_of(model),
        task=job.task,
        settings=dict(settings),
        teacher=teacher,
        in_fp32=setup.autocast is not None,
    )
    return replace_forward(model, forward)
