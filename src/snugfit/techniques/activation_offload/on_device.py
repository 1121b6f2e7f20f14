"""Default technique: activations stay on the device until the backward pass, as in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class OnDevice(PlainTechnique):
    """Leaves activations on the device until the backward pass has used them."""

    source: ClassVar = "torch.autograd's saved tensors"
