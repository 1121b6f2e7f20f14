"""Registration of the feature `kernels`: its techniques, its fields and the simulation of Liger's kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup

EXPERT_KERNELS, EXPERTS = "triton::moe_", 120 * MIB
"""Name prefix of Liger's kernels for experts, and the GPU memory that they add, in bytes by NVML.

They come from six runs of Mixtrals on H200s and H100s, with 132 multiprocessors each
(results/accuracy-seed2411.json, -seed2511 and -seed2611). The cause is unknown. One configuration that Triton
tries may spill registers to memory.
"""


class Kernels(Feature):
    """The feature that adds the techniques `padding_free`, `flash`, `fused`, `liger` and `chunked_loss`."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.ATTENTION: ("flash", "padding_free"),
        Slot.KERNELS: ("fused", "liger"),
        Slot.HEAD: ("chunked_loss",),
    }

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that apply the fields `fused`, `liger` and `logits` of `Setup` to a model."""
        from snugfit.features.kernels.handlers import FusedHandler, LigerHandler, LogitsHandler

        return FusedHandler(), LigerHandler(), LogitsHandler()

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which launches of Liger's kernels are recorded instead of run."""
        from snugfit.features.kernels.launches import triton_launches

        return triton_launches(policy, recorder)

    def context_bytes(self, operators: Collection[str]) -> int:
        """Return the bytes of GPU memory that the driver adds for Liger's mixture-of-experts kernels; 0
        without such an operator.
        """
        return EXPERTS * any(operator.startswith(EXPERT_KERNELS) for operator in operators)
