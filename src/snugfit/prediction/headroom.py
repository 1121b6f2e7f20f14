"""How much of a GPU's memory an answer leaves free.

A recipe that fits by a few MiB fits on paper. So a plan leaves 2 % of the GPU's memory by default; where a
doubt about the bytes has a size (a context that nobody measured), that much more; and on a GeForce, which
mostly drives a display as well, half a GiB. An amount of memory that the user names is theirs to divide:
nothing is taken off it unless a headroom is asked for.
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
"""Of the GPU's memory (chosen): reserved bytes were predicted within 1 % of nearly all drawn runs
(docs/accuracy.md), and a model's own code may keep a tensor that no rehearsal saw."""

DISPLAY_BYTES = GIB // 2
"""What a desktop and its windows take (chosen)."""

_PER_CENT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")


def headroom_of(
    asked: int | str | None, gpu: Gpu | None, memory_bytes: int | None = None, *, one_of_many: bool = False
) -> int:
    """Bytes to leave free of `memory_bytes`, or where none were named, of the GPU's: what is `asked`, in
    bytes or as text (`1GiB`, `2%`), or the usual. Raises `UsageError` for what is no headroom, and for all of
    the memory, unless the GPU is `one_of_many`, of which others have more."""
    if asked is None:
        return usual_headroom(gpu) if memory_bytes is None else 0
    limit = gpu.memory_bytes if memory_bytes is None and gpu else memory_bytes
    headroom = _as_bytes(asked, limit)
    if limit is not None and headroom >= limit and not one_of_many:
        raise UsageError(f"headroom: {asked!r} leaves nothing of {show_bytes(limit)} to use. Try 2%.")
    return headroom


def usual_headroom(gpu: Gpu | None) -> int:
    """Bytes that an answer for this GPU leaves free unless it is asked otherwise; 0 where no memory is
    known."""
    if gpu is None or gpu.memory_bytes is None:
        return 0
    doubt = CONTEXT_ERROR if gpu.context_bytes is None else 0
    return int(USUAL_SHARE * gpu.memory_bytes) + doubt + (DISPLAY_BYTES if may_drive_display(gpu) else 0)


def at_most(needed_bytes: float, gpu: Gpu) -> int:
    """So many bytes, but no more than this GPU has beside its usual headroom."""
    if gpu.memory_bytes is None:
        return int(needed_bytes)
    return min(int(needed_bytes), gpu.memory_bytes - usual_headroom(gpu))


def may_drive_display(gpu: Gpu) -> bool:
    """Whether the driver calls it a GeForce: a card that people have in the machine they sit at."""
    return any("geforce" in name.lower() for name in gpu.names)


def _as_bytes(asked: int | str, limit: int | None) -> int:
    if isinstance(asked, str):
        if match := _PER_CENT.fullmatch(asked):
            if limit is None:
                raise UsageError(
                    f"headroom: {asked!r} is a share of the memory, so name a GPU or an amount of memory."
                )
            share = float(match[1]) / 100
            if share >= 1:  # whatever the memory of other GPUs is
                raise UsageError(f"headroom: {asked!r} leaves nothing of {show_bytes(limit)} to use. Try 2%.")
            return int(share * limit)
        return 0 if asked.strip() == "0" else parse_bytes(asked, what="headroom", or_else=", or a share: 2%")
    if type(asked) is not int or asked < 0:
        raise UsageError(
            f"headroom is {asked!r}; it must be a whole number of bytes from 0, text such as '2%', or None."
        )
    return asked
