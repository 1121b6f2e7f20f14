"""AdamW that updates masters in 32 bits, each in two halves: the bfloat16 weight, and 16 bits of its own.

A weight takes 2 bytes an element, its gradient 2, and the states 10: two moments in fp32 and the other half
of the master. The update is AdamW's in 32 bits, in torch's order of operations, over the master that the
halves make (`halves.py`); then it is cut in halves again. No copy of a weight is made that outlives it.

On a GPU one kernel goes over all weights (`kernel.py`): it reads 14 bytes an element and writes 12, where
torch's fused AdamW over weights in fp32 reads 16 and writes 12, and autocast casts every weight besides.
Elsewhere, and for weights that are no bfloat16, it is plain torch, `AT_ONCE` numbers at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from snugfit.errors import RecipeError
from snugfit.step.wishes.adamw_in_pieces import STEP, OwnAdamW
from snugfit.step.wishes.masters.halves import flat, join, pieces, split, take_residual
from snugfit.step.wishes.masters.marks import HAS_MASTER, RESIDUAL

MOMENTS = ("exp_avg", "exp_avg_sq")

MOST_TENSORS = 512
"""Weights that one launch of the kernel updates at most (chosen): each of its programs looks among them for
its own."""

_KERNEL_ON_META = False
"""Whether a rehearsal's step is one on a GPU."""


