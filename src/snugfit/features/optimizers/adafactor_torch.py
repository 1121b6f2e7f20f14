"""torch's Adafactor: row and column means in place of a second moment, one parameter at a time.

Unlike torch's other optimizers it does not select foreach by default. It scales each update by the
parameter's own size. transformers' Adafactor supports that too, but the HF Trainer turns it off. The two have
the same state and are not the same algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class AdafactorTorch(Technique):
    """Adafactor of torch, which keeps row and column means in place of a second moment."""

    fidelity: ClassVar = Fidelity.LEARNS
    value: ClassVar = OptimizerWish(factory=Call(path="torch.optim:Adafactor"))
    source: ClassVar = "Shazeer and Stern, arXiv 1804.04235; torch.optim.Adafactor"
