"""Handlers of the fields `runtime` and `fast_layers`, which return the model that an evaluation calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.features.engines.fields import FAST_LAYERS, RUNTIME
from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job

TRAINS = "other engines evaluate and generate, and a front-end of training does neither"

NOT_SIMULATED = {
    "onnxruntime": "allocates weights and activations in a session of its own",
    "openvino": "runs on the CPU, and allocates weights and activations itself",
    "tensorrt": "allocates weights and activations in an engine of its own",
    "fastpath": "computes a layer by one operator, whose temporary memory is not simulated",
}
"""Reason why a technique's memory cannot be predicted, as a predicate of a sentence, by technique."""


CPU_FORMULA = "snugfit predict without --gpu, or snugfit.predict_session"
"""Command and function that predict the memory of a session."""


class _EvaluationHandler(Handler):
    """Base class of handlers whose field applies to evaluation only, and can be measured but not
    simulated.
    """

    slot, stage = Slot.ENGINE, InstallStage.COMPILE
    refused = dict.fromkeys(("accelerate", "trainer", "fit", "custom_loop", "script"), TRAINS)

    def refuse_rehearsal(self, value: Any, job: Job) -> None:
        """Raise `UsageError`: the engine's own memory is not simulated."""
        from snugfit.report.plan.next_steps import job_words

        word = value if isinstance(value, str) else "fastpath"
        device = " --device cpu" if word == "openvino" else ""
        formula = f" For its memory on the CPU: {CPU_FORMULA}." if isinstance(value, str) else ""
        raise UsageError(
            f"{word} {NOT_SIMULATED[word]}, so it is not simulated. To measure it: snugfit measure "
            f"{job_words(job)} --recipe {word}{device}.{formula}"
        )


class RuntimeHandler(_EvaluationHandler):
    """Handler of the field `runtime`: an inference library runs the exported model."""

    wish = RUNTIME.name

    def evaluated_model(self, value: str, loop: Any, build: Callable[[], Any]) -> Any:
        """Export the job's model in a separate process. Return a model whose forward pass the engine runs."""
        from snugfit.features.engines.session import exported_model, tensorrt_model

        return tensorrt_model(loop, build) if value == "tensorrt" else exported_model(value, loop)


class FastLayersHandler(_EvaluationHandler):
    """Handler of the field `fast_layers`: one operator computes each encoder layer in evaluation."""

    wish = FAST_LAYERS.name

    def evaluated_model(self, value: bool, loop: Any, build: Callable[[], Any]) -> Any:
        """Return the job's model with faster encoder layers. Raises `UsageError` if it has no supported
        layers.
        """
        from snugfit.features.engines.fast_layers import use_fast_layers

        model = build()
        if not use_fast_layers(model):
            raise UsageError(
                f"fastpath: {loop.job.model.name} has no encoder layers like BERT's with GELU or ReLU. Leave "
                "it out."
            )
        return model
