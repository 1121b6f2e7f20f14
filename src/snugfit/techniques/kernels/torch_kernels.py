"""The model's own code runs as transformers wrote it, a kernel of torch's for each operator."""

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
