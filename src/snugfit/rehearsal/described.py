"""What kernels do, remembered: the same operator on the same shapes does the same.

A description (`kernels.py`) goes through every operand and asks torch's own formulas for FLOPs, which takes
longer than the rest of what is written down about an operator. Layers, micro-batches and recipes repeat, so
nearly every one has been described before. It depends on nothing but the operands' metadata and settings, as
shapes do (`memo.py`), and for products on the precision that is in force.
"""

from __future__ import annotations

from typing import Any

from snugfit.rehearsal.kernels import PRODUCTS, Description, describe
from snugfit.rehearsal.memo import NotAKey, key_of

MOST = 200_000
"""Descriptions remembered at most, at some hundred bytes each."""

_KNOWN: dict[Any, Description | None] = {}


def described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Description | None:
    """As `describe` says it."""
    if func.is_view:
        return None
    try:
        key = func, key_of(args, kwargs), _precision(func)
    except NotAKey:
        return describe(func, args, kwargs, out)
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[key] = describe(func, args, kwargs, out)
    return _KNOWN[key]


def _precision(func: Any) -> Any:
    """What products of fp32 operands are computed in; nothing for other operators."""
    import torch

    if func._schema.name not in PRODUCTS:
        return None
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
