"""OpenVINO: the model as OpenVINO's own file, written by transformers' exporter, compiled for the CPU.

The same process as for `onnxruntime` exports the file, and the same objections hold. fp32 stays fp32: without
the hint of the precision, OpenVINO computes in bf16 on CPUs that can. The error was then 5e-3 in a test.
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
