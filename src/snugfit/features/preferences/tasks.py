"""Tasks of training on preferences, which the core finds by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from snugfit.features.preferences.settings import (
    FORMS,
    NOT_TRIED,
    OF_TEACHER,
    TYPES,
    complete_settings,
    objections,
)
from snugfit.job.inputs import AddedTask

CLASSIFIER = ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")
DECODER = ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


@dataclass(frozen=True, kw_only=True)
class PreferenceTask(AddedTask):
    """A task whose samples are pairs of token sequences, such as a chosen and a rejected answer."""

    is_objective: ClassVar[bool] = True
    rows: ClassVar[int] = 2
    """Number of token sequences in a sample."""
    unused: ClassVar[frozenset[str]] = frozenset(NOT_TRIED)

    def settings(self, job: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all settings of the task's loss by name, with defaults. Raises `JobError` for invalid
        ones.
        """
        return complete_settings(job, given)

    def arguments(self, job: Any) -> list[str]:
        """Return options for the settings that are not the default."""
        words, usual = list[str](), FORMS[self.name].settings
        for name, value in job.phase_settings.items():
            if name == "rollouts" and value == job.batch_size:
                continue
            if value is True:
                words.append(f"--{name.replace('_', '-')}")
                continue
            words += [f"--{name.replace('_', '-')}", str(value)] if value != usual[name] else []
        return words

    def objections(self, job: Any, recipe: Any) -> Sequence[str]:
        """Return reasons why a recipe cannot train this task, each with a remedy."""
        return [*objections(job, recipe)]

    def finish(self, job: Any, setup: Any, model: Any, build: Callable[[], Any]) -> Any:
        """Return the model with a forward pass that computes the loss of a batch of pairs."""
        from snugfit.features.preferences.passes import compute_losses

        return compute_losses(job, setup, model, build)


@dataclass(frozen=True, kw_only=True)
class RewardTask(PreferenceTask):
    """The task of reward models, which give one number to an answer."""

    head: tuple[str, str] = CLASSIFIER


@dataclass(frozen=True, kw_only=True)
class PolicyTask(PreferenceTask):
    """A task of a decoder whose loss compares log-probabilities of answers."""

    head: tuple[str, str] = DECODER
    setting_types: ClassVar[Mapping[str, type]] = TYPES


@dataclass(frozen=True, kw_only=True)
class ReferenceTask(PolicyTask):
    """A task whose loss also reads log-probabilities of the model with which the run began."""

    reads_first_weights: ClassVar[bool] = True


REWARD = RewardTask(name="reward", elsewhere=("rm",))
"""The task of a reward model on pairs of a chosen and a rejected answer."""

DPO = ReferenceTask(name="dpo")
"""Direct preference optimization, with its losses `sigmoid`, `hinge` and `ipo`."""


KTO = ReferenceTask(name="kto", mixing="its divergence is a mean over a micro-batch")
"""Training on answers that are marked as desirable or undesirable."""

ORPO = PolicyTask(name="orpo")
"""Preferences by the ratio of odds, without a reference."""

SIMPO = PolicyTask(name="simpo")
"""Preferences by mean log-probabilities, without a reference."""


@dataclass(frozen=True, kw_only=True)
class RolloutTask(PolicyTask):
    """A task whose samples are answers that the policy generates, with their advantages."""

    rows: ClassVar[int] = 1
    doubts: ClassVar[tuple[str, ...]] = (
        "The seconds have the first and the last pass of a generation. For all of it: --phase generate.",
    )


GRPO = RolloutTask(name="grpo")
"""Group relative policy optimization, for predictions."""

RLOO = RolloutTask(name="rloo")
"""REINFORCE with the other answers of a group as the baseline, for predictions."""


@dataclass(frozen=True, kw_only=True)
class DistillTask(PreferenceTask):
    """The task of a student that learns the next-token distributions of a teacher."""

    head: tuple[str, str] = DECODER
    rows: ClassVar[int] = 1
    setting_types: ClassVar[Mapping[str, type]] = OF_TEACHER
    doubts: ClassVar[tuple[str, ...]] = (
        "With --lmbda above 0 the step has an answer's generation, and its seconds only the first and the "
        "last pass of it. For all of it: --phase generate.",
    )

    def settings(self, job: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all settings of the loss, with the teacher as the JSON object of its `Model`. Raises
        `JobError` for invalid ones.
        """
        from snugfit.features.preferences.distillation import complete_teacher

        return complete_teacher(job, complete_settings(job, given))

    def arguments(self, job: Any) -> list[str]:
        """Return options for the settings that are not the default."""
        words = super().arguments(job)
        words[words.index("--teacher") + 1] = job.phase_settings["teacher"]["name"]
        return words

    def finish(self, job: Any, setup: Any, model: Any, build: Callable[[], Any]) -> Any:
        """Return the model with a forward pass that also runs the teacher."""
        from snugfit.features.preferences.distillation import add_teacher

        return add_teacher(job, setup, model)


DISTILL = DistillTask(name="distill", elsewhere=("gkd",))
"""Generalized knowledge distillation, for predictions, plans and measurements."""
