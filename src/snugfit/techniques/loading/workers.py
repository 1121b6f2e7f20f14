"""Worker processes prepare the batches in page-locked memory, and copies run beside the computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import LoaderWish, Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Workers(Technique):
    """Prepares batches in n processes, in page-locked memory that the device copies from directly."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "torch.utils.data.DataLoader(num_workers=n, pin_memory=True)"
    elsewhere: ClassVar = ("dataloader_num_workers", "num_workers", "pin_memory", "dataloader_pin_memory")
    counterparts: ClassVar = (
        Counterpart(arguments={"dataloader_num_workers": Setting("n"), "dataloader_pin_memory": True}),
        Counterpart(
            arguments={"dataloader_num_workers": Setting("n"), "dataloader_pin_memory": False},
            note="workers always pin their batches, which changes no byte on the GPU",
        ),
    )

    n: int = between(1, 256, default=2)
    """Processes that prepare batches."""

    def install(self, setup: Setup) -> Setup:
        """Starts n worker processes and pins their batches."""
        return replace(setup, loader=LoaderWish(workers=self.n, pinned=True))
