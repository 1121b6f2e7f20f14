"""Default technique: the training process prepares each batch itself, in ordinary memory, as torch's
DataLoader does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Inline(PlainTechnique):
    """Prepares batches in the training process."""

    source: ClassVar = "torch.utils.data.DataLoader(num_workers=0, pin_memory=False)"
    counterparts: ClassVar = (Counterpart(arguments={"dataloader_num_workers": 0}),)
