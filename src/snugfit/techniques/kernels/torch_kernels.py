"""The model's own code runs as transformers wrote it, a kernel of torch's for each operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class TorchKernels(Technique):
    """Runs the model's own code, with a kernel of torch's for each operator."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "the model's file in transformers"
    counterparts: ClassVar = (Counterpart(arguments={"use_liger_kernel": False}),)

    def install(self, setup: Setup) -> Setup:
        """Leave the model's modules as they are."""
        return setup
