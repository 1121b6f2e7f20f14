"""What a command does when nobody hears it any more: a terminal that is gone, a log on a full disk.

stderr tells how things go. A training of days does not end because its last reader did: what cannot be
written there is lost, and everything that matters stands in files. stdout holds what was asked for, so there
the command says that it could not be given, unless its reader went away by itself (`| head`).

A descriptor that was closed before we began (`2>&-`) is opened on nothing: the next file that the process
opens would get its number, and messages would be written into it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from snugfit.errors import SnugfitError


class Heard(io.TextIOWrapper):
    """stdout. Raises `BrokenPipeError` when its reader is gone, `SnugfitError` when it takes nothing."""

    def write(self, text: str) -> int:
        """All of it, or an error."""
        try:
            return super().write(text)
        except OSError as refusal:
            raise self._told(refusal) from None

    def flush(self) -> None:
        """The same."""
        try:
            super().flush()
        except OSError as refusal:
            raise self._told(refusal) from None

    def _told(self, refusal: OSError) -> Exception:
        forget(self)
        if isinstance(refusal, BrokenPipeError):
            return refusal
        return SnugfitError(f"What was asked for cannot be written: {refusal.strerror}.")


class Unheard(io.TextIOWrapper):
    """stderr, which goes on without a reader."""

    def write(self, text: str) -> int:
        """As far as anybody takes it."""
        try:
            return super().write(text)
        except OSError:
            forget(self)
            return len(text)

    def flush(self) -> None:
        """The same."""
        try:
            super().flush()
        except OSError:
            forget(self)


def forget(stream: TextIO) -> None:
    """Points it at nothing, so that no later flush complains."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def say_last(text: str) -> None:
    """Says on stdout how a command ended whose exit code tells it too, and which is not undone by a stdout
    that takes nothing."""
    try:
        print(text, flush=True)
    except (BrokenPipeError, SnugfitError):
        return


def open_all() -> None:
    """Makes the process's streams ones that can be written to, whatever they were given as."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest number that is free: this one
    sys.stdout = _as(Heard, 1, sys.stdout, "strict")
    sys.stderr = _as(Unheard, 2, sys.stderr, "backslashreplace")


def _as(kind: type[io.TextIOWrapper], number: int, before: TextIO | None, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    return kind(
        io.BufferedWriter(raw),
        encoding=before.encoding if before else "utf-8",
        errors=before.errors if before else errors,
        line_buffering=raw.isatty() or number == 2,
    )
