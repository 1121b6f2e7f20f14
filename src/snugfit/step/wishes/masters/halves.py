"""A number in 32 bits as two halves: the nearest bfloat16, and 16 bits that say how far it is.

A number and its nearest bfloat16 differ, as whole numbers that their bits stand for, by -32,768 to 32,767: 16
bits with a sign. So the two are all of the number, whatever it is, and the first is what a forward pass
computes with. What lies halfway between two neighbours goes away from zero, not to the even one as torch's
casts do: to the even one 65,537 numbers would be rounded and to the odd one 65,535, which 16 bits cannot tell
apart. What is not a number is one of many such patterns, and becomes the usual one.

The second half may have 8 bits, in units of 256 of those: then a master has 24 bits, and what an update gives
in 32 is rounded up or down to a neighbour by chance, with the odds of how near either is. Rounded to the
nearest, a master would stand still under updates of less than half a unit, 2^-16 of it at most; by chance it
goes on average where it would go in 32 bits. Numbers are rounded first and cut then, so a carry reaches the
bfloat16, and the two are exactly the 24 bits. An infinite number stays one; what is within a unit of the
largest number may become infinite, as in every rounding.

A weight that was split and has no optimizer yet holds its second half under `RESIDUAL`; then the optimizer
has it among its states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from snugfit.job.dtype import cast_weights
from snugfit.step.wishes.masters.marks import HAS_MASTER, RESIDUAL
from snugfit.step.wishes.own_adamw import flat

AT_ONCE = 1 << 20
"""Numbers that are widened together (chosen): few enough that their copies in 32 bits stay in a CPU's caches,
and take 16 MiB at most."""

HALFWAY = 1 << 15
"""Half of what the lower 16 bits count to."""

UNIT = 1 << 8
"""Of a second half in 8 bits, in units of one in 16 bits."""


def lower_bits(residual: torch.Tensor | None) -> int:
    """Bits of a second half: 16 or 8, and 0 of none."""
    return 0 if residual is None else 8 * residual.dtype.itemsize


def join(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The numbers in 32 bits whose halves these are, bfloat16 and int16 or int8."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    unit = UNIT if residual.dtype is torch.int8 else 1
    return bits.add_(residual, alpha=unit).view(torch.float32)


def split(exact: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Writes both halves of these numbers in 32 bits, which it overwrites; the second has 16 bits."""
    exact.masked_fill_(exact.isnan(), math.nan)
    bits = exact.view(torch.int32)
    upper = bits.add(HALFWAY).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper)
    residual.copy_(bits.sub_(upper.bitwise_left_shift_(16)))


def split_by_chance(
    exact: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, draws: torch.Tensor
) -> None:
    """Writes both halves of these numbers in 32 bits, which it overwrites; the second has 8 bits. Numbers are
    rounded up where what they have beyond 24 bits and `draws`, int32 from 0 to 255, come to a unit."""
    exact.masked_fill_(exact.isnan(), math.nan)
    bits = exact.view(torch.int32).add_(draws).bitwise_and_(-UNIT)
    upper = bits.add(HALFWAY).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper)
    residual.copy_(bits.sub_(upper.bitwise_left_shift_(16)).bitwise_right_shift_(8))


def in_bits_of(residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A second half as int16 or int8. In 8 bits it is the nearest, but never beyond the middle between two
    bfloat16s, so that the first half stays what it is."""
    if residual.dtype is dtype:
        return residual
    if dtype is torch.int16:
        return residual.to(torch.int16).mul_(UNIT)
    most = (1 << 15) - 1 - UNIT // 2  # more would be rounded to 128 units, which 8 bits have not
    return residual.clamp(max=most).add_(UNIT // 2).bitwise_right_shift_(8).to(torch.int8)


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Flat tensors of one length cut alike, `AT_ONCE` elements at a time."""
    return zip(*(tensor.split(AT_ONCE) for tensor in tensors), strict=True)


def halves_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors of a weight's two halves, which lie as it does. A weight in 16 bits is a whole master."""
    high = torch.empty_like(weight, dtype=torch.bfloat16, memory_format=torch.preserve_format)
    low = torch.empty_like(weight, dtype=torch.int16, memory_format=torch.preserve_format)
    for exact, first, second in pieces(flat(weight), flat(high), flat(low)):
        split(exact.to(torch.float32, copy=True), first, second)
    return high, low


@torch.no_grad()
def split_weights(model: Any) -> None:
    """Makes weights that train bfloat16, each with what that leaves of it as its attribute, and all other
    floating-point tensors of the model bfloat16 alone. What an architecture keeps in fp32 stays so."""
    stays = _kept_in_fp32(model)
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.dtype in (torch.float32, torch.float16) and name not in stays:
            weight.data, residual = halves_of(weight)
            setattr(weight, RESIDUAL, residual)
            setattr(weight, HAS_MASTER, True)
    as_they_are = {name: weight.data for name, weight in model.named_parameters() if name in stays}
    cast_weights(model, "bfloat16")
    for name, value in as_they_are.items():
        model.get_parameter(name).data = value
    model.register_load_state_dict_pre_hook(load_masters)


def _kept_in_fp32(model: Any) -> set[str]:
    """Names of weights that a model of transformers has in fp32 beside bfloat16, such as the bias of
    DeepSeek-V3's router (`_keep_in_fp32_modules_strict`)."""
    parts = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return {name for name, _ in model.named_parameters() if any(part in name for part in parts)}


def take_residual(weight: torch.Tensor) -> torch.Tensor | None:
    """The second half of a weight that no optimizer has yet; afterwards it is the caller's."""
    residual: torch.Tensor | None = vars(weight).pop(RESIDUAL, None)
    return residual


def load_masters(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before weights in 32 bits are loaded into a model whose weights are split: it gets their first halves,
    which torch's cast would round otherwise, and weights that no optimizer has yet their second ones."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if value is None or value.dtype is not torch.float32 or not getattr(weight, HAS_MASTER, False):
            continue
        state[prefix + name], residual = halves_of(value)
        if RESIDUAL in vars(weight):
            getattr(weight, RESIDUAL).copy_(residual)
