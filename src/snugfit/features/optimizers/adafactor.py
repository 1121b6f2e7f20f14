"""Adafactor with the HF Trainer's settings: a matrix's second moment is stored as its row and column means.

State of an m x n matrix: m + n numbers instead of 2mn. The update is computed one parameter at a time with
temporaries of its size. So the largest parameter (the embedding table) sets the peak, twice over. The
learning rate is fixed: no scaling by the parameter and no relative step, as the HF Trainer sets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Adafactor(Technique):
    """Adafactor of transformers, which keeps row and column means in place of a second moment."""

    fidelity: ClassVar = Fidelity.LEARNS
    # The arguments are those that transformers' Trainer sets.
    value: ClassVar = OptimizerWish(
        factory=Call(
            path="transformers.optimization:Adafactor",
            arguments={"scale_parameter": False, "relative_step": False},
        ),
        trainer_name="adafactor",
    )
    source: ClassVar = "Shazeer and Stern, arXiv 1804.04235; transformers.optimization.Adafactor"
    advice: ClassVar = dict.fromkeys(
        ("lomo", "adalomo", "galore_adamw_layerwise"),
        "snugfit has no such optimizer. 'sgd + released' updates each weight in the backward pass, as LOMO "
        "does, without micro-batches. Small states: 'adafactor', 'adamw_4bit', 'adamw_8bit', 'lion_8bit'.",
    )
    counterparts: ClassVar = (Counterpart(arguments={"optim": "adafactor"}),)
