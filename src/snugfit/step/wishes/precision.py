"""Wishes for the precision of a step: autocast, scaled gradients, and the precision of matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.step.wishes.handler import Context, Handler, LiveTraining, ScriptContext
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

MIXED = {None: "no", "bfloat16": "bf16", "float16": "fp16"}
"""accelerate's word for an autocast dtype."""


class AutocastHandler(Handler):
    """The dtype of autocast regions."""

    wish, slot, stage = "autocast", Slot.PRECISION, InstallStage.LOOP
    accelerate_does_it = True

    def model_arguments(self, value: str | None) -> dict[str, Any]:
        """Return the dtype in which products of quantized weights are computed."""
        return {"autocast": value} if value else {}

    def objections(self, value: str | None, live: LiveTraining) -> Iterator[str]:
        """Yield an objection on the CPU: accelerate's scaler needs a GPU."""
        if value == "float16" and live.device.type == "cpu" and live.front_end == "fit":
            yield (
                f"{live.technique(self.slot)}: accelerate cannot scale float16 gradients on the CPU. "
                "Choose a precision of bfloat16 or float32."
            )

    def around_forward(self, value: str | None, device: torch.device) -> Context | None:
        """torch's own autocast region, on this device."""
        import torch

        return partial(torch.autocast, device.type, dtype=getattr(torch, value)) if value else None

    def training_arguments(self, value: str | None, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the Trainer's two switches, of which one at most is on."""
        return {"bf16": value == "bfloat16", "fp16": value == "float16"}

    def accelerator_arguments(self, value: str | None) -> dict[str, Any]:
        """Return accelerate's mixed precision, which for fp16 includes the scaler."""
        return {"mixed_precision": MIXED[value]}

    def script(self, value: str | None, context: ScriptContext) -> dict[str, Any]:
        """Return torch's dtype for a loop of torch's, and accelerate's word for one of accelerate's."""
        word = {"mixed": MIXED[value]} if value else {}
        return {"autocast": f"torch.{value}" if value else "", **word}


class ScaleGradientsHandler(Handler):
    """The loss is scaled against underflow; steps with gradients that overflow are skipped. accelerate and
    the Trainer do it whenever they autocast to fp16."""

    wish, slot, stage = "scale_gradients", Slot.PRECISION, InstallStage.LOOP
    accelerate_does_it = True

    def make_scaler(self, value: bool, device: torch.device) -> torch.amp.GradScaler | None:
        """Return torch's own scaler, on this device."""
        import torch

        return torch.amp.GradScaler(device.type) if value else None

    def script(self, value: bool, context: ScriptContext) -> dict[str, Any]:
        """Return whether the loop has a scaler."""
        return {"scaled": value}


class MatmulHandler(Handler):
    """torch's `fp32_precision` of matrix products and convolutions."""

    wish, slot, stage = "matmul", Slot.MATMUL, InstallStage.BUILD

    def around_run(self, value: str) -> Context | None:
        """Set the backends, and restore them afterwards."""
        return partial(matmul_precision, value)

    def script(self, value: str, context: ScriptContext) -> dict[str, Any]:
        """Return the value that the backends are set to."""
        return {"matmul": value}


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 matrix products and convolutions (`ieee`, `tf32`), and restore it afterwards.

    torch's older switches (`allow_tf32`) are set too. torch refuses a model that reads them if they
    contradict the new ones; every CTC head of transformers reads them through `cudnn.flags`.
    """
    import torch

    cudnn: Any = torch.backends.cudnn
    backends = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before, switches = [backend.fp32_precision for backend in backends], _tf32_switches()
    # An older switch also sets the newer ones, so these come last.
    _set_tf32(precision == "tf32", precision == "tf32")
    for backend in backends:
        backend.fp32_precision = precision
    try:
        yield
    finally:
        if switches is not None:
            _set_tf32(*switches)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def _tf32_switches() -> tuple[bool, bool] | None:
    """Return torch's older switches for matrix products and for cuDNN; None where torch raises because only
    the newer ones were set.
    """
    import torch

    try:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_tf32(products: bool, cudnn: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, cudnn
