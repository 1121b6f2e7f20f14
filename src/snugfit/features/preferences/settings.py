"""The form and the settings of each task's loss, and the recipes that cannot train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError, did_you_mean
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

LOSSES = ("sigmoid", "hinge", "ipo")
"""Losses of the task `dpo`, by TRL's names."""

REFERENCES = ("auto", "copy", "adapter", "precomputed")
"""Sources of the reference's log-probabilities: a second model, the policy without its adapters, or the data.
With `auto`, the recipe's adapters decide between the first two.
"""

ONE_GPU = "it was tried on one GPU only"
NOT_TRIED: Mapping[Slot, str] = {
    Slot.HEAD: "its loss reads whole sequences of log-probabilities",
    Slot.ENGINE: "it was not tried in compiled or recorded steps",
    Slot.SHARDING: ONE_GPU,
    Slot.TENSOR_PARALLEL: ONE_GPU,
    Slot.CONTEXT_PARALLEL: ONE_GPU,
    Slot.EXPERT_PARALLEL: ONE_GPU,
    Slot.PIPELINE_PARALLEL: ONE_GPU,
}
"""Reasons against all techniques of a slot (choice of a recipe) but the default, by slot."""


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """The inputs, the passes and the settings of a task's loss."""

    tensors: tuple[str, ...] = ("input_ids", "attention_mask", "labels")
    """Names of the tensors of a batch."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Default of each setting by name."""


OF_ANSWERS: Mapping[str, Any] = {"completion_length": 0}

OF_ROLLOUTS = ("input_ids", "attention_mask", "advantages")
ROLLOUTS: Mapping[str, Any] = {
    **OF_ANSWERS, "rollouts": 0, "generation": "transformers", "vllm_share": 0.3, "old_log_probs": False,
}  # fmt: skip
"""Settings of a policy that generates its answers. `rollouts` are generated at once, by default the batch.
vLLM in the same process takes its share of the GPU's memory. `old_log_probs` adds the pass of TRL's runs with
several updates for each generation.
"""

FORMS: Mapping[str, LossForm] = {
    "reward": LossForm(tensors=("input_ids", "attention_mask")),
    "dpo": LossForm(settings={"loss_type": "sigmoid", "beta": 0.1, "reference": "auto", **OF_ANSWERS}),
    "orpo": LossForm(settings={"beta": 0.1, **OF_ANSWERS}),
    "simpo": LossForm(settings={"beta": 2.0, "gamma": 0.5, **OF_ANSWERS}),
    "kto": LossForm(
        tensors=("input_ids", "attention_mask", "labels", "desirable"),
        settings={"beta": 0.1, "reference": "auto", **OF_ANSWERS},
    ),
    "grpo": LossForm(tensors=OF_ROLLOUTS, settings={"beta": 0.0, **ROLLOUTS}),
    "rloo": LossForm(tensors=OF_ROLLOUTS, settings={"beta": 0.05, **ROLLOUTS}),
    "distill": LossForm(
        settings={"teacher": "", "teacher_dtype": "auto", "beta": 0.5, "lmbda": 0.5, **OF_ANSWERS}
    ),
}
"""Form of the loss by task. The defaults are those of TRL, and for SimPO those of its article."""

ON_ROLLOUTS = ("grpo", "rloo")
"""Tasks whose samples are answers that the policy generates. They are predicted, and not trained."""

OF_TEACHER: Mapping[str, type] = {
    "teacher": str, "teacher_dtype": str, "beta": float, "lmbda": float, "completion_length": int,
}  # fmt: skip
"""Type of each setting of `distill`. `lmbda` is the share of steps on answers of the student, by TRL's
name.
"""

TYPES: Mapping[str, type] = {
    "loss_type": str, "beta": float, "reference": str, "gamma": float, "completion_length": int,
    "rollouts": int, "generation": str, "vllm_share": float, "old_log_probs": bool,
}  # fmt: skip
"""Type of each setting."""


