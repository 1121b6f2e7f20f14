"""Default technique: the model's own code of transformers runs, with a kernel of torch for each operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class TorchKernels(PlainTechnique):
    """Runs the model's own code, with a kernel of torch's for each operator."""

    source: ClassVar = "the model's file in transformers"
    counterparts: ClassVar = (Counterpart(arguments={"use_liger_kernel": False}),)
