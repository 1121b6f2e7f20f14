"""Headroom: bytes of a GPU's memory that a plan leaves free.

A recipe whose prediction leaves a few MiB may still run out of memory. So a plan leaves 2 % of the GPU's
memory by default. On a GPU whose CUDA context was not measured, the context's possible error is added. On a
GeForce, which mostly drives a display as well, half a GiB is added. An amount of memory that the user names
is used in full, unless a headroom is requested.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.prediction.device import CONTEXT_ERROR
from snugfit.units import GIB, parse_bytes, show_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu

USUAL_SHARE = 0.02
"""Default headroom (memory that should stay free) as a share of the GPU's memory (chosen). Reserved bytes
were predicted within 1 % for nearly all randomly drawn runs (docs/accuracy.md). A model's own code may keep a
tensor that no simulation recorded.
"""

DISPLAY_BYTES = GIB // 2
"""Bytes of GPU memory that a desktop and its windows take if the GPU drives a display (chosen)."""

_PER_CENT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")


def headroom_of(
    requested: int | str | None,
    gpu: Gpu | None,
    memory_bytes: int | None = None,
    *,
    one_of_many: bool = False,
) -> int:
    """Return the bytes to leave free of `memory_bytes`, or of the GPU's memory if that is None.

    `requested` is in bytes or text (`1GiB`, `2%`); None is the default headroom. Raises `UsageError` for
    other values. A headroom of all the memory is an error too. It is allowed for a GPU that is `one_of_many`,
    since others may have more.
    """
    if requested is None:
        # An amount that the user names is used in full, unless a headroom is requested.
        return usual_headroom(gpu) if memory_bytes is None else 0
    limit = gpu.memory_bytes if memory_bytes is None and gpu else memory_bytes
    headroom = _as_bytes(requested, limit)
    if limit is not None and headroom >= limit and not one_of_many:
        raise UsageError(f"headroom: {requested!r} leaves nothing of {show_bytes(limit)} to use. Try 2%.")
    return headroom


def usual_headroom(gpu: Gpu | None) -> int:
    """Return the default bytes that a prediction or plan for this GPU leaves free; 0 if its memory is
    unknown.
    """
    if gpu is None or gpu.memory_bytes is None:
        return 0
    doubt = CONTEXT_ERROR if gpu.context_bytes is None else 0
    return int(USUAL_SHARE * gpu.memory_bytes) + doubt + (DISPLAY_BYTES if may_drive_display(gpu) else 0)


def at_most(needed_bytes: float, gpu: Gpu) -> int:
    """Return `needed_bytes`, but at most this GPU's memory minus its default headroom."""
    if gpu.memory_bytes is None:
        return int(needed_bytes)
    return min(int(needed_bytes), gpu.memory_bytes - usual_headroom(gpu))


def may_drive_display(gpu: Gpu) -> bool:
    """Return True if the GPU may drive a display: if the driver's name for it contains GeForce."""
    # Gaming cards often drive a desktop, whose windows take memory too.
    return any("geforce" in name.lower() for name in gpu.names)


def _as_bytes(amount: int | str, limit: int | None) -> int:
    if isinstance(amount, str):
        if match := _PER_CENT.fullmatch(amount):
            if limit is None:
                raise UsageError(
                    f"headroom: {amount!r} is a share of the memory, so name a GPU or an amount of memory."
                )
            share = float(match[1]) / 100
            if share >= 1:  # valid for any memory size of other GPUs
                raise UsageError(f"headroom: {amount!r} leaves nothing of the memory to use. Try 2%.")
            return int(share * limit)
        return (
            0
            if amount.strip() == "0"
            else parse_bytes(amount, quantity="headroom", alternative=", or a share: 2%")
        )
    if type(amount) is not int or amount < 0:
        raise UsageError(
            f"headroom is {amount!r}; it must be a whole number of bytes from 0, text such as '2%', or None."
        )
    return amount
