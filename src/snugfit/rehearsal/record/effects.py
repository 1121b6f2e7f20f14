"""Classify operators by their effect on tensor values, for values tracked on the CPU (`shadows.py`).

A simulation computes some small tensors' values in addition to shapes. For each operator it needs the written
tensors, and the dependence of the result on the operands' values. Most of this follows from the operator's
schema and its tags.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

aten = torch.ops.aten


class Effect(Enum):
    """The way in which an operator sets tracked values of tensors: it computes, fills, draws or
    writes them.
    """

    COMPUTES = "computes"
    """Result that is computed from the operands' values."""
    FILLS = "fills"
    """Result that is filled with a given number; no operand is read."""
    DRAWS = "draws"
    """Result that is drawn at random on the device."""
    WRITES = "writes"
    """The operator writes its first operand, from the other operands."""
    WRITES_MANY = "writes many"
    """The operator writes several tensors."""
    KEEPS = "keeps"
    """The operator leaves tensors unchanged if all gradients are finite, as a gradient scaler's operators do.
    """


UNINITIALIZED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Operators that return uninitialized tensors. Other operators write these before any reads them."""

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
    **dict.fromkeys(UNINITIALIZED, lambda args: 0),
}
"""Operators that create filled tensors, each with a function that returns the fill value from the arguments.
"""

OVERWRITES = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default})
"""Operators that overwrite every element of their first operand."""

MASK_INDEXING = frozenset(
    {
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
    }
)
"""Indexing operators that accept boolean masks as indices."""

DISTINCT = frozenset(
    {
        aten._unique.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.unique_dim.default,
        aten.unique_dim_consecutive.default,
    }
)
"""Operators that remove duplicate values, such as `unique`."""

SHAPED_BY_DATA = DISTINCT | {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._ctc_loss.Tensor,
}
"""Operators whose output shapes depend on the values of their operands."""

VALUE_READS = frozenset(
    {aten._local_scalar_dense.default, aten.equal.default, aten._to_copy.default, aten.copy_.default}
)
"""Operators through which the host reads values of tensors. Copies count only if their target is on the host.
"""

# A gradient scaler divides by a scale and checks for infinity: finite values leave its flags unchanged.
_IN_PLACE_RESULTS = frozenset(
    {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_", "aten::set_"}
)


def effect_of(func: Any) -> Effect:
    """Return the way in which an operator sets tracked values, from its schema and tags."""
    if func in FILLED:
        return Effect.FILLS
    schema = func._schema
    if schema.name in _IN_PLACE_RESULTS:
        return Effect.KEEPS
    aliases = [argument.alias_info for argument in schema.arguments]
    written = [alias is not None and alias.is_write for alias in aliases]
    if any(written):
        # A list as the first operand, as in foreach operators, contains several written tensors.
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
    """Return the result of a finiteness check on finite operands, or None for other operators.

    `isfinite` is composed of `x == x` and `abs(x) != inf`.
    """
    # Ordinary data is finite, so these results are known for any operand. Training loops use them for checks.
    if func in _FINITE:
        return _FINITE[func]
    # A comparison of a tensor with itself is a check for NaN.
    if func in (aten.ne.Tensor, aten.eq.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.ne.Scalar, aten.eq.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
        return bool(func is aten.ne.Scalar)
    return None
