"""An optimizer's update that a CUDA graph can record, because its scalars are on the device.

torch's optimizers take a tensor in the place of a learning rate. They count their steps on the device if
their groups are `capturable`. An optimizer of ours has other methods (`masters/adamw.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RECORDABLE = "capturable"
"""Name of torch's option for recordable updates, in each of an optimizer's groups."""


class RecordableUpdate:
    """One optimizer's update, in a form that a CUDA graph can contain. Its learning rates are copied to the
    device before each run or replay.
    """

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
        """Return True if the update reads a table of gradient addresses, which must be current before each
        update.
        """
        return self._is_ours

    def locate(self) -> None:
        """Copy the current memory addresses of the gradients to the device, where the update's kernels read
        them.
        """
        if self._is_ours:
            self._optimizer.find_gradients()

    def has_moved(self) -> bool:
        """Return True if the optimizer's tensors have moved since the last call, so that recorded CUDA graphs
        are invalid.
        """
        before, self._generation = self._generation, getattr(self._optimizer, "generation", 0)
        return before != self._generation

    @property
    def can_be_recorded(self) -> bool:
        """Return True if a CUDA graph can contain this optimizer's update: its states exist, and nothing is
        computed on the host.
        """
        # Without states, the update would allocate them inside of the graph.
        return (self._is_ours or self._is_torchs) and bool(self._optimizer.state)

    def prepare(self) -> None:
        """Copy the next update's scalars, such as learning rates, to the device."""
        if self._is_ours:
            self._optimizer.prepare()
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=False):
            # A recorded number would never change, so the graph reads a tensor.
            rate.fill_(float(group["lr"]))

    def launch(self) -> None:
        """Run the update with the scalars on the device."""
        if self._is_ours:
            self._optimizer.launch()
            return
        with self._rates_on_device():
            self._optimizer.step()

    def run(self) -> None:
        """Run the optimizer's update once, without a CUDA graph."""
        if self._is_torchs:
            self._count_on_device()
            self.prepare()
            self.launch()
        else:
            self._optimizer.step()

    def _count_on_device(self) -> None:
        """Move the optimizer's step counts to the device, if they are on the host as after loading a
        checkpoint.
        """
        for weight, state in self._optimizer.state.items():
            step = state.get("step")
            # A checkpoint restores step counts on the host.
            if hasattr(step, "device") and step.device != weight.device:
                state["step"] = step.to(weight.device)

    @contextlib.contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        # The settings hold around an update only: schedules and checkpoints read numbers.
        before = [(group["lr"], group[RECORDABLE]) for group in groups if self._is_torchs]
        # torch warns once about a capturable optimizer outside of a recording.
        self._optimizer._warned_capturable_if_run_uncaptured = True
        for group, rate in zip(groups, self._rates, strict=False):
            # On the host there are no graphs.
            group[RECORDABLE] = not self._is_on_host
            # On `meta`, torch has no shape function for such a rate (`_fused_adamw_.tensor_lr`).
            if rate.is_cuda:
                group["lr"] = rate
        try:
            yield
        finally:
            for group, (rate, recordable) in zip(groups, before, strict=False):
                group["lr"], group[RECORDABLE] = rate, recordable
