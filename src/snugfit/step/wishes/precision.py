"""Handlers of the Setup's fields about precision: autocast, gradient scaling, and the precision of matrix
products."""

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
"""Values of accelerate's `mixed_precision` argument, by the dtype of autocast."""


class AutocastHandler(Handler):
    """Handler of autocast's dtype: it runs forward passes under autocast."""

    wish, slot, stage = "autocast", Slot.PRECISION, InstallStage.LOOP
    accelerate_does_it = True

    def model_arguments(self, value: str | None) -> dict[str, Any]:
        """Return the dtype in which products of quantized weights are computed."""
        return {"autocast": value} if value else {}

    def objections(self, value: str | None, live: LiveTraining) -> Iterator[str]:
        """Yield an objection to float16 on the CPU for a user's Trainer: accelerate's scaler needs a GPU."""
        if value == "float16" and live.device.type == "cpu" and live.front_end == "fit":
            yield (
                f"{live.technique(self.slot)}: accelerate cannot scale float16 gradients on the CPU. "
                "Choose a precision of bfloat16 or float32."
            )

    def around_forward(self, value: str | None, device: torch.device) -> Context | None:
        """Return torch's autocast context for the device."""
        import torch

        return partial(torch.autocast, device.type, dtype=getattr(torch, value)) if value else None

    def training_arguments(self, value: str | None, job: Job, device: torch.device) -> dict[str, Any]:
        """Return `bf16` and `fp16` of `TrainingArguments`, of which one at most is True."""
        return {"bf16": value == "bfloat16", "fp16": value == "float16"}

    def accelerator_arguments(self, value: str | None) -> dict[str, Any]:
        """Return accelerate's mixed precision, which for fp16 includes the scaler."""
        return {"mixed_precision": MIXED[value]}

    def script(self, value: str | None, context: ScriptContext) -> dict[str, Any]:
        """Return the autocast dtype for a torch script, or `mixed_precision` for an accelerate script."""
        word = {"mixed": MIXED[value]} if value else {}
        return {"autocast": f"torch.{value}" if value else "", **word}


class ScaleGradientsHandler(Handler):
    """Handler of gradient scaling: the loss is scaled against underflow, and steps whose gradients overflow
    are skipped. accelerate and the Trainer do it whenever they autocast to fp16."""

    wish, slot, stage = "scale_gradients", Slot.PRECISION, InstallStage.LOOP
    accelerate_does_it = True

    def make_scaler(self, value: bool, device: torch.device) -> torch.amp.GradScaler | None:
        """Return torch's gradient scaler for the device, or None."""
        import torch

        return torch.amp.GradScaler(device.type) if value else None

    def script(self, value: bool, context: ScriptContext) -> dict[str, Any]:
        """Return a flag for an exported script's template: True if the loop has a gradient scaler."""
        return {"scaled": value}


class MatmulHandler(Handler):
    """Handler of `fp32_precision`, torch's setting for fp32 matrix products and convolutions."""

    wish, slot, stage = "matmul", Slot.MATMUL, InstallStage.BUILD

    def around_run(self, value: str) -> Context | None:
        """Return a context that sets the precision of torch's backends and restores it afterwards."""
        return partial(matmul_precision, value)

    def script(self, value: str, context: ScriptContext) -> dict[str, Any]:
        """Return the precision of fp32 matrix products, as a value for an exported script's template."""
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
    """Return torch's older TF32 switches for matrix products and for cuDNN; None if torch raises because only
    the newer ones were set."""
    import torch

    try:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_tf32(products: bool, cudnn: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, cudnn
