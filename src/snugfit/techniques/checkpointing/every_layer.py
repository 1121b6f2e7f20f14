"""Technique of activation checkpointing: each layer keeps only its input, and is recomputed in the backward
pass.

Activations fall from layers x (all of a layer) to layers x (its input) + one whole layer. The price is one
more forward pass: a step takes about a third longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.job.kv_prefix import dropped_prefix
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import EVERY_LAYER
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class EveryLayer(Technique):
    """Keeps only each layer's input, and computes the layer again in the backward pass."""

    fidelity: ClassVar = Fidelity.SAME
    value: ClassVar = EVERY_LAYER
    source: ClassVar = (
        "torch.utils.checkpoint (non-reentrant), as transformers' activation_checkpointing_enable"
    )
    elsewhere: ClassVar = (
        "gradient_checkpointing",
        "activation_checkpointing",
        "checkpointing",
        "grad_checkpointing",
    )
    counterparts: ClassVar = (
        Counterpart(
            arguments={
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs.use_reentrant": False,
                "activation_checkpointing_kwargs.every_n_layers": 1,
                "activation_checkpointing_kwargs.offload": False,
            }
        ),
        Counterpart(
            arguments={
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs.use_reentrant": True,
                "activation_checkpointing_kwargs.every_n_layers": 1,
                "activation_checkpointing_kwargs.offload": False,
            },
            note="snugfit uses non-reentrant checkpoints, which keep the same inputs. torch advises "
            "against reentrant ones",
        ),
        Counterpart(  # its inputs are copied to the host, which is another slot's technique
            arguments={
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs.use_reentrant": False,
                "activation_checkpointing_kwargs.every_n_layers": 1,
                "activation_checkpointing_kwargs.offload": True,
            }
        ),
    )

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection to prefix tuning, since recomputed layers would drop its keys and values."""
        return dropped_prefix(job)
