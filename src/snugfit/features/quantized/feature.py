"""Registration of the feature `quantized`: products in 8-bit floats by torchao, and frozen weights in 4 or 8
bits by bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.quantized.fields import QUANTIZE
from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup


class Quantized(Feature):
    """The feature that adds the techniques `fp8`, `low_bits` and `qlora`, and their handlers."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.PRECISION: ("fp8",),
        Slot.ADAPTERS: ("low_bits", "qlora"),
    }

    needs: ClassVar[Mapping[str, str]] = {"qlora": "adapters", "mxfp4": "kernels"}

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that apply the fields `quantize` and `float8` of `Setup` (a recipe's
        settings).
        """
        from snugfit.features.quantized.float8 import Float8Handler
        from snugfit.features.quantized.quantize import QuantizeHandler

        return QuantizeHandler(), Float8Handler()

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which matrix products with quantized weights run on `meta` tensors."""
        from snugfit.features.quantized.eight_bit_products import eight_bit_products
        from snugfit.features.quantized.four_bit_products import four_bit_products

        wish = QUANTIZE.of(setup)
        return eight_bit_products(policy) if wish and wish.bits == 8 else four_bit_products(policy)

    def timing_doubts(self, setup: Setup) -> Sequence[str]:
        """Return a warning about the predicted time of matrix products with 8-bit weights."""
        wish = QUANTIZE.of(setup)
        if wish is None or wish.bits != 8:
            return ()
        return (
            "One step with weights in 8 bits was measured, on an H200. It took 1.8 times the predicted "
            "seconds, and 1.2 % more bytes: columns of outliers, whose number depends on the data. "
            "snugfit measure shows yours.",
        )

    def packed_dtype(self, tensor: Any) -> str:
        """Return `nf4` or `fp4` for a tensor with packed 4-bit weights of bitsandbytes, and `mxfp4` for such
        weights of experts; empty for other tensors.
        """
        name = str(getattr(tensor, "quant_type", ""))
        return name if name == "mxfp4" or getattr(tensor, "quant_state", None) is not None else ""

    def doubts_on_bytes(self, setup: Setup, blocks: Sequence[Any], missing: int) -> Sequence[str]:
        """Return a warning about experts that stay in 16 or 32 bits, and one about adapters on them."""
        from snugfit.features.quantized.experts import expert_warnings

        return expert_warnings(setup, blocks, missing)

    def tensors_beside(self, weight: Any) -> Sequence[tuple[Any, str]]:
        """Return the objects and attribute names that hold the scales and code books (tables of values) of a
        4-bit weight.
        """
        from snugfit.features.quantized.quantized_weights import scales_in_order

        return scales_in_order(weight)
