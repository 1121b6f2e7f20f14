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
| grpo, rloo  | the generation, the old policy, the reference, then the policy over B answers              |

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
    answer_log_probs,
    dpo_loss,
    kto_loss,
    log_probs,
    orpo_loss,
    reward_loss,
    rollout_loss,
    simpo_loss,
)
from snugfit.features.preferences.settings import ON_ROLLOUTS
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
        advantages: Any = None,
        **inputs: Any,
    ) -> Any:
        """Return the loss of pairs with ids (B, 2, S) or of answers with advantages. Otherwise return the
        outputs of the model's own forward pass. The Trainer removes inputs that are no named argument.
        """
        named = {
            "input_ids": input_ids, "attention_mask": attention_mask, "labels": labels,
            "desirable": desirable, "reference_log_probs": reference_log_probs, "advantages": advantages,
        }  # fmt: skip
        batch = inputs | {name: value for name, value in named.items() if value is not None}
        if input_ids is None or not self.takes(batch):
            return self.inner(**batch)
        loss, scores = self.loss(model, batch)
        return {"loss": loss, "logits": scores}

    def takes(self, batch: Mapping[str, Any]) -> bool:
        """Return True for a batch of the task, and False for one of the model's own forward pass."""
        return "advantages" in batch or batch["input_ids"].dim() == 3

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


class RolloutForward(DpoForward):
    """The forward pass of a policy over its own answers, after their generation: `grpo` and `rloo`.

    Only sizes are right: the tokens are those of the batch. A generation runs only the prompts' pass and
    that of the last token, with a cache of the whole length between them.
    """

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Losses:
        """Return the mean loss of a batch of B answers, and their mean log-probabilities (B)."""
        import torch

        ids = batch["input_ids"]
        length = self.answer_length(ids)
        # A step generates once, before its first micro-batch, when no weight has a gradient.
        is_first = all(weight.grad is None for weight in model.parameters())
        if self.settings["generation"] == "transformers" and is_first:
            self.generate(model, ids[:1, :-length].repeat(self.settings["rollouts"], 1), length)
        reference = old = None
        with torch.no_grad():
            if self.settings["old_log_probs"]:
                old = self._log_probs(self.inner, model, batch, length)
            if self.settings["beta"] and self.reference is not None:
                reference = self._log_probs(self.reference, model, batch, length)
            elif self.settings["beta"]:
                with model.disable_adapter():
                    reference = self._log_probs(self.inner, model, batch, length)
        policy = self._log_probs(self.inner, model, batch, length)
        old = policy.detach() if old is None else old
        loss = rollout_loss(policy, old, reference, batch["advantages"], self.settings["beta"])
        return loss, policy.detach().mean(1)

    def answer_length(self, ids: torch.Tensor) -> int:
        """Return the number of tokens of an answer in sequences (B, S)."""
        given: int = self.settings["completion_length"]
        return given or -(-ids.shape[1] // 2)

    def generate(self, model: Any, prompts: torch.Tensor, length: int) -> None:
        """Run the largest passes of a generation of `length` tokens after prompts (R, P), and leave the model
        in training mode.
        """
        import torch

        # In training, transformers' checkpointing drops the cache.
        model.eval()
        with torch.no_grad():
            self._generate(model, prompts, length)
        model.train()

    def _log_probs(self, run: Any, model: Any, batch: Mapping[str, Any], length: int) -> torch.Tensor:
        """Return log-probabilities (B, C) of the answers' tokens, from the logits that they need alone."""
        few = {"logits_to_keep": length + 1} if _accepts(model, "logits_to_keep") else {}
        logits = run(**arguments_of(model, batch), **few).logits
        return answer_log_probs(logits[:, -length - 1 :], batch["input_ids"])

    def _generate(self, model: Any, prompts: torch.Tensor, length: int) -> None:
        """Run the first and the last pass of a generation, which have its largest tensors."""
        from transformers import DynamicCache

        few = {"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {}
        cache = DynamicCache(config=model.config)
        given = {"past_key_values": cache, "use_cache": True, **few}
        self.inner(input_ids=prompts, **given)
        for layer in cache.layers:
            if length > 2 and getattr(layer, "keys", None) is not None:
                keys, values = layer.keys, layer.values
                further = (one.new_zeros(*one.shape[:2], length - 2, one.shape[3]) for one in (keys, values))
                # No name keeps the shorter cache alive.
                del keys, values
                layer.update(*further)
        logits = self.inner(input_ids=prompts[:, -1:], **given).logits
        logits[:, -1].float().softmax(-1).argmax(-1)


FORWARDS: Mapping[str, type[PairForward]] = {
    "reward": PairForward,
    "orpo": PolicyForward,
    "simpo": PolicyForward,
    "dpo": DpoForward,
    "kto": KtoForward,
    "grpo": RolloutForward,
    "rloo": RolloutForward,
}
"""Class of the forward pass by task."""


def _rows(model: Any, batch: Mapping[str, Any], row: int | None = None) -> dict[str, Any]:
    """Return the model's arguments for the 2 B sequences of a batch of pairs, or for those in one row of each
    pair.
    """
    names = ("input_ids", "attention_mask")
    return arguments_of(model, {name: _flat(batch[name], row) for name in names if name in batch})


def arguments_of(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arguments for the sequences (R, S) of a batch."""
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    # A decoder would otherwise return keys and values, which no pass reads.
    return arguments | ({"use_cache": False} if _accepts(model, "use_cache") else {})


def _accepts(model: Any, argument: str) -> bool:
    """Return True if the forward pass of a model, or of the one inside its adapters, has this argument."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return argument in inspect.signature(type(base).forward).parameters


def _flat(tensor: torch.Tensor, row: int | None) -> torch.Tensor:
    """Return a tensor (B, 2, S) as (2 B, S), or one row of each pair (B, S)."""
    return tensor.flatten(0, 1) if row is None else tensor[:, row]


def _in_pairs(values: LogProbs) -> LogProbs:
    return LogProbs(*(value.view(-1, 2) for value in values))


def compute_losses(job: Job, setup: Setup, model: Any, build: Callable[[], Any]) -> Any:
    """Replace the forward pass of a built model by one that computes the loss of its task. Return the model.

    Raises `UsageError` for several processes.
    """
    refuse_processes(job, setup)
    source, is_adapted = _reference_of(job), hasattr(model, "disable_adapter")
    forward = FORWARDS[job.task](
        inner=forward_of(model),
        task=job.task,
        settings=dict(job.phase_settings),
        reference=_copy(model, build) if source in ("auto", "copy") and not is_adapted else None,
    )
    return replace_forward(model, forward)


def refuse_processes(job: Job, setup: Setup) -> None:
    """Raise `UsageError` for a Setup of several processes."""
    if ranks_of(setup) != 1:
        raise UsageError(
            f"The task {job.task} was tried on one GPU only. Leave --gpus and --mesh out, or use the loop of "
            "TRL with snugfit.fit."
        )


def replace_forward(model: Any, forward: PairForward) -> Any:
    """Return the model with another forward pass, and without dropout."""
    _turn_dropout_off(model)
    model.forward = OwnForward(forward, model)
    return model


def _reference_of(job: Job) -> str:
    """Return the source of the reference of a job, one of `REFERENCES`; empty for a loss without one."""
    if job.task in ON_ROLLOUTS:
        return "auto" if job.phase_settings.get("beta") else ""
    return str(job.phase_settings.get("reference", ""))


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
