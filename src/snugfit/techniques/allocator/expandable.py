"""Technique of expandable segments: the allocator has one address range per pool and maps it page by page.
Adjacent free blocks join, so that larger blocks fit again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Expandable(Technique):
    """Grows the allocator's segments in place, which leaves less memory unused by fragmentation."""

    fidelity: ClassVar = Fidelity.SAME
    value: ClassVar = True
    source: ClassVar = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    elsewhere: ClassVar = ("expandable_segments",)
    counterparts: ClassVar = (
        Counterpart(arguments={"environment.PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    )
