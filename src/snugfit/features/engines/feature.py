"""Registration of the feature `engines`: libraries and operators for faster evaluation than eager torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot


class Engines(Feature):
    """The feature that adds the techniques `fastpath`, `onnxruntime`, `openvino` and `tensorrt`."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.ENGINE: ("fastpath", "onnxruntime", "openvino", "tensorrt"),
    }

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that replace the model in evaluation."""
        from snugfit.features.engines.handlers import FastLayersHandler, RuntimeHandler

        return (RuntimeHandler(), FastLayersHandler())
