"""accelerate and the HF Trainer on a device that is not there.

Both ask the machine which device it has and refuse what it cannot do. For a rehearsal their placement is
substituted and nothing else: while they set themselves up they are told that the device is CUDA, so that
they decide as they would on a GPU; then their state's device becomes `meta`, and everything they place goes
there. Their own state of before, a user's live Accelerator perhaps, is put back afterwards.

On a real device nothing here does anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_DEVICE = "ACCELERATE_TORCH_DEVICE"


@contextlib.contextmanager
def placed_on(device: torch.device) -> Iterator[None]:
    """Within it, accelerate sets itself up for `device`; afterwards its state is what it was."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (PartialState, AcceleratorState, GradientState)
    before = [dict(each._shared_state) for each in classes]
    environment = os.environ.get(_DEVICE)
    for each in classes:
        each._shared_state.clear()
    if device.type == "meta":
        os.environ[_DEVICE] = "cuda"
    elif device.type == "cpu":
        os.environ[_DEVICE] = "cpu"
    try:
        with _as_on_a_gpu() if device.type == "meta" else contextlib.nullcontext():
            yield
    finally:
        os.environ.pop(_DEVICE, None)
        if environment is not None:
            os.environ[_DEVICE] = environment
        for each, state in zip(classes, before, strict=True):
            each._shared_state.clear()
            each._shared_state.update(state)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Questions about this machine's GPU that stand in the way of setting up for another."""
    import accelerate.accelerator
    import transformers.training_args

    places = (
        (transformers.training_args, "is_torch_bf16_gpu_available"),
        (accelerate.accelerator, "is_bf16_available"),
    )
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, lambda *arguments, **keywords: True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


def settle(accelerator: Any, device: torch.device) -> None:
    """After set-up: for a rehearsal, everything from here on is placed on `meta`."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    if device.type != "meta":
        return
    for each in (PartialState, AcceleratorState):  # the second copies the first whenever it is made
        each._shared_state["device"] = device
    if accelerator.scaler is not None:
        accelerator.scaler = torch.amp.GradScaler("meta")
