"""ONNX Runtime: the model as an ONNX file, written by transformers' exporter, in a session of its own.

The export takes tens of seconds, and more memory than the model. So a process of its own exports, and the
process that is measured loads the file alone. The session uses torch's number of threads, and its idle
threads do not spin: they would take the cores of other threads, and add CPU seconds.

An exported model has no loss. It returns the same outputs otherwise. For text generation, one file with a
dynamic number of tokens runs the prompt and each new token, and transformers' `generate` calls it. Its cache
goes in and out of each call.

The memory of a session is not torch's, so no prediction has its bytes. `snugfit measure` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.engines.evaluation_technique import EXPORTED_MODELS, ExportTechnique


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(ExportTechnique):
    """Runs evaluations and text generation in ONNX Runtime, from an exported file."""

    title: ClassVar = "ONNX Runtime"
    needs: ClassVar = ("onnx>=1.20", "onnxscript>=0.7", "onnxruntime>=1.24", EXPORTED_MODELS)
    extra: ClassVar = "onnx"
    source: ClassVar = "onnxruntime.InferenceSession; transformers.exporters.OnnxExporter"
    elsewhere: ClassVar = ("onnx", "ort", "onnxrt")
