"""AdamW over fp32 weights (masters) that are stored in two halves: the bfloat16 weight, and 16 further bits.

A weight takes 2 bytes per element, its gradient 2, and the optimizer states 10: two fp32 moments and the
lower half. The update joins both halves to fp32 (`halves.py`), computes in the order of torch's AdamW, and
splits the result again. Full fp32 copies of weights exist only temporarily.

On a GPU one kernel updates all weights (`kernel.py`). It reads 14 bytes per element and writes 12. torch's
fused AdamW over fp32 weights reads 16 and writes 12, and autocast casts every weight in addition. On other
devices the update is plain torch, for `AT_ONCE` elements at a time.

A step has two parts. `prepare` runs on the host: it reads the gradients' addresses, increments the step
count, and copies the step's scalars to the device. `launch` launches kernels and reads nothing on the host,
so a CUDA graph can contain it. `prepare` is called before each replay of that graph. Gradients are clipped
within the update (`clip_by`), without a separate pass over them, and are not changed. If the gradient norm is
not finite, the update changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, ClassVar, NamedTuple

import torch

from snugfit.errors import RecipeError
from snugfit.features.engine.masters.block import NUMBERS
from snugfit.features.engine.masters.device_copy import DeviceCopy
from snugfit.features.engine.masters.halves import (
    HAS_MASTER,
    RESIDUAL,
    in_bits_of,
    join,
    pieces,
    split,
    take_residual,
)
from snugfit.features.engine.masters.launches import is_on_gpu, new_sums, norm_of, update_weights
from snugfit.features.engine.masters.table import MOMENTS, WeightTable
from snugfit.step.wishes.own_adamw import STEP, OwnAdamW, flat, move_moments, with_strides_of


class Numbers(NamedTuple):
    """The scalars of one AdamW step, such as bias corrections, as torch computes them on the host
    (`torch/optim/adam.py`).
    """

    keep: float
    """Factor by which weight decay multiplies a weight: 1 - lr * decay."""
    first_share: float
    """Factor of the gradient in the first moment: 1 - beta1."""
    second_keep: float
    """Factor of the old second moment: beta2."""
    second_share: float
    """Factor of the squared gradient in the second moment: 1 - beta2."""
    root: float
    """The square root of the second moment's bias correction: sqrt(1 - beta2 ** step)."""
    eps: float
    rate: float
    """Negative learning rate, divided by the first moment's bias correction: -lr / (1 - beta1 ** step)."""

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> Numbers:
        """Return the scalars for a step of this parameter group; `step` counts from 1."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return cls(
            1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5,
            group["eps"], -(lr / (1 - beta1**step)),
        )  # fmt: skip


class MasterAdamW(OwnAdamW):
    """AdamW over bfloat16 weights, with the low half of each 32-bit master weight among its states. It also
    accepts fp32 weights.
    """

    clips_inside: ClassVar = True
    """True: the optimizer clips gradients itself, by `gradient_norm` and `clip_by` (`step/clipping.py`)."""

    generation = 0
    """Number of changes of the addresses of weights or states. A CUDA graph recorded before a change updates
    the old addresses.
    """

    table_of: ClassVar[type[WeightTable]] = WeightTable
    """Class of the table of memory addresses that the kernels read."""

    residual_dtype = torch.int16
    """Dtype of the lower halves of fp32 weights, beside the bfloat16 upper halves."""

    _tables: Sequence[WeightTable] | None = None
    _clip: tuple[torch.Tensor, float] | None = None

    whole_weight = staticmethod(join)
    """Function that joins a weight's bfloat16 half and lower half to one fp32 tensor."""

    def held_parts(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the low half of each master weight that has one, for checkpoints."""
        return {weight: state[RESIDUAL] for weight, state in self.state.items() if RESIDUAL in state}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and move the low halves of its weights into the optimizer's states."""
        # A new parameter group changes addresses, so the kernels' tables are written again in the next step.
        super().add_param_group(param_group)
        self._tables = None
        for weight in self.param_groups[-1]["params"]:
            if (residual := take_residual(weight)) is not None:
                self.state[weight] = {RESIDUAL: in_bits_of(residual, self.residual_dtype)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load optimizer states without a change of their dtypes: torch's own would cast them to bfloat16.
        Low halves of master weights are converted to this optimizer's number of bits.
        """
        # torch's own method casts optimizer states to the weight's dtype, which is bfloat16 here.
        super().load_state_dict(state_dict)
        self._tables = None
        weights = [weight for group in self.param_groups for weight in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for weight, number in zip(weights, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    state = in_bits_of(value, self.residual_dtype) if name == RESIDUAL else value
                    self.state[weight][name] = state.to(weight.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one optimizer step on all weights that have a gradient."""
        if closure is not None:
            raise ValueError("It takes no closure: it computes no loss. Call step() without arguments")
        self.prepare()
        self.launch()

    # ---- the host's half ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Prepare an update: read the gradients' addresses, and increment the step count of each weight with
        a gradient. The step's scalars are copied to the device in stream order.
        """
        self.find_gradients()
        self.count_step()

    @torch.no_grad()
    def find_gradients(self) -> None:
        """Create the states of weights with their first gradient, and write all gradient addresses to the
        tables that the kernels read.
        """
        for weight in self._new_weights():
            if weight.grad is not None:
                self.make_states(weight)
                self._tables = None
        if self._tables is None or not self._states_are_as_before():
            self._make_tables()
        for table in self._tables or ():
            table.find()

    def count_step(self) -> None:
        """Increment the step counts of the weights, after `find_gradients`; `launch` follows."""
        rows: dict[tuple[int, int], int] = {}
        counted = [self.state[weight] for weight, _ in self._plain if weight.grad is not None]
        for table, groups in zip(self._tables or (), self._groups_of_tables, strict=True):
            chosen = []
            for state, has_one, group in zip(table.states, table.has_gradient, groups, strict=True):
                row = 0
                # Row 0 is a placeholder for weights without a gradient, which the kernel skips.
                if has_one:
                    counted.append(state)
                    # Weights with equal settings and equal step counts share a row of numbers.
                    row = rows.setdefault((group, state[STEP] + 1), len(rows))
                chosen.append(row)
            table.number_rows(chosen)
        for state in counted:
            state[STEP] += 1
        # If no weight has a gradient, nothing is launched, so nothing needs to be written.
        if rows:
            self._numbers.write([(*Numbers.of(self.param_groups[n], step), step) for n, step in rows])

    # ---- the device's half -------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self) -> None:
        """Update the weights after `prepare`, clipped if `clip_by` was called since the last launch. With a
        non-finite gradient norm, everything stays unchanged.
        """
        # A clipping factor is valid for a single launch.
        clip, self._clip = self._clip, None
        norm, max_norm = clip if clip is not None else (None, 0.0)
        for table in self._tables or ():
            update_weights(table, self._numbers.value, norm, max_norm)
        # On a GPU the kernels check the norm themselves. On a host it is checked here.
        if not self._plain or is_refused(norm):
            return
        coefficient = None if norm is None else clip_coefficient(norm, max_norm)
        for weight, group in self._plain:
            if weight.grad is not None:
                step = self.state[weight][STEP]
                self.update_plainly(
                    weight, weight.grad, Numbers.of(self.param_groups[group], step), coefficient
                )

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients as one vector, in 32 bits: a scalar on the device. On a GPU it has
        the same address each time.
        """
        self.find_gradients()
        gradients = [weight.grad for weight, _ in self._plain if weight.grad is not None]
        if not self._tables:
            return norm_in_fp32(gradients) if gradients else torch.zeros(())
        # The tensors of the sums and the norm keep their addresses, because a CUDA graph reads them.
        norm_of(self._tables, self._sums, self._norm)
        return self._norm

    def clip_by(self, norm: torch.Tensor, max_norm: float) -> None:
        """Clip in the next `launch`: scale gradients of this norm, a scalar in fp32 on the device, down to
        the norm `max_norm`. The result is that of `torch.nn.utils.clip_grads_with_norm_`, without its
        rounding of the products.
        """
        self._clip = norm, max_norm

    # ---- states, tables ----------------------------------------------------------------------------------

    def _new_weights(self) -> Sequence[torch.Tensor]:
        if self._tables is None or not self._states_are_as_before():
            # Weights without a gradient in earlier steps may have one now.
            weights = (weight for group in self.param_groups for weight in group["params"])
            return [weight for weight in weights if weight.numel() and STEP not in self.state.get(weight, {})]
        return self._without_states

    def _states_are_as_before(self) -> bool:
        """Return False if the optimizer's state tensors were replaced by others, as by loading a
        checkpoint.
        """
        return len(self.state) == len(self._known) and all(map(is_, self.state.values(), self._known))

    def make_states(self, weight: torch.Tensor) -> None:
        """Create the moments of a weight, before its first step. Raises `RecipeError` for a dtype that is
        neither bfloat16 nor fp32.
        """
        if weight.dtype not in (torch.bfloat16, torch.float32):
            raise RecipeError(
                f"With 32-bit masters weights are bfloat16, others fp32; one is {weight.dtype}. Try 'bf16'."
            )
        state = self.state[weight]
        # An fp32 weight is not split, so it needs no residual.
        if weight.dtype is torch.bfloat16:
            state[RESIDUAL] = self._residual(weight)
            setattr(weight, HAS_MASTER, True)
        state.update(self.new_moments(weight))
        state[STEP] = 0

    def new_moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both moments of a weight before its first step, in fp32."""
        return {
            name: torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.preserve_format)
            for name in MOMENTS
        }

    def _residual(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight's low half, on its device; zeros for a weight that was bfloat16 from the
        start."""
        known = self.state[weight].get(RESIDUAL)
        if known is None:
            return torch.zeros_like(weight, dtype=self.residual_dtype, memory_format=torch.preserve_format)
        residual: torch.Tensor = known.to(weight.device)
        return residual

    def _make_tables(self) -> None:
        """Create the tables of memory addresses that the update kernels read: one per device and dtype of the
        weights.
        """
        # One kernel updates only weights of the same dtype.
        kinds: dict[torch.dtype, list[tuple[torch.Tensor, int]]] = {}
        self._plain: list[tuple[torch.Tensor, int]] = []
        self._without_states: list[torch.Tensor] = []
        for number, group in enumerate(self.param_groups):
            for weight in group["params"]:
                if STEP in self.state.get(weight, {}):
                    by_kernel = is_on_gpu(weight)
                    kind = kinds.setdefault(weight.dtype, []) if by_kernel else self._plain
                    kind.append((weight, number))
                elif weight.numel():
                    self._without_states.append(weight)
        self._known = list(self.state.values())
        self._groups_of_tables = [[number for _, number in kind] for kind in kinds.values()]
        self._tables = [
            self.table_of([weight for weight, _ in kind], [self.state[weight] for weight, _ in kind])
            for kind in kinds.values()
        ]
        # CUDA graphs that were recorded earlier read the old addresses.
        self.generation += 1
        if self._tables:
            rows, device = sum(map(len, self._groups_of_tables)), self._tables[0].weights[0].device
            self._numbers = DeviceCopy((rows, NUMBERS), torch.float32, device)
            self._sums = new_sums(self._tables)
            self._norm = torch.empty((), dtype=torch.float32, device=device)

    # ---- plain torch -------------------------------------------------------------------------------------

    def update_plainly(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        numbers: Numbers,
        coefficient: torch.Tensor | None,
    ) -> None:
        """Update one weight in plain torch, its gradient multiplied by a scalar if there is one."""
        state = self.state[weight]
        slopes = flat(with_strides_of(weight, gradient))
        first, second = (flat(state[name]) for name in MOMENTS)
        # An fp32 weight is updated in place, without being joined from two halves.
        if weight.dtype is torch.float32:
            for exact, slope, first_moment, two in pieces(flat(weight), slopes, first, second):
                update(exact, widen(slope, coefficient), first_moment, two, numbers)
            return
        halves = flat(weight), flat(state[RESIDUAL])
        # A weight is widened to 32 bits in pieces, so that only one piece exists in 32 bits at a time.
        for high, low, slope, first_moment, two in pieces(*halves, slopes, first, second):
            exact = join(high, low)
            update(exact, widen(slope, coefficient), first_moment, two, numbers)
            split(exact, high, low)


def is_refused(norm: torch.Tensor | None) -> bool:
    """Return True if an update must be skipped because the gradient norm is not finite. Kernels check the
    norm themselves. For a norm on `meta` it returns False.
    """
    return norm is not None and not norm.is_meta and not bool(norm.isfinite())


def widen(slope: torch.Tensor, coefficient: torch.Tensor | None) -> torch.Tensor:
    """Return gradients in fp32, multiplied by the clipping factor `coefficient` if there is one."""
    return slope.to(torch.float32) if coefficient is None else slope.to(torch.float32) * coefficient


def update(
    exact: torch.Tensor, slope: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: Numbers
) -> None:
    """Update fp32 masters and moments by one AdamW step, operation by operation as torch's
    (`_single_tensor_adam`)."""
    keep, *of_moments, rate = numbers
    exact.mul_(keep)
    exact.addcdiv_(first, move_moments(first, second, slope, *of_moments), value=rate)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the clipping factor of gradients of this norm, a scalar
    (`torch.nn.utils.clip_grads_with_norm_`).
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norm_in_fp32(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients as one vector, with each gradient's norm in 32 bits. torch's own has
    the gradients' dtype, which for bfloat16 has 8 significant bits.
    """
    norms = [torch.linalg.vector_norm(gradient.to(torch.float32)) for gradient in gradients]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
