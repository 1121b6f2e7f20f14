"""What an operator does to values, as far as a rehearsal follows them (`shadows.py`).

A rehearsal computes small values beside its shapes, so it must know of each operator whether its result
follows from its operands' values, where it writes, and what needs no operand at all. Most of that stands in
the operator's schema and its tags.

Ordinary data is finite. So whether something is finite is known of any operand, and nobody needs to be told
that it was taken to be: `isfinite`, `isnan` and `isinf` are what a training loop checks by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

aten = torch.ops.aten


class Effect(Enum):
    """How an operator's result follows from values."""

    COMPUTES = "computes"
    """From its operands' values."""
    FILLS = "fills"
    """With a number that is given; no operand is read."""
    DRAWS = "draws"
    """By chance, as the device draws it."""
    WRITES = "writes"
    """It writes into its first operand, from the others."""
    WRITES_MANY = "writes many"
    """It writes into several tensors."""
    KEEPS = "keeps"
    """What it writes stays as it was while everything is finite: a gradient scaler's tensors."""


EMPTIES = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Operators whose new tensors are filled with nothing: they are written before they are read."""

FILLED: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros.default: lambda args: 0,
    aten.zeros_like.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten.ones.default: lambda args: 1,
    aten.ones_like.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
    aten.scalar_tensor.default: lambda args: args[0],
    **dict.fromkeys(EMPTIES, lambda args: 0),
}
"""What new tensors are filled with."""

OVERWRITES = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default})
"""Operators after which nothing is left of what they write into."""

BY_MASKS = frozenset(
    {
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
    }
)
"""Operators that may be given masks in the place of indices."""

DISTINCT = frozenset(
    {
        aten._unique.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.unique_dim.default,
        aten.unique_dim_consecutive.default,
    }
)
"""Operators that leave out what is there already."""

SHAPED_BY_DATA = DISTINCT | {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._ctc_loss.Tensor,
}
"""Operators whose results' shapes depend on their operands' values."""

ASKING = frozenset(
    {aten._local_scalar_dense.default, aten.equal.default, aten._to_copy.default, aten.copy_.default}
)
"""Operators by which the host asks for values, the copies among them where they leave the device."""

_KEEPING = frozenset(
    {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_", "aten::set_"}
)


def effect_of(func: Any) -> Effect:
    """From the operator's schema and tags."""
    if func in FILLED:
        return Effect.FILLS
    schema = func._schema
    if schema.name in _KEEPING:
        return Effect.KEEPS
    aliases = [argument.alias_info for argument in schema.arguments]
    written = [alias is not None and alias.is_write for alias in aliases]
    if any(written):
        only_first = written[0] and not any(written[1:]) and str(schema.arguments[0].type) == "Tensor"
        draws = torch.Tag.nondeterministic_seeded in func.tags
        return Effect.WRITES if only_first and not draws else Effect.WRITES_MANY
    return Effect.DRAWS if torch.Tag.nondeterministic_seeded in func.tags else Effect.COMPUTES


_FINITE: dict[Any, bool] = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isposinf.default: False,
    aten.isneginf.default: False,
}


def finite_check(func: Any, args: tuple[Any, ...]) -> bool | None:
    """What this operator gives for operands that are finite; None where it does not ask that. `isfinite` is
    composed of `x == x` and `abs(x) != inf`."""
    if func in _FINITE:
        return _FINITE[func]
    if func in (aten.ne.Tensor, aten.eq.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.ne.Scalar, aten.eq.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
        return bool(func is aten.ne.Scalar)
    return None
