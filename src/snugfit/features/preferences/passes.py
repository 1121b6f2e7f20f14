"""The forward pass of a model that computes the loss of a batch of pairs.

The model stays of its class, with another `forward`. A batch of pairs has token ids (B, 2, S); any other
input reaches the model's own forward pass, such as a call of `generate`.

| task        | passes in order                                                                            |
|-------------|--------------------------------------------------------------------------------------------|
| reward      | the model over 2 B sequences                                                               |
| orpo, simpo | the policy over 2 B sequences                                                              |
| dpo         | the policy over 2 B sequences, then the reference without gradients                        |
| kto         | the policy over B mismatched answers without gradients, then over B answers; then the      |
|             | reference over both                                                                        |

The reference runs after the policy, as in TRL, so the policy's activations are alive meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.features.preferences.losses import (
    LogProbs,
    dpo_loss,
    kto_loss,
    log_probs,
    orpo_loss,
    reward_loss,
    simpo_loss,
)
from snugfit.step.own_forward import OwnForward, forward_of
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

Losses = tuple["torch.Tensor", "torch.Tensor"]
"""Type of a loss and of the scores of its answers."""


@dataclass(frozen=True, kw_only=True)
class PairForward:
    """A model's forward pass over pairs, which returns the loss and the scores of answers as a mapping. This
    class has the loss of rewards.
    """

    inner: Callable[..., Any]
    """The forward pass of the model itself."""

    task: str
    settings: Mapping[str, Any]
    """Settings of the loss by name."""

    reference: Any = None
    """The frozen model whose log-probabilities the policy is compared with; None for the policy without its
    adapters."""

    def __call__(
        self,
        model: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        desirable: Any = None,
        reference_log_probs: Any = None,
        **inputs: Any,
    ) -> Any:
        """Return the loss of pairs with ids (B, 2, S), or else the outputs of the model's own forward pass.
        The Trainer removes inputs that are no named argument.
        """
        named = {
            "input_ids": input_ids, "attention_mask": attention_mask, "labels": labels,
            "desirable": desirable, "reference_log_probs": reference_log_probs,
        }  # fmt: skip
        batch = inputs | {name: value for name, value in named.items() if value is not None}
        if input_ids is None or input_ids.dim() != 3:
            return self.inner(**batch)
        loss, scores = self.loss(model, batch)
        return {"loss": loss, "logits": scores}

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Losses:
        """Return the mean loss of a batch of B pairs, and the scores of all answers (B, 2)."""
        rewards = self.inner(**_rows(model, batch)).logits.view(-1, 2)
        return reward_loss(rewards), rewards


class PolicyForward(PairForward):
    """The forward pass of a policy over pairs, without a reference: `orpo` and `simpo`."""

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Losses:
        """Return the mean loss of a batch of B pairs, and the scores of all answers (B, 2)."""
        policy = _in_pairs(self.policy(model, batch))
        return orpo_loss(policy, self.settings) if self.task == "orpo" else simpo_loss(policy, self.settings)

    def policy(self, model: Any, batch: Mapping[str, Any], row: int | None = None) -> LogProbs:
        """Return the policy's log-probabilities of all answers, or of those in one row of each pair."""
        # No name refers to the logits, so that they are freed before the next pass.
        return log_probs(self.inner(**_rows(model, batch, row)).logits, _flat(batch["labels"], row))


class DpoForward(PolicyForward):
    """The forward pass of a policy and its reference over pairs: `dpo`."""

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Losses:
        """Return the mean loss of a batch of B pairs, and the implicit rewards of all answers (B, 2)."""
        import torch

        policy = _in_pairs(self.policy(model, batch))
        if (reference := batch.get("reference_log_probs")) is None:
            with torch.no_grad():
                reference = _in_pairs(self.without_training(model, batch)).sums
        return dpo_loss(policy, reference, self.settings)

    def without_training(self, model: Any, batch: Mapping[str, Any], row: int | None = None) -> LogProbs:
        """Return the reference's log-probabilities of all answers, or of those in one row of each pair."""
        rows, labels = _rows(model, batch, row), _flat(batch["labels"], row)
        if self.reference is not None:
            return log_probs(self.reference(**rows).logits, labels)
        with model.disable_adapter():
            return log_probs(self.inner(**rows).logits, labels)


class KtoForward(DpoForward):
    """The forward pass of a policy and its reference over answers and mismatched answers: `kto`."""

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Losses:
        """Return the mean loss of a batch of B answers, and their implicit rewards (B)."""
        import torch

        with torch.no_grad():
            mismatched = self.policy(model, batch, 1).sums
        policy = self.policy(model, batch, 0).sums
        if (reference := batch.get("reference_log_probs")) is None:
            with torch.no_grad():
                other = self.without_training(model, batch, 1).sums
                reference = self.without_training(model, batch, 0).sums
        else:
            reference, other = reference.unbind(1)
        return kto_loss(policy - reference, mismatched - other, batch["desirable"], self.settings)


FORWARDS: Mapping[str, type[PairForward]] = {
    "reward": PairForward,
    "orpo": PolicyForward,
    "simpo": PolicyForward,
    "dpo": DpoForward,
    "kto": KtoForward,
}
"""Class of the forward pass by task."""


def _rows(model: Any, batch: Mapping[str, Any], row: int | None = None) -> dict[str, Any]:
    """Return the model's arguments for the 2 B sequences of a batch of pairs, or for those in one row of each
    pair.
    """
    names = ("input_ids", "attention_mask")
    rows: dict[str, Any] = {
        name: _flat(value, row) for name in names if (value := batch.get(name)) is not None
    }
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # A decoder would otherwise return keys and values, which no pass reads.
    if "use_cache" in inspect.signature(type(base).forward).parameters:
        rows["use_cache"] = False
    return rows


def _flat(tensor: torch.Tensor, row: int | None) -> torch.Tensor:
    """Return a tensor (B, 2, S) as (2 B, S), or one row of each pair (B, S)."""
    return tensor.flatten(0, 1) if row is None else tensor[:, row]


def _in_pairs(values: LogProbs) -> LogProbs:
    return LogProbs(*(value.view(-1, 2) for value in values))


def compute_losses(job: Job, setup: Setup, model: Any, build: Callable[[], Any]) -> Any:
    """Replace the forward pass of a built model by one that computes the loss of its task. Return the model.

    Raises `UsageError` for several processes.
    """
    if ranks_of(setup) != 1:
        raise UsageError(
            f"The task {job.task} was tried on one GPU only. Leave --gpus and --mesh out, or use the loop of "
            "TRL with snugfit.fit."
        )
    source, is_adapted = job.phase_settings.get("reference", ""), hasattr(model, "disable_adapter")
    forward = FORWARDS[job.task](
        inner=forward_of(model),
        task=job.task,
        settings=dict(job.phase_settings),
        reference=_copy(model, build) if source in ("auto", "copy") and not is_adapted else None,
    )
    _turn_dropout_off(model)
    model.forward = OwnForward(forward, model)
    return model


def _copy(model: Any, build: Callable[[], Any]) -> Any:
    """Return a frozen model with the weights of `model`, in evaluation mode."""
    import torch

    copied = build().eval().requires_grad_(False)
    with torch.no_grad():
        copied.load_state_dict(model.state_dict())
    return copied


def _turn_dropout_off(model: Any) -> None:
    """Set all dropout of a model to 0, as TRL does: noise in two passes would change their ratio."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
