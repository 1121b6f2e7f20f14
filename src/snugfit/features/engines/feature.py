"""Registration of the feature `engines`: libraries and operators for faster evaluation than eager torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot


class Engines(Feature):
    """The feature that adds the techniques `fastpath`, `onnxruntime`, `openvino` and `tensorrt`."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.ENGINE: ("fastpath", "onnxruntime", "openvino", "tensorrt"),
    }

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "session_prediction": ("SessionPrediction", "predict_session"),
    }

    def predict_by_formula(self, request: Any) -> Any | None:
        """Return the memory of a session on the CPU (`SessionPrediction`) for a recipe with such an engine,
        or None.
        """
        from snugfit.features.engines.session_prediction import answer

        return answer(request)

    def documents(self) -> Mapping[str, type]:
        """Return the class of the JSON document for a recipe with an engine."""
        from snugfit.features.engines.session_prediction import SessionPrediction

        return {"predict --recipe ENGINE --json": SessionPrediction}

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return the function that renders the report of a `SessionPrediction`, by that class."""
        from snugfit.features.engines.session_prediction import SessionPrediction, render

        return {SessionPrediction: render}

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that replace the model in evaluation."""
        from snugfit.features.engines.handlers import FastLayersHandler, RuntimeHandler

        return (RuntimeHandler(), FastLayersHandler())
