"""Evaluation and text generation in OpenVINO on the CPU, with a file that transformers' exporter writes.

The export runs in a separate process, and has the same limits as for `onnxruntime`. fp32 stays fp32: without
the precision hint, OpenVINO computes in bf16 on CPUs that support it. The error was then 5e-3 in a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.engines.evaluation_technique import EXPORTED_MODELS, ExportTechnique


@dataclass(frozen=True, kw_only=True)
class OpenVino(ExportTechnique):
    """Runs evaluations and text generation in OpenVINO on the CPU, from an exported file."""

    title: ClassVar = "OpenVINO"
    needs: ClassVar = ("openvino>=2026.0", EXPORTED_MODELS)
    extra: ClassVar = "openvino"
    source: ClassVar = "openvino.CompiledModel; transformers.exporters.OpenVINOExporter"
    elsewhere: ClassVar = ("ov",)
