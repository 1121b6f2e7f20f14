"""The private names of transformers and accelerate that snugfit overrides and reads.

These names may change in any release. So all are in this file, and those for a user's Trainer in three files
of its feature. `tests/test_transformers_internals.py` checks each against the installed version: it exists,
accepts snugfit's arguments, and is called as snugfit expects.

In a simulation both libraries run for a device that does not exist. They query the machine's device and
refuse unsupported settings, so only their choice of a device is replaced. During set-up the device is
reported as CUDA, so that they make the choices for a GPU. Then their state's device becomes `meta`, and they
place everything there. Afterwards their earlier state, perhaps a user's live Accelerator, is restored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch


DEVICE = "ACCELERATE_TORCH_DEVICE"
"""Name of the environment variable that sets accelerate's device."""


# ---- a device that is not there --------------------------------------------------------------------------


@contextlib.contextmanager
def placed_on(device: torch.device) -> Iterator[None]:
    """Set up accelerate's global state for `device`, and restore it afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    variables = {"meta": {DEVICE: "cuda"}, "cpu": {DEVICE: "cpu"}}
    with contextlib.ExitStack() as changes:
        # All instances of such a class share one dictionary. An empty one means that the state is set up
        # again.
        for kind in (PartialState, AcceleratorState, GradientState):
            changes.enter_context(patch.dict(kind._shared_state, clear=True))
        changes.enter_context(patch.dict(os.environ, variables.get(device.type, {})))
        if device.type == "meta":
            changes.enter_context(_as_on_a_gpu())
        yield


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Patch the checks in transformers and accelerate that would refuse a GPU's settings on this machine."""
    import accelerate.accelerator
    import transformers.training_args

    with (
        patch.object(transformers.training_args, "is_torch_bf16_gpu_available", _always),
        patch.object(accelerate.accelerator, "is_bf16_available", _always),
    ):
        yield


def _always(*arguments: Any, **keywords: Any) -> bool:
    return True


def place_state(accelerator: Any, device: torch.device) -> None:
    """Set an accelerator's device to `meta` after its set-up, for a simulation. On a real device nothing
    changes."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    if device.type != "meta":
        return
    for kind in (PartialState, AcceleratorState):  # the second copies the first at each construction
        kind._shared_state["device"] = device
    if accelerator.scaler is not None:
        # The scaler was made for CUDA, the device during set-up.
        accelerator.scaler = torch.amp.GradScaler("meta")


def arguments_class(device: torch.device) -> type[Any]:
    """Return `TrainingArguments`, or for a simulation a subclass whose device is `meta`."""
    import transformers

    if device.type != "meta":
        plain: type[Any] = transformers.TrainingArguments
        return plain

    class PlacedArguments(transformers.TrainingArguments):  # type: ignore[misc]
        @property
        def _setup_devices(self) -> torch.device:
            from accelerate.state import PartialState

            self.distributed_state = PartialState()
            # With several GPUs on this machine, the Trainer would use `DataParallel`.
            self._n_gpu = 1
            return device

    return PlacedArguments
