"""Default technique: the model's code runs uncompiled, with one kernel for each of torch's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Uncompiled(PlainTechnique):
    """Runs the model's code as it is written, operator by operator."""

    counterparts: ClassVar = (Counterpart(arguments={"torch_compile": False}),)
