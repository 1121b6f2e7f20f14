"""Losses of training on preferences, each a scalar for a batch of B samples.

Scores and log-probabilities are (B, 2): the chosen and the rejected answer. The log-probability of an answer
is the sum over its tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.job.batch import IGNORED

if TYPE_CHECKING:
    import torch


class LogProbs(NamedTuple):
    """Log-probabilities of answers and their numbers of tokens, each (B, 2) or (B)."""

    sums: torch.Tensor
    tokens: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Mean log-probability of an answer's tokens."""
        return self.sums / self.tokens.clamp(min=1)


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> LogProbs:
    """Return the log-probabilities of R answers from logits (R, S, V) and labels (R, S), -100 outside of
    answers.

    The token at a position is predicted by the logits of the position before it. Sums are in fp32.
    """
    from torch.nn.functional import pad

    # Labels are shifted, since a copy of the logits would be the largest tensor of the step.
    targets = pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return LogProbs(_token_log_probs(logits, targets).sum(1), (targets != IGNORED).sum(1))


def _token_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import cross_entropy

    flat = logits.float().flatten(0, 1), targets.flatten()
    return -cross_entropy(*flat, ignore_index=IGNORED, reduction="none").view_as(targets)


def answer_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities (B, C) of the last C tokens of ids (B, S). `logits` (B, C + 1, V) are
    those of the last C + 1 positions.
    """
    from torch.nn.functional import pad

    length = logits.shape[1] - 1
    return _token_log_probs(logits, pad(ids[:, -length:], (0, 1), value=IGNORED))[:, :length]


def reward_loss(rewards: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log sigmoid(chosen - rejected) over rewards (B, 2).

    Source: Ouyang et al., arXiv 2203.02155, equation 1, from the model of Bradley and Terry (1952).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()


def dpo_loss(
    policy: LogProbs, reference: torch.Tensor, settings: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss of direct preference optimization, and the answers' implicit rewards (B, 2).

    With r = policy - reference: `sigmoid` is -log sigmoid(beta (r_chosen - r_rejected)) (Rafailov et al.,
    arXiv 2305.18290, equation 7). `hinge` is max(0, 1 - beta (r_chosen - r_rejected)) (Zhao et al., arXiv
    2305.10425). `ipo` is (r_chosen - r_rejected - 1 / (2 beta))^2, with means of r over tokens as in TRL
    (Azar et al., arXiv 2310.12036, equation 17).
    """
    from torch.nn.functional import logsigmoid, relu

    ratios, beta = policy.sums - reference, settings["beta"]
    if settings["loss_type"] == "ipo":
        means = ratios / policy.tokens.clamp(min=1)
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2
    else:
        margins = beta * (ratios[:, 0] - ratios[:, 1])
        losses = relu(1 - margins) if settings["loss_type"] == "hinge" else -logsigmoid(margins)
    return losses.mean(), beta * ratios.detach()


def orpo_loss(policy: LogProbs, settings: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of ORPO, and beta times the mean log-probabilities of answers (B, 2).

    With the mean log-probabilities m: -m_chosen - beta log sigmoid(log odds_chosen - log odds_rejected) and
    log odds = m - log(1 - exp(m)). Source: Hong et al., arXiv 2403.07691, equations 4 to 7. TRL's first term
    also counts the tokens of prompts.
    """
    import torch
    from torch.nn.functional import logsigmoid

    means = policy.means
    odds = means - torch.log1p(-torch.exp(means))
    losses = -means[:, 0] - settings["beta"] * logsigmoid(odds[:, 0] - odds[:, 1])
    return losses.mean(), settings["beta"] * means.detach()


def simpo_loss(policy: LogProbs, settings: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of SimPO, and the answers' rewards (B, 2).

    With the mean log-probabilities m: -log sigmoid(beta (m_chosen - m_rejected) - gamma). Source: Meng et
    al., arXiv 2405.14734, equation 6.
    """
    from torch.nn.functional import logsigmoid

    rewards = settings["beta"] * policy.means
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - settings["gamma"]).mean(), rewards.detach()


def kto_loss(
    ratios: torch.Tensor, divergence: torch.Tensor, desirable: torch.Tensor, settings: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of KTO from log-ratios (B) of policy and reference, and the implicit rewards (B).

    `divergence` (B) has the log-ratios of mismatched answers, whose mean, at least 0, is z. The loss is
    1 - sigmoid(beta (r - z)) for a desirable answer, and 1 - sigmoid(beta (z - r)) for another one. Source:
    Ethayarajh et al., arXiv 2402.01306, equation 8, with both weights 1.
    """
    import torch

    beta, z = settings["beta"], divergence.mean().clamp(min=0)
    signs = torch.where(desirable, 1.0, -1.0)
    return (1 - torch.sigmoid(beta * signs * (ratios - z))).mean(), beta * ratios.detach()


TEMPERATURE = 1.0
"""Divisor of the logits in `distillation_loss`. TRL's trainer uses 1, and its division makes a copy."""


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence of two models from logits (B, S, V). It is a mean over
    the positions whose label (B, S) is not -100.

    With the mixture m = beta teacher + (1 - beta) student, it is beta KL(teacher, m) + (1 - beta)
    KL(student, m). For beta 0 it is KL(teacher, student), for beta 1 KL(student, teacher). Source: Agarwal et
    al., arXiv 2306.13649, equation 1 and section 3.1. All vocabulary-sized tensors of TRL 1.16 exist here for
    as long as there.
    """
    import torch
    from torch.nn.functional import kl_div, log_softmax

    student, teacher = student / TEMPERATURE, teacher / TEMPERATURE
    of_student, of_teacher = log_softmax(student, dim=-1), log_softmax(teacher, dim=-1)
    options: Any = {"reduction": "none", "log_target": True}
    if beta in (0, 1):
        pair = (of_student, of_teacher) if beta == 0 else (of_teacher, of_student)
        divergence = kl_div(*pair, **options)
    else:
        weight = of_student.new_tensor(beta)
        # No name keeps the weighted terms alive.
        mixture = torch.logsumexp(
            torch.stack([of_student + torch.log1p(-weight), of_teacher + torch.log(weight)]), dim=0
        )
        first, second = kl_div(mixture, of_teacher, **options), kl_div(mixture, of_student, **options)
        divergence = weight * first + (1 - weight) * second
    counted = labels != IGNORED
    divergence = divergence[counted]
    return divergence.sum() / counted.sum().clamp(min=1)


CLIP = 0.2
"""Largest distance of a ratio of probabilities from 1 (Schulman et al., arXiv 1707.06347, section 3)."""


def rollout_loss(
    policy: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Return the clipped loss of GRPO from log-probabilities of answers' tokens (B, C) and advantages (B).

    Source: Shao et al., arXiv 2402.03300, equations 3 and 4, with the mean over all tokens.
    """
    import torch

    ratios, advantages = torch.exp(policy - old), advantages[:, None]
    losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    if reference is not None:
        difference = reference - policy
        losses = losses + beta * (torch.exp(difference) - difference - 1)
    return losses.mean()
