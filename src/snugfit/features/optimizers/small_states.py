"""Settings and calls that the optimizers of bitsandbytes share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

STEPS = "snugfit.features.optimizers.updates.bitsandbytes_states"

LION: Mapping[str, Any] = {"betas": [0.9, 0.99]}
"""Arguments of the constructor of each Lion optimizer."""

LION_RATE = "it needs a third to a tenth of AdamW's learning rate, so no plan exchanges them by itself"
"""Reason why no plan chooses Lion: the job's learning rate is for AdamW."""


def bitsandbytes_wish(
    name: str, trainer_name: str, arguments: Mapping[str, Any], embeddings: Literal[32, 8] | None = None
) -> OptimizerWish:
    """Return the optimizer setting (`OptimizerWish`) for this class of `bitsandbytes.optim`.

    The width for `embeddings` is set before the optimizer is created; the Trainer's own is 32 bits.
    """
    keep = Call(path=f"{STEPS}:keep_embeddings", arguments={"bits": embeddings})
    return OptimizerWish(
        factory=Call(path=f"bitsandbytes.optim:{name}", arguments=arguments),
        # bitsandbytes reads the override when the optimizer is created.
        prepare=keep if embeddings else None,
        # The Trainer always keeps embeddings in 32 bits.
        trainer_name=trainer_name if embeddings != 8 else None,
        shapes=Call(path=f"{STEPS}:shapes"),
    )


def lion_counterparts(name: str, settings: Mapping[str, Any]) -> tuple[Counterpart, ...]:
    """Return transformers' arguments that select a Lion with these settings."""
    note = "TrainingArguments give it AdamW's second beta unless adam_beta2 is 0.99"
    return (
        Counterpart(arguments={"optim": name, "adam_beta2": 0.99}, settings=settings),
        Counterpart(arguments={"optim": name}, settings=settings, note=note),
    )


@dataclass(frozen=True, kw_only=True)
class BitsandbytesOptimizer(Technique):
    """Base class of techniques whose optimizer comes from bitsandbytes."""

    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    single_weight_updates: ClassVar = True

    def code(self, job: Job) -> tuple[str, ...]:
        """Return Python lines that set the bits of the embeddings' moments; empty if all moments have the
        same bits.
        """
        prepare = self.value.prepare
        # bitsandbytes needs no override for 8 bits.
        if prepare is None or prepare.arguments["bits"] == 8:
            return ()
        return (
            "from bitsandbytes.optim import GlobalOptimManager",
            "",
            "manager = GlobalOptimManager.get_instance()",
            "for module in model.modules():",
            "    if isinstance(module, torch.nn.Embedding):",
            '        manager.register_module_override(module, "weight", {"optim_bits": 32})',
        )


@dataclass(frozen=True, kw_only=True)
class EightBitStates(BitsandbytesOptimizer):
    """Base class of techniques with moments in 8 bits."""

    embeddings: Literal[32, 8] = 32
    """Bits of the moments of embedding tables."""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield two settings: moments of embeddings in 32 bits, as in the HF Trainer, and all moments in 8
        bits.
        """
        yield from (cls(), cls(embeddings=8))


@dataclass(frozen=True, kw_only=True)
class PagedStates(BitsandbytesOptimizer):
    """Base class of techniques with moments in managed memory."""

    unplanned: ClassVar = (
        "the bytes of its states that go to the host and back are not predicted, so no plan chooses it"
    )
    on_cpu: ClassVar = "pages nothing: its states are in the host's memory already"

    bits: Literal[32, 8] = 32
    """Bits of the moments."""

    embeddings: Literal[32, 8] = 32
    """Bits of the moments of embedding tables, where the others have 8."""

    def paged_wish(self, name: str, arguments: Mapping[str, Any]) -> OptimizerWish:
        """Return the optimizer setting (`OptimizerWish`) for this class of bitsandbytes, with paged
        states.
        """
        arguments = {**arguments, "optim_bits": self.bits, "is_paged": True}
        trainer_name = f"paged_{name.lower()}_{self.bits}bit"
        return bitsandbytes_wish(name, trainer_name, arguments, self.embeddings)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an error for a setting of the embeddings' moments if all moments have 32 bits anyway."""
        if self.bits == 32 and self.embeddings == 8:
            yield "embeddings=8 needs bits=8."
