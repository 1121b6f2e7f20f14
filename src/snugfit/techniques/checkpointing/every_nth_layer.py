"""Technique of activation checkpointing: every n-th layer is recomputed in the backward pass; the others keep
their activations.

For a job that almost fits: memory and time lie between keeping everything and recomputing every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.job.kv_prefix import dropped_prefix
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import CheckpointWish
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class EveryNthLayer(Technique):
    """Computes every n-th layer again in the backward pass, and keeps the others' activations."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "transformers' activation_checkpointing_enable(every_n_layers=n): layers 0, n, 2n, ..."
    elsewhere: ClassVar = ("every_n_layers",)
    counterparts: ClassVar = (
        Counterpart(
            arguments={
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs.use_reentrant": False,
                "activation_checkpointing_kwargs.every_n_layers": Setting("n"),
                "activation_checkpointing_kwargs.offload": False,
            }
        ),
        Counterpart(  # its inputs are copied to the host, which is another slot's technique
            arguments={
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs.use_reentrant": False,
                "activation_checkpointing_kwargs.every_n_layers": Setting("n"),
                "activation_checkpointing_kwargs.offload": True,
            }
        ),
    )

    n: int = between(1, 10_000, default=2)
    """Interval between recomputed layers, which start with the first: with 2 every second layer, with 1 every
    layer.
    """

    @property
    def value(self) -> CheckpointWish:
        """Return the checkpointing setting for every n-th layer, each recomputed by itself."""
        return CheckpointWish(every=self.n)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection to prefix tuning, since recomputed layers would drop its keys and values."""
        return dropped_prefix(job)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield no settings for plans. Those of `first_layers` free memory layer by layer, for the same time
        per layer.
        """
        return iter(())