class Numbers(NamedTuple):
    """The numbers of AdamW's step, as torch computes them on the host (`torch/optim/adam.py`)."""

    keep: float
    """What decay leaves of a weight: 1 - rate * decay."""
    first_share: float
    """Of a gradient in the first moment: 1 - beta1."""
    second_keep: float
    """Of the second moment itself: beta2."""
    second_share: float
    """Of a squared gradient in the second moment: 1 - beta2."""
    root: float
    """The square root of the second moment's bias correction: sqrt(1 - beta2 ** step)."""
    eps: float
    rate: float
    """Minus the learning rate, by the first moment's bias correction: -lr / (1 - beta1 ** step)."""

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> Numbers:
        """Those of a group's step of this number, from 1."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return cls(
            1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5,
            group["eps"], -(lr / (1 - beta1**step)),
        )  # fmt: skip


class MasterAdamW(OwnAdamW):
    """AdamW over weights of bfloat16, the other half of whose masters is among its states."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer does, and takes over what its weights have of their masters."""
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            if (residual := take_residual(weight)) is not None:
                self.state[weight] = {RESIDUAL: residual}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer does, but states keep their dtypes: torch's own would cast them to bfloat16."""
        super().load_state_dict(state_dict)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for weight, number in zip(weights, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[weight][name] = value.to(weight.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all weights that have a gradient."""
        if closure is not None:
            raise ValueError("It takes no closure: it computes no loss")
        for group in self.param_groups:
            by_kernel: dict[int, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is None or not weight.numel():
                    continue
                step = self._count(weight)
                if has_kernel(weight):
                    by_kernel.setdefault(step, []).append(weight)
                else:
                    self._update(weight, Numbers.of(group, step))
            for step, weights in by_kernel.items():
                for at in range(0, len(weights), MOST_TENSORS):
                    self._update_by_kernel(weights[at : at + MOST_TENSORS], Numbers.of(group, step))

    def _count(self, weight: torch.Tensor) -> int:
        """The number of this step of a weight, whose states are made before its first."""
        state = self.state[weight]
        if STEP not in state:
            if weight.dtype not in (torch.bfloat16, torch.float32):
                raise RecipeError(
                    f"Weights with masters are bfloat16, and others fp32, but one is {weight.dtype}. Try "
                    "'bf16'."
                )
            if weight.dtype is torch.bfloat16:
                state[RESIDUAL] = self._residual(weight)
                setattr(weight, HAS_MASTER, True)
            for name in MOMENTS:
                state[name] = torch.zeros_like(
                    weight, dtype=torch.float32, memory_format=torch.preserve_format
                )
            state[STEP] = 0
        state[STEP] += 1
        return int(state[STEP])

    def _residual(self, weight: torch.Tensor) -> torch.Tensor:
        """What it was given, where the weight is; zeros for a weight that was bfloat16 from the start."""
        known = self.state[weight].get(RESIDUAL)
        if known is None:
            return torch.zeros_like(weight, dtype=torch.int16, memory_format=torch.preserve_format)
        residual: torch.Tensor = known.to(weight.device)
        return residual

    def _update(self, weight: torch.Tensor, numbers: Numbers) -> None:
        state = self.state[weight]
        gradient = flat(laid_out_as(weight))
        first, second = (flat(state[name]) for name in MOMENTS)
        if weight.dtype is torch.float32:
            for part, slope, one, two in pieces(flat(weight), gradient, first, second):
                update(part, slope.to(torch.float32), one, two, numbers)
            return
        halves = flat(weight), flat(state[RESIDUAL])
        for high, low, slope, one, two in pieces(*halves, gradient, first, second):
            exact = join(high, low)
            update(exact, slope.to(torch.float32), one, two, numbers)
            split(exact, high, low)

    def _update_by_kernel(self, weights: list[torch.Tensor], numbers: Numbers) -> None:
        states = [self.state[weight] for weight in weights]
        for weight in weights:
            flat(weight)  # or it is refused
        update_by_kernel(
            weights, [state[RESIDUAL] for state in states], [state[MOMENTS[0]] for state in states],
            [state[MOMENTS[1]] for state in states], [laid_out_as(weight) for weight in weights],
            list(numbers),
        )  # fmt: skip


def laid_out_as(weight: torch.Tensor) -> torch.Tensor:
    """The gradient with the strides of its weight, as autograd gives it wherever it can. Raises `RecipeError`
    for a sparse one."""
    gradient = weight.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise RecipeError("Weights with masters take no sparse gradients. Try 'bf16', or sparse=False.")
    if gradient.stride() == weight.stride() or weight.numel() < 2:
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def update(
    exact: torch.Tensor, slope: torch.Tensor, first: torch.Tensor, second: torch.Tensor, numbers: Numbers
) -> None:
    """AdamW's step of numbers in 32 bits, operation by operation as torch's (`_single_tensor_adam`)."""
    exact.mul_(numbers.keep)
    first.lerp_(slope, numbers.first_share)
    second.mul_(numbers.second_keep).addcmul_(slope, slope, value=numbers.second_share)
    spread = second.sqrt().div_(numbers.root).add_(numbers.eps)
    exact.addcdiv_(first, spread, value=numbers.rate)


def norm_in_fp32(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of gradients as of one vector, with that of each in 32 bits: torch's own has their dtype, and
    of bfloat16 it would have 8 significant bits. A CPU's kernel widens them first, a GPU's on the way."""
    norms: Sequence[torch.Tensor]
    if _is_on_gpu(gradients[0]):
        norms = torch._foreach_norm(list(gradients), 2.0, torch.float32)
    else:
        norms = [torch.linalg.vector_norm(gradient.to(torch.float32)) for gradient in gradients]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


# ---- on a GPU --------------------------------------------------------------------------------------------


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether the kernel updates it: in bfloat16, as its gradient, on a GPU or a rehearsal of one."""
    gradient = weight.grad
    in_halves = weight.dtype is torch.bfloat16 and gradient is not None and gradient.dtype is torch.bfloat16
    return in_halves and _is_on_gpu(weight)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or (tensor.is_meta and _KERNEL_ON_META)


@contextlib.contextmanager
def shapes(*, on_gpu: bool = True) -> Iterator[None]:
    """Within it a step on `meta` is one on a GPU, or one on a CPU."""
    global _KERNEL_ON_META
    before, _KERNEL_ON_META = _KERNEL_ON_META, on_gpu
    try:
        yield
    finally:
        _KERNEL_ON_META = before


def update_by_kernel(
    weights: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> None:
    """AdamW's step of all these weights, which lie as their gradients and states do, in one kernel. Where
    they are is copied to the device first, from page-locked memory, so that the host goes on."""
    lists = weights, residuals, firsts, seconds, gradients
    places = places_of(lists)
    if weights[0].is_cuda:
        places = places.pin_memory()
    places = places.to(weights[0].device, non_blocking=True)
    adamw_of_halves(*map(list, lists), places, list(numbers))


def places_of(lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """For each weight the first of its blocks, how many elements it has, and the addresses of what belongs to
    it (7, N); N is a power of two, and beyond the last weight stands the number of all blocks."""
    from snugfit.step.wishes.masters.block import BLOCK

    counts = [weight.numel() for weight in lists[0]]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + math.ceil(count / BLOCK))
    columns = 1 << (len(counts) - 1).bit_length()
    rows = [starts[:-1], counts, *([tensor.data_ptr() for tensor in tensors] for tensors in lists)]
    filled = [row + [starts[-1]] * (columns - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "triton::adamw_of_halves",  # as traces name kernels that Triton compiles when they are first launched
    mutates_args=("weights", "residuals", "firsts", "seconds"),
    device_types="cuda",
)
def adamw_of_halves(
    weights: list[torch.Tensor],
    residuals: list[torch.Tensor],
    firsts: list[torch.Tensor],
    seconds: list[torch.Tensor],
    gradients: list[torch.Tensor],
    places: torch.Tensor,
    numbers: list[float],
) -> None:
    """The kernel's launch, as one operator with a shape function."""
    try:
        from snugfit.step.wishes.masters.kernel import launch
    except ImportError as fault:
        raise RecipeError(
            f"The update of weights with masters is a kernel that Triton compiles, which cannot be imported: "
            f"{fault}. Try: pip install triton, or the recipe 'bf16'."
        ) from None
    launch((weights, residuals, firsts, seconds, gradients), places, numbers)


@adamw_of_halves.register_fake
def _writes_in_place(*arguments: Any) -> None:
    """Its results are written in place, so it allocates nothing."""
