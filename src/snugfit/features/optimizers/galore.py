"""GaLore: AdamW on projections of the gradients of hidden layers' matrices, onto their singular vectors.

An m x n matrix (m the smaller) has two moments of rank x n numbers and a projection of m x rank. That is rank
x (2n + m) numbers, against AdamW's 2mn. With rank 128 and a matrix of 4,096 x 4,096 that is a twentieth.
Embedding tables, the head, biases, normalisations and matrices no larger than the rank keep AdamW's two
moments. An update multiplies each matrix's gradient with the projection and back, and creates no tensor of
the matrix's size. The singular values are decomposed in the first step and every `update_proj_gap` steps, one
matrix after the other. A decomposition copies the largest matrix and takes many seconds. `updates/galore.py`
describes the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.features.optimizers.of_matrices import UPDATES, Projected
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Slot, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

TRAINER_DIFFERENCE = (
    "snugfit's own GaLore is meant. galore-torch, which TrainingArguments run, keeps all singular vectors of "
    "weights in fp32 and so takes more memory than is predicted, and its checkpoints do not resume"
)
"""Difference between snugfit's GaLore and the one that `TrainingArguments` run."""


@dataclass(frozen=True, kw_only=True)
class Galore(Projected):
    """AdamW on projections of hidden matrices' gradients onto their first singular vectors; AdamW for the
    rest."""

    source: ClassVar = "Zhao et al., arXiv 2403.03507, algorithm 2; written from the paper"
    elsewhere: ClassVar = ("galore_adamw",)
    advice: ClassVar = dict.fromkeys(
        ("galore_adamw_8bit", "galore_adafactor"),
        "galore with moments in 8 bits or of Adafactor is galore-torch's alone, which is not kept up. "
        "'galore' has AdamW's. Small states here too: 'adafactor', 'adamw_4bit', 'adamw_8bit', 'lion_8bit'.",
    )
    counterparts: ClassVar = (
        Counterpart(
            arguments={
                "optim": "galore_adamw",
                "optim_args.rank": Setting("rank"),
                "optim_args.update_proj_gap": Setting("update_proj_gap"),
                "optim_args.scale": Setting("scale"),
                "optim_args.proj_type": Setting("proj_type"),
                "optim_target_modules": Setting("targets"),
            },
            note=TRAINER_DIFFERENCE,
        ),
    )

    rank: int = between(1, 65_536, default=128)
    """Singular vectors of a projection; matrices with no more rows or columns stay AdamW's."""

    update_proj_gap: int = between(1, 1_000_000, default=200)
    """Steps between two searches for the singular vectors."""

    scale: float = between(1e-6, 1e6, default=0.25)
    """Factor of the update after it is projected back."""

    proj_type: Literal["std", "reverse_std", "right", "left", "full"] = "std"
    """Singular vectors to project onto: those of the shorter side, of the longer one, one side of every
    matrix, or both."""

    targets: tuple[str, ...] | None = None
    """Words in the names of projected linear layers, or `all-linear` (with the head); by default the matrices
    of hidden layers."""

    @property
    def value(self) -> OptimizerWish:
        """Return the setting for GaLore with AdamW as one optimizer. The HF Trainer uses the authors' package
        instead.
        """
        return OptimizerWish(
            factory=Call(
                path=f"{UPDATES}.galore:GaloreWithAdamW",
                arguments={
                    "rank": self.rank,
                    "renew": self.update_proj_gap,
                    "scale": self.scale,
                    "side": self.proj_type,
                },
            ),
            prepare=Call(
                path=f"{UPDATES}.galore:leave_others_to_adamw",
                arguments={"targets": list(self.targets or ())},
            ),
        )

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an error if the rank exceeds the smaller side of the matrices to project."""
        thin = recipe[Slot.ADAPTERS].trained_rank
        # AdamW updates matrices that are not larger than the rank.
        if thin is not None and thin <= self.rank:
            yield (
                f"only matrices of rank {thin} train, and a projection of rank {self.rank} makes none of "
                f"them smaller: all would be AdamW's. Try 'adamw', or leave {recipe[Slot.ADAPTERS]} out."
            )

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield one warning: the time and the workspace of a decomposition are not predicted."""
        yield (
            f"its singular value decompositions run in the first step and every {self.update_proj_gap} "
            "steps. Their seconds (minutes for large models) and cuSOLVER's workspace are not "
            "predicted; their results and a copy of the matrix are. On an H100 the first step of "
            "BERT-large (rank 64) took 10.0 s. Others took 112.3 ms, where 109.0 are predicted. "
            "Measure a few steps before a long run."
        )
