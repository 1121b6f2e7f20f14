"""TensorRT, by torch-tensorrt: torch traces the model, and TensorRT compiles the parts that it supports.

Without torch-tensorrt, and on a CPU, the model is exported to ONNX instead. The `onnx` package checks the
file, ONNX Runtime runs it, and the report gives the reason. TensorRT's own tools can read such a file. This
technique was not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engines.evaluation_technique import ExportTechnique
from snugfit.features.engines.onnxruntime import OnnxRuntime

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class TensorRt(ExportTechnique):
    """Compiles the model in evaluation with TensorRT, or validates the ONNX file that TensorRT would read."""

    title: ClassVar = "TensorRT"
    needs: ClassVar = OnnxRuntime.needs
    extra: ClassVar = OnnxRuntime.extra
    source: ClassVar = "torch_tensorrt (the backend of torch.compile)"
    elsewhere: ClassVar = ("trt", "torch_tensorrt")
    caveat: ClassVar = "no GPU has measured it"

    def objections_to_generation(self, job: Job) -> Iterator[str]:
        """Yield the reason why a job with text generation cannot use this technique."""
        yield "text generation was not tested with it. Try 'onnxruntime', or --phase evaluate."
