"""Evaluation and text generation in ONNX Runtime, with an ONNX file that transformers' exporter writes.

The export takes tens of seconds, and more memory than the model. So it runs in a separate process, and the
measured process only loads the file. The session uses torch's number of threads. Its idle threads do not
spin, because that would take CPU time from other threads.

An exported model has no loss. It returns the same outputs otherwise. For text generation, one file with a
dynamic number of tokens runs the prompt and each new token, and transformers' `generate` calls it. Its
key-value cache is an input and an output of each call.

On a GPU, the package onnxruntime-gpu replaces onnxruntime. The keys and values stay on the device between
calls, and products in fp32 do not use TF32.

torch does not allocate the session's memory. On the CPU, `snugfit predict` has a formula of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.engines.evaluation_technique import EXPORTED_MODELS, ExportTechnique
from snugfit.versions import version_of


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(ExportTechnique):
    """Runs evaluations and text generation in ONNX Runtime, from an exported file."""

    title: ClassVar = "ONNX Runtime"
    needs: ClassVar = ("onnx>=1.20", "onnxscript>=0.7", "onnxruntime>=1.24", EXPORTED_MODELS)
    extra: ClassVar = "onnx"
    source: ClassVar = "onnxruntime.InferenceSession; transformers.exporters.OnnxExporter"
    elsewhere: ClassVar = ("onnx", "ort", "onnxrt")

    @classmethod
    def installed_version(cls, package: str) -> str | None:
        """Return the installed version of a package, or None. onnxruntime-gpu replaces onnxruntime."""
        installed = super().installed_version(package)
        return installed or (version_of("onnxruntime-gpu") if package == "onnxruntime" else None)
