"""A process of the loader that is gone: torch says no more of it than an error of Python's, from a signal
handler, wherever the main thread is at that moment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from snugfit.errors import OutOfMemory, SnugfitError

_TOLD = re.compile(r"DataLoader worker \(pid(?:\(s\))? [0-9, ]+\) (?:is killed by |exited )([^.]*)")
"""torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py."""


@contextmanager
def deaths_told() -> Iterator[None]:
    """Raises `SnugfitError` for a worker that died in here; `OutOfMemory` where it looks like that."""
    try:
        yield
    except RuntimeError as fault:
        death = _TOLD.match(str(fault.__cause__ or fault))
        if death is None:
            raise
        text = f"A process of the loader is gone ({death[1]}). Started again, the run goes on."
        if "signal: Killed" not in death[1]:
            raise SnugfitError(text) from None
        raise OutOfMemory(
            f"{text} The system kills so when the machine's memory runs out: fewer `workers` take less."
        ) from None
