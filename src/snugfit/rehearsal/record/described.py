"""What kernels do, remembered: the same operator on the same shapes does the same.

A description (`kernels.py`) goes through every operand and asks torch's own formulas for FLOPs, which takes
longer than the rest of what is written down about an operator. Layers, micro-batches and recipes repeat, so
nearly every one has been described before. It depends on nothing but the operands' metadata and settings, as
shapes do (`shape_cache.py`), and for products on the precision that is in force.
"""

from __future__ import annotations

from typing import Any

import torch

from snugfit.rehearsal.record.kernels import PRODUCTS, Description, describe
from snugfit.rehearsal.record.shape_cache import Operator

MOST = 200_000
"""Descriptions remembered at most, at some hundred bytes each."""

_KNOWN: dict[Any, tuple[Description | None]] = {}


def described(
    known: Operator, key: int | None, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Description | None:
    """As `describe` says it of a call with this key."""
    if known.is_view:
        return None
    if key is None:
        return describe(known.func, args, kwargs, out)
    call = id(known.func), key, _precision() if _may_be_tf32(known, args) else None
    told = _KNOWN.get(call)
    if told is None:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        told = _KNOWN[call] = (describe(known.func, args, kwargs, out),)
    return told[0]


def _may_be_tf32(known: Operator, args: tuple[Any, ...]) -> bool:
    return known.name in PRODUCTS and getattr(args[0], "dtype", None) is torch.float32


def _precision() -> Any:
    """What products of fp32 operands are computed in."""
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
