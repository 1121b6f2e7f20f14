"""Technique `liger`: Liger-Kernel's fused Triton kernels in place of a model's code (Hsu et al., arXiv
2410.10989).

Rotary embeddings, RMSNorm and the gated activation become one kernel each. They save less for the backward
pass and write gradients over their inputs. The fused linear cross-entropy never creates all logits. It takes
some tokens at a time, and computes the gradients along with the loss, as `chunked_loss` does in plain torch.
Its chunks are so small that their logits are no larger than the hidden states of all tokens.

Each chunk adds to the gradient of the head, which is read and written once a chunk. With a small hidden size
and a large vocabulary that takes longer than the logits did. So Llama-3.2-1B with weights in fp32 is slower
with Liger. In bfloat16 it is faster, and faster still without Liger's loss (`results/h200-2026-11-23/liger`).
The host waits for the device twice: to count labels, and to check the scale of the loss.

Liger's table lists the supported models and their kernels. Liger's defaults select the kernels that run,
unless a setting overrides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.kernels import liger_table
from snugfit.features.kernels.fields import LigerWish
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import ALL_LINEAR, Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

_PARTS = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "fused_linear_cross_entropy")

GATED = frozenset({"swiglu", "geglu"})
"""Liger's kernels for gated activations. A model uses at most one."""

WITH_LOSS = "causal-lm"
"""Name of the task for whose loss Liger has a kernel."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys for the number of experts."""

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameter names of the weights of all experts together, in transformers' models."""


@dataclass(frozen=True, kw_only=True)
class Liger(Technique):
    """Runs Liger's fused Triton kernels in place of the model's own code, and its loss
    without logits."""

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = ("liger-kernel>=0.8", "triton>=3.0")
    extra: ClassVar = "liger"
    source: ClassVar = "Hsu et al., arXiv 2410.10989; liger_kernel.transformers"
    elsewhere: ClassVar = ("liger_kernel", "use_liger_kernel", "enable_liger_kernel")
    counterparts: ClassVar = (
        Counterpart(
            arguments={
                "use_liger_kernel": True,
                **{f"liger_kernel_config.{part}": Setting(part) for part in _PARTS},
            }
        ),
    )

    rope: bool | None = None
    """Rotary embeddings of queries and keys in one kernel."""

    rms_norm: bool | None = None
    """RMSNorm in one kernel, which saves its input and one number a row."""

    swiglu: bool | None = None
    """Gated SiLU in one kernel, whose gradients overwrite its saved tensors."""

    geglu: bool | None = None
    """Gated GELU in one kernel, whose gradients overwrite its saved tensors."""

    layer_norm: bool | None = None
    """LayerNorm in one kernel, in vision models."""

    fused_linear_cross_entropy: bool | None = None
    """The loss and the head's gradients for some tokens at a time."""

    def install(self, setup: Setup) -> Setup:
        """Return the setup with Liger's kernels in place of the code of the model's modules."""
        return setup.with_fields(liger_kernels=LigerWish(parts=self.set_parts))

    @property
    def set_parts(self) -> dict[str, bool]:
        """Return Liger's kernels that the settings turn on or off, by name; Liger's default decides for the
        others.
        """
        values: dict[str, bool | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {part: value for part, value in values.items() if value is not None}

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: an unsupported model, or another technique that replaces
        the same code.

        Liger's loss is for causal language models, and only one technique may replace the loss.
        """
        if reason := self.planning_objection(job):
            yield f"{reason} Try 'torch_kernels'."
        if reason or not job.trains:
            return
        if recipe[Slot.ENGINE].alone.lowering is not None:
            yield (
                f"{recipe[Slot.ENGINE]} compiles what Liger would replace, and was not tested with it. "
                "Leave one of them out."
            )
        parts = liger_table.parts_by_model_type()[_model_type(job)]
        for part in sorted(self._parts_without_code(parts)):
            yield (
                f"Liger has no {part} for {_model_type(job)}; it has {', '.join(sorted(parts))}. Leave "
                f"{part} out"
            )
        adapted = recipe[Slot.ADAPTERS].adapted_modules(job)
        names = [adapted] if isinstance(adapted, str) else adapted
        if self._replaces_experts(job) and not {ALL_LINEAR, *EXPERT_WEIGHTS}.isdisjoint(names):
            yield (
                f"{recipe[Slot.ADAPTERS]} adapts the weights of experts, which peft then wraps, and Liger's "
                f"code does not find them there. Try '{replace(self, swiglu=False)}', or name other modules, "
                "as in targets=q_proj|v_proj."
            )
        if self.fused_linear_cross_entropy is False:
            return
        off = replace(self, fused_linear_cross_entropy=False)
        if not _has_its_loss(job):
            yield f"Liger's loss is that of {WITH_LOSS}, and this is {job.task}. Try '{off}'."
        elif recipe[Slot.HEAD].value is not None:
            yield f"{recipe[Slot.HEAD]} and Liger's loss both take the head's place. Try '{off}'."

    def _parts_without_code(self, parts: frozenset[str]) -> frozenset[str]:
        """Return the parts that are turned on and not among Liger's `parts` for a model.

        Liger ignores those that are turned off. With both gated activations on, it replaces the model's own
        one, as axolotl's `liger_glu_activation` requests.
        """
        on = frozenset(part for part, value in self.set_parts.items() if value)
        either = GATED if on >= GATED and parts & GATED else frozenset()
        return on - parts - either

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning about the first step of a model with experts, which takes minutes."""
        if self._replaces_experts(job):
            yield (
                "its kernels for experts are timed in many settings in the first step of each process. That "
                "took a Mixtral about two minutes on an H200, which the start-up's seconds leave out. Try "
                "'liger(swiglu=false)' for a short run."
            )

    def _replaces_experts(self, job: Job) -> bool:
        return self.swiglu is not False and any(job.model.config.get(key) for key in EXPERTS)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield Liger without its own loss, so that a plan may add `chunked_loss`.

        That was 7 % faster for 7 % more bytes (Llama-3.2-1B, 2 x 2048 tokens).
        """
        if not cls.planning_objection(job):
            # With `chunked_loss` instead, Llama-3.2-1B was 7 % faster and took 7 % more memory.
            yield cls(fused_linear_cross_entropy=False)

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan uses Liger: the model is not supported. Return an empty text if it is
        supported.
        """
        return liger_table.why_not_covered(_model_type(job))


def _has_its_loss(job: Job) -> bool:
    """Return True if Liger has a loss for the model. It is also True for a user's own module, whose type is
    unknown.
    """
    return job.model.module is not None or job.task == WITH_LOSS


def _model_type(job: Job) -> str:
    module = job.model.module
    if module is None:
        return str(job.model.config.get("model_type"))
    # A user's own module may have no config.
    return str(getattr(getattr(module, "config", None), "model_type", type(module).__name__))
