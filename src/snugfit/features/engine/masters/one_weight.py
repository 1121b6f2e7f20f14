"""Updates of one weight at a time, with the optimizers `MasterAdamW` and `CompactAdamW`, for gradients that
are freed at once.

Results and optimizer states are the same as in a step over all weights. On a GPU each weight's update is a
separate kernel launch, and so is its part of the gradient norm. Both kernels read the step's scalars on the
device. On other devices the computation is plain torch. A simulated step calls operators, as in
`launches.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, ClassVar

import torch

from snugfit.features.engine.masters.adamw import MasterAdamW, Numbers, is_refused
from snugfit.features.engine.masters.block import NORM_PROGRAMS, NUMBERS
from snugfit.features.engine.masters.device_copy import DeviceCopy
from snugfit.features.engine.masters.halves import lower_bits
from snugfit.features.engine.masters.launches import (
    OPERATORS,
    is_on_gpu,
    take_root,
    triton_named,
    writes_in_place,
)
from snugfit.features.engine.updates.weight_updates import WeightUpdates
from snugfit.step.wishes.own_adamw import STEP, with_strides_of

OPERATORS.define(
    "adamw_of_weight(Tensor(a!) weight, Tensor(b!)[] states, Tensor gradient, Tensor numbers) -> ()"
)
OPERATORS.define("squares_of_gradient(Tensor gradient, Tensor(a!) sums) -> ()")
for _name in ("adamw_of_weight", "squares_of_gradient"):
    OPERATORS.impl(_name, writes_in_place, "Meta")


class MasterUpdates(WeightUpdates):
    """Updates one weight at a time, and computes the gradient norm, for AdamW over master weights."""

    can_be_recorded: ClassVar = True
    """True: its scalars, such as the learning rate, are on the device, so that a CUDA graph can contain
    updates."""

    def __init__(self, optimizer: MasterAdamW) -> None:
        super().__init__(
            optimizer, (weight for group in optimizer.param_groups for weight in group["params"])
        )
        self._norm: torch.Tensor | None = None
        self._most = 0.0
        self._is_refused = False
        self._known: list[Any] = []
        by_kernel = list(filter(is_on_gpu, self._order))
        if by_kernel:
            device = by_kernel[0].device
            self._numbers = DeviceCopy((len(self._order), NUMBERS), torch.float32, device)
            self._rows = self._numbers.value.unbind()
            # All kernel launches for a norm add to the same sums, which are set to zero before each norm.
            self._sums = torch.empty(NORM_PROGRAMS, dtype=torch.float32, device=device)
            self._root = torch.empty((), dtype=torch.float32, device=device)
        self._by_kernel = bool(by_kernel)

    def has_moved(self) -> bool:
        """Return True if the optimizer's state tensors were replaced since the last call, as by loading a
        checkpoint.
        """
        before, self._known = self._known, list(self._optimizer.state.values())
        return len(before) != len(self._known) or not all(map(is_, before, self._known))

    # ---- the norm ----------------------------------------------------------------------------------------

    def begin_norm(self) -> None:
        """Set the sum of squared gradients to zero."""
        super().begin_norm()
        if self._by_kernel:
            self._sums.zero_()

    def take(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the squares of this gradient to the sum for the gradient norm."""
        # A kernel reads weight and gradient in the same order of elements.
        gradient = with_strides_of(weight, gradient)
        if not is_on_gpu(weight):
            self._norms[self._order[weight]] = torch.linalg.vector_norm(gradient.to(torch.float32))
        elif gradient.is_meta:
            torch.ops.triton.squares_of_gradient(gradient, self._sums)
        elif gradient.numel():
            with triton_named():
                from snugfit.features.engine.masters.kernel import launch_squares_of_one
            launch_squares_of_one(gradient, self._sums)

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of all added gradients, in 32 bits: a scalar on the device."""
        if self._by_kernel:
            take_root(self._sums, self._root)
            return self._root
        return super().norm()

    # ---- the updates -------------------------------------------------------------------------------------

    def begin_update(self, norm: torch.Tensor | None, max_norm: float) -> None:
        """Prepare the scalars of an AdamW step that updates weights one by one; with a norm, gradients are
        clipped to `max_norm`.
        """
        optimizer = self._optimizer
        # Learning rate schedules warn if the optimizer's `step` was never called.
        optimizer._opt_called = True
        self._norm, self._most = norm, max_norm
        if self._by_kernel:
            steps = [
                (number, optimizer.state.get(weight, {}).get(STEP, 0) + 1)
                for weight, number in self._groups.items()
            ]
            rows = {key: (*Numbers.of(optimizer.param_groups[key[0]], key[1]), key[1]) for key in set(steps)}
            # The scalars of all weights are written once per step, before any gradient exists.
            self._numbers.write([rows[key] for key in steps])
            return
        self._is_refused = is_refused(norm)
        super().begin_update(norm, max_norm)

    def has_states(self, weight: torch.Tensor) -> bool:
        """Return True if this weight has optimizer states, so that its update creates none."""
        return not weight.numel() or STEP in self._optimizer.state.get(weight, {})

    @torch.no_grad()
    def make_states(self, weights: Iterable[torch.Tensor]) -> None:
        """Create the optimizer states of those weights that have none."""
        for weight in weights:
            if not self.has_states(weight):
                self._optimizer.make_states(weight)

    def count(self, weights: Iterable[torch.Tensor]) -> None:
        """Increment the step counts of these weights on a GPU; an update in plain torch
        increments its own.
        """
        for weight in weights:
            # A replayed CUDA graph repeats the update without its Python code, so steps are counted
            # separately.
            if weight.numel() and is_on_gpu(weight):
                self._optimizer.state[weight][STEP] += 1

    @torch.no_grad()
    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one weight by its gradient, with AdamW."""
        optimizer = self._optimizer
        if not weight.numel():
            return
        self.make_states([weight])
        state = optimizer.state[weight]
        if is_on_gpu(weight):
            self._launch(weight, with_strides_of(weight, gradient), state, self._rows[self._order[weight]])
            return
        state[STEP] += 1
        if not self._is_refused:
            numbers = Numbers.of(optimizer.param_groups[self._groups[weight]], state[STEP])
            optimizer.update_plainly(weight, gradient, numbers, self._coefficient)

    def _launch(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], scalars: torch.Tensor
    ) -> None:
        table = self._optimizer.table_of
        residual, first, second, *scales = table.tensors_kept(state)
        if weight.is_meta:
            tensors = [tensor for tensor in (residual, first, second, *scales) if tensor is not None]
            torch.ops.triton.adamw_of_weight(weight, tensors, gradient, scalars)
            return
        with triton_named():
            from snugfit.features.engine.masters.kernel import launch_update_of_one
        # The address 0 means a weight without a residual.
        places = [
            0 if tensor is None else tensor.data_ptr()
            for tensor in (weight, residual, first, second, gradient)
        ]
        launch_update_of_one(
            places + [tensor.data_ptr() for tensor in scales], weight.numel(), scalars,
            self._norm, self._most, halves=lower_bits(residual), group=table.group,
            settings=table.usual_settings,
        )  # fmt: skip
        # The kernel changes the weight without autograd's knowledge, so its version is increased here.
        torch.autograd.graph.increment_version([weight])
