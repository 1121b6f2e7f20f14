"""Registration of the feature `optimizers`: small, paged, projected and orthogonal optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

ONE_STATE = " of one state"
TENSORS_OF_TWO_STATES = 8
"""Number of tensors in bitsandbytes' 8-bit update with two states: weight, gradient, and three for each state
(bytes, scales and code book).

The update is bound by arithmetic: with one state it takes 0.59 of the time of two.
"""

IN_BACKWARD = (
    "updates weights during the backward pass, so no step can be stopped before its update, or repeated"
)
WITH_OBJECTS = "has objects in its state, which checkpoints cannot contain, so the run could not be resumed"


class Optimizers(Feature):
    """The feature that adds further optimizers, the rates of their kernels, and support for states in CUDA
    managed memory.
    """

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.OPTIMIZER: (
            "adafactor", "adafactor_torch", "adamw_4bit", "adamw_8bit", "adamw_stochastic", "apollo",
            "galore", "host_adamw", "lion", "lion_8bit", "muon", "paged_adamw", "paged_lion",
        )
    }  # fmt: skip

    # `WITH_OBJECTS` refers to GaLore's and APOLLO's projectors, and to torchao's tensors.
    refused_optimizers: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("layerwise", "lomo"), IN_BACKWARD),
        **dict.fromkeys(("galore", "apollo", "adamw_torch_4bit", "adamw_torch_8bit"), WITH_OBJECTS),
    }

    def optimizer_doubts(self, optimizer: Any) -> Sequence[str]:
        """Return a warning about optimizer states in CUDA managed memory."""
        from snugfit.features.optimizers.updates.bitsandbytes_states import paging_warning

        return [sentence] if (sentence := paging_warning(optimizer)) else []

    def rate_names(self, kernel: Any) -> Sequence[str]:
        """Return the name of the measured kernel speed for bitsandbytes' updates with one moment; empty for
        other kernels.
        """
        is_small = kernel.operator == "bitsandbytes::optimizer_update_8bit_blockwise"
        # One operator serves one and two states, which only differ in the number of tensors.
        if is_small and kernel.tensors < TENSORS_OF_TWO_STATES:
            return [kernel.operator + ONE_STATE]
        return ()

    def managed_bytes(self) -> int:
        """Return the bytes of CUDA managed memory that bitsandbytes' paged optimizer states of this process
        occupy.
        """
        from snugfit.features.optimizers.updates.bitsandbytes_states import paged_bytes

        return paged_bytes()

    def place_state(self, optimizer: Any, weight: Any) -> None:
        """Move a weight's restored moments into bitsandbytes' managed memory."""
        from snugfit.features.optimizers.updates.bitsandbytes_states import place_in_pages

        place_in_pages(optimizer, weight)