def tensors_of(job: Job) -> tuple[str, ...]:
    """Return the names of the tensors of a job's batches."""
    more = ("reference_log_probs",) if job.phase_settings.get("reference") == "precomputed" else ()
    return (*FORMS[job.task].tensors, *more)


def complete_settings(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a job's loss by name, with defaults. Raises `JobError` for invalid ones."""
    usual = FORMS[job.task].settings
    for name in given:
        if name not in usual:
            known = f"Settings: {', '.join(usual)}." if usual else "It has none, so leave it out."
            raise JobError(f"The task {job.task} has no setting {name!r}.{did_you_mean(name, usual)} {known}")
    settings = {**usual, **given}
    choices = (("loss_type", LOSSES), ("reference", REFERENCES), ("generation", ("transformers", "vllm")))
    for name, allowed in choices:
        if (value := settings.get(name, allowed[0])) not in allowed:
            raise JobError(
                f"{name.replace('_', ' ')} is {value!r}.{did_you_mean(str(value), allowed)} Allowed are "
                f"{', '.join(allowed)}."
            )
    from_0 = job.task in (*ON_ROLLOUTS, "distill")
    for name, least in (("beta", -1e-9 if from_0 else 0.0), ("gamma", -1.0)):
        value = settings.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < 1e6:
            low = "from 0" if -1 < least < 0 else f"above {least:.0f}"
            raise JobError(f"{name} is {value!r}; allowed are numbers {low}, such as 0.1.")
    if not 0 <= (share := settings.get("vllm_share", 0.0)) < 1:
        raise JobError(f"vllm share is {share!r}; allowed are shares of the GPU's memory from 0 to below 1.")
    if job.task in ON_ROLLOUTS:
        # A simulation of few micro-batches has a smaller batch, and the same generation.
        settings["rollouts"] = settings["rollouts"] or job.batch_size
        if type(settings["rollouts"]) is not int or not 0 < settings["rollouts"] < 1 << 20:
            raise JobError(f"rollouts is {settings['rollouts']!r}; allowed are whole numbers from 1.")
        if job.sequence_length < 4:
            raise JobError(f"sequence length is {job.sequence_length}; a prompt with an answer needs 4.")
    length = settings.get("completion_length", 0)
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < job.sequence_length:
        raise JobError(
            f"completion length is {length!r}; allowed are whole numbers below the sequence length "
            f"{job.sequence_length}, which counts the prompt too, and 0 for half of it. Set a longer "
            "sequence length, or fewer tokens of an answer."
        )
    _refuse_encoder_decoder(job)
    return settings


def _refuse_encoder_decoder(job: Job) -> None:
    if job.model.config.get("is_encoder_decoder") or job.model.architecture in ("bart", "mbart", "t5"):
        raise JobError(
            f"{job.model.name} has an encoder and a decoder, which the task {job.task} does not support "
            "yet. Give a model with one stack of layers."
        )


def objections(job: Job, recipe: Recipe) -> Iterator[str]:
    """Yield reasons why a recipe cannot train a job of such a task, each with a remedy."""
    for technique in recipe:
        if (reason := NOT_TRIED.get(technique.slot)) and not technique.plain:
            yield f"the task {job.task} does not support {technique} yet: {reason}. Leave it out."
        if technique.name == "liger":
            yield f"the task {job.task} does not support {technique} yet. Try 'fused', or leave it out."
    reference, adapters = job.phase_settings.get("reference"), recipe[Slot.ADAPTERS]
    is_adapted = not adapters.plain and adapters.name != "frozen"
    if reference == "adapter" and not is_adapted:
        yield "the reference 'adapter' needs adapters. Add lora to the recipe, or try --reference copy."
    if reference == "copy" and is_adapted:
        yield (
            f"with {adapters} the model without adapters is the reference already. Leave --reference copy "
            "out."
        )
