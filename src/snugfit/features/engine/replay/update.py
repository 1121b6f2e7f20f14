"""An optimizer's update as recordable work: its numbers are on the device.

A recorded learning rate would never change if it were a Python number. torch's optimizers take a tensor in
its place, and count their steps on the device if their groups are `capturable`. These settings hold around
each update only. Before and after it the rates of the groups are numbers, so schedules and checkpoints read
the usual values.

An optimizer of ours has other methods (`masters/adamw.py`). `find_gradients` copies the gradients' addresses
to the device, and `prepare` its numbers. `launch` computes nothing on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RECORDABLE = "capturable"
"""torch's option, in each of an optimizer's groups."""


class RecordableUpdate:
    """One optimizer's update. Its rates are copied to the device before each run or replay."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        import torch

        self._optimizer: Any = optimizer
        groups = optimizer.param_groups
        self._is_ours = hasattr(optimizer, "prepare") and hasattr(optimizer, "launch")
        self._is_torchs = not self._is_ours and all(RECORDABLE in group for group in groups)
        self._is_on_host = device.type == "cpu"
        self._generation = getattr(optimizer, "generation", 0)
        self._rates: list[torch.Tensor] = []
        if self._is_torchs:
            self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in groups]

    @property
    def finds_gradients(self) -> bool:
        """Return whether it reads the gradients' addresses, so that they must be the weights' before each
        update.
        """
        return self._is_ours

    def locate(self) -> None:
        """Copy the gradients' addresses to the device."""
        if self._is_ours:
            self._optimizer.find_gradients()

    def has_moved(self) -> bool:
        """Return whether its tensors have moved since the last call, which makes recordings invalid."""
        before, self._generation = self._generation, getattr(self._optimizer, "generation", 0)
        return before != self._generation

    @property
    def can_be_recorded(self) -> bool:
        """Return whether this optimizer can run without host computation, and has its states."""
        return (self._is_ours or self._is_torchs) and bool(self._optimizer.state)

    def prepare(self) -> None:
        """Copy the numbers of the next update to the device."""
        if self._is_ours:
            self._optimizer.prepare()
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=False):
            rate.fill_(float(group["lr"]))

    def launch(self) -> None:
        """Run the update with the numbers on the device."""
        if self._is_ours:
            self._optimizer.launch()
            return
        with self._rates_on_device():
            self._optimizer.step()

    def run(self) -> None:
        """Run the update without a graph."""
        if self._is_torchs:
            self._count_on_device()
            self.prepare()
            self.launch()
        else:
            self._optimizer.step()

    def _count_on_device(self) -> None:
        """Move step counts from the host, as from a checkpoint, to the device."""
        for weight, state in self._optimizer.state.items():
            step = state.get("step")
            if hasattr(step, "device") and step.device != weight.device:
                state["step"] = step.to(weight.device)

    @contextlib.contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        before = [(group["lr"], group[RECORDABLE]) for group in groups if self._is_torchs]
        self._optimizer._warned_capturable_if_run_uncaptured = True
        for group, rate in zip(groups, self._rates, strict=False):
            group[RECORDABLE] = not self._is_on_host  # of which there are no graphs
            if rate.is_cuda:  # of such a rate torch knows no shapes (`_fused_adamw_.tensor_lr`)
                group["lr"] = rate
        try:
            yield
        finally:
            for group, (rate, recordable) in zip(groups, before, strict=False):
                group["lr"], group[RECORDABLE] = rate, recordable
