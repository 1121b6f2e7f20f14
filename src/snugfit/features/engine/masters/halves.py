"""Split of fp32 numbers into two halves: the nearest bfloat16, and the difference in 16 bits.

The bit patterns of an fp32 number and its nearest bfloat16, read as integers, differ by -32,768 to 32,767.
This difference fits into a signed 16-bit integer. The two halves thus give back every fp32 number exactly.
The forward pass uses the bfloat16 half alone.

The lower half may also have 8 bits, in units of 256, for weights of 24 bits. The fp32 result of an update is
then rounded stochastically to one of its two 24-bit neighbours. Rounded to the nearest, a weight would not
change under updates below half a unit, at most 2^-16 of the weight. With stochastic rounding, its average
change is exact. Infinity stays infinity. A number next to the largest may become infinite, as in any
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from snugfit.job.dtype import cast_weights
from snugfit.step.wishes.own_adamw import flat

HAS_MASTER = "has_master"
"""Name of the attribute that marks a bfloat16 weight as the upper half of an fp32 weight."""

# A split weight without an optimizer has this attribute; later the optimizer state has this key.
RESIDUAL = "residual"
"""Name of a weight's lower half: an attribute of the weight, later a key of its optimizer state."""

AT_ONCE = 1 << 20
"""Number of elements that are converted to 32 bits together (chosen). These copies take at most 16 MiB and
stay in a CPU's caches."""

HALF_RANGE = 1 << 15
"""Half of the value range of the lower 16 bits, at which a weight is rounded up."""

UNIT = 1 << 8
"""Value of one step of an 8-bit lower half, in steps of a 16-bit one."""


def lower_bits(residual: torch.Tensor | None) -> int:
    """Return the number of bits in a weight's low half: 16 or 8, and 0 without one."""
    return 0 if residual is None else 8 * residual.dtype.itemsize


def join(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers (N,) whose upper halves are in bfloat16 and lower halves in int16 or int8."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    unit = UNIT if residual.dtype is torch.int8 else 1
    return bits.add_(residual, alpha=unit).view(torch.float32)


def split(exact: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Split fp32 numbers into a bfloat16 half and a 16-bit lower half. The numbers are overwritten."""
    # Some bit patterns of NaN could carry into the sign bit when rounded, so all become the usual one.
    exact.masked_fill_(exact.isnan(), math.nan)
    bits = exact.view(torch.int32)
    # Halfway cases are rounded away from zero. With rounding to even, 65,537 numbers would share one
    # bfloat16, too many for 16 bits.
    upper = bits.add(HALF_RANGE).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper)
    residual.copy_(bits.sub_(upper.bitwise_left_shift_(16)))


def split_by_chance(
    exact: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, draws: torch.Tensor
) -> None:
    """Split 32-bit numbers into a bfloat16 half and a second half of 8 bits, and overwrite the numbers. A
    number is rounded up if its bits beyond 24 and `draws`, int32 from 0 to 255, add up to more than 255.
    """
    exact.masked_fill_(exact.isnan(), math.nan)
    # Rounding comes before the split, so that the two halves are exactly the 24 bits.
    bits = exact.view(torch.int32).add_(draws).bitwise_and_(-UNIT)
    upper = bits.add(HALF_RANGE).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper)
    residual.copy_(bits.sub_(upper.bitwise_left_shift_(16)).bitwise_right_shift_(8))


def in_bits_of(residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert the lower halves of fp32 weights to int16 or int8. In 8 bits a lower half is the nearest value
    that leaves the bfloat16 half unchanged.
    """
    if residual.dtype is dtype:
        return residual
    # Converting 8 to 16 bits is exact.
    if dtype is torch.int16:
        return residual.to(torch.int16).mul_(UNIT)
    # A larger value would be rounded to 128, which int8 cannot represent.
    max_norm = (1 << 15) - 1 - UNIT // 2
    return residual.clamp(max=max_norm).add_(UNIT // 2).bitwise_right_shift_(8).to(torch.int8)


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield slices of flat tensors of equal length, `AT_ONCE` elements of each tensor at a time."""
    return zip(*(tensor.split(AT_ONCE) for tensor in tensors), strict=True)


def halves_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both halves of a weight as new tensors with its strides. The lower half of a bfloat16 weight is
    zero.
    """
    high = torch.empty_like(weight, dtype=torch.bfloat16, memory_format=torch.preserve_format)
    low = torch.empty_like(weight, dtype=torch.int16, memory_format=torch.preserve_format)
    for exact, first, second in pieces(flat(weight), flat(high), flat(low)):
        # `split` overwrites its argument, so an fp32 weight is copied even without a cast.
        split(exact.to(torch.float32, copy=True), first, second)
    return high, low


@torch.no_grad()
def split_weights(model: Any) -> None:
    """Convert trained weights to bfloat16, each with its low half as an attribute. All other floating-point
    tensors of the model become bfloat16 alone. Weights that an architecture keeps in fp32 stay so."""
    stays = _kept_in_fp32(model)
    for name, weight in model.named_parameters():
        # Frozen weights are never updated, so they need no lower half.
        if weight.requires_grad and weight.dtype in (torch.float32, torch.float16) and name not in stays:
            weight.data, residual = halves_of(weight)
            setattr(weight, RESIDUAL, residual)
            setattr(weight, HAS_MASTER, True)
    # Casting the whole model must not change weights that the architecture keeps in fp32.
    as_they_are = {name: weight.data for name, weight in model.named_parameters() if name in stays}
    cast_weights(model, "bfloat16")
    for name, value in as_they_are.items():
        model.get_parameter(name).data = value
    # A state dict with fp32 weights is split while it is loaded.
    model.register_load_state_dict_pre_hook(load_masters)


def _kept_in_fp32(model: Any) -> set[str]:
    """Return the names of weights that a model of transformers has in fp32 next to bfloat16. The bias of
    DeepSeek-V3's router is one (`_keep_in_fp32_modules_strict`).
    """
    parts = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {name for name, _ in model.named_parameters() if any(part in name for part in parts)}


def take_residual(weight: torch.Tensor) -> torch.Tensor | None:
    """Remove and return the low half that a weight has as an attribute until an optimizer takes it; None
    without one.
    """
    residual: torch.Tensor | None = vars(weight).pop(RESIDUAL, None)
    return residual


def load_masters(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Split fp32 weights of a `state_dict` before they are loaded into a model with split weights. The model
    gets their bfloat16 halves, which torch's cast would round differently. Weights without an optimizer also
    get their low halves.
    """
    for name, weight in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if value is None or value.dtype is not torch.float32 or not getattr(weight, HAS_MASTER, False):
            continue
        # torch's own cast to bfloat16 would round halfway cases to even.
        state[prefix + name], residual = halves_of(value)
        if RESIDUAL in vars(weight):
            getattr(weight, RESIDUAL).copy_(residual)
