"""Default technique without gradient accumulation: the model gets the whole global batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class WholeBatch(PlainTechnique):
    """Runs the global batch in one piece."""

    source: ClassVar = "the textbook loop"
    counterparts: ClassVar = (Counterpart(arguments={"gradient_accumulation_steps": 1}),)
