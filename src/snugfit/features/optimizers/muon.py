"""Muon of torch: orthogonalized momentum for the matrices of hidden layers, and AdamW for all other
parameters.

State of such a matrix: its momentum, 4 bytes an element of fp32 weights against AdamW's 8. Embedding tables,
the head, biases and normalisations keep AdamW's two moments, as Muon's authors recommend. In a model with a
large table that is most of the state. An update multiplies each matrix with its own transpose in bf16, five
times over, one matrix after the other. It needs temporaries of the largest one, and products that no other
optimizer has. The benefit is faster learning per step. A plan does not predict learning, so it never chooses
Muon by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.of_matrices import UPDATES, MatrixOptimizer
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Call, OptimizerWish


@dataclass(frozen=True, kw_only=True)
class Muon(MatrixOptimizer):
    """Orthogonal momentum for the matrices of hidden layers, AdamW for everything else."""

    source: ClassVar = (
        "Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982; torch.optim.Muon"
    )

    momentum: float = between(0.0, 0.9999, default=0.95)
    """Share of the last momentum in the next one."""

    @property
    def value(self) -> OptimizerWish:
        """Return the setting for torch's Muon with AdamW as one optimizer. The HF Trainer has no
        name for it.
        """
        return OptimizerWish(
            factory=Call(
                path=f"{UPDATES}.matrices:MuonWithAdamW",
                arguments={"momentum": self.momentum},
            ),
            prepare=Call(path=f"{UPDATES}.matrices:leave_to_adamw"),
        )
