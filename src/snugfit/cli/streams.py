"""stdout and stderr that survive a reader who has gone: a closed terminal, a log on a full disk.

stderr holds progress and messages. A training of days does not end because nobody reads them: what cannot be
written there is lost, and everything that matters stands in files. stdout holds the answer, so there the
command fails when it cannot be written, unless its reader went away by itself (`| head`).

A descriptor that was closed before we began (`2>&-`) is opened on /dev/null: the next file that the process
opens would get its number, and messages would be written into it.

DeepSpeed logs to stdout. accelerate and the HF Trainer import it where it is installed, so its messages would
stand before an answer and break its JSON: they go to stderr.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TextIO

from snugfit.errors import SnugfitError, escape_controls


class StandardOutput(io.TextIOWrapper):
    """stdout. Raises `BrokenPipeError` when its reader is gone, `SnugfitError` when it takes nothing."""

    def write(self, text: str) -> int:
        """Writes all of `text`; gives its length."""
        try:
            return super().write(text)
        except OSError as refusal:
            self._give_up(refusal)
            return len(text)

    def flush(self) -> None:
        """Writes what is buffered."""
        try:
            super().flush()
        except OSError as refusal:
            self._give_up(refusal)

    def _give_up(self, refusal: OSError) -> None:
        forget(self)
        if isinstance(refusal, BrokenPipeError):
            raise refusal from None
        raise SnugfitError(f"The output cannot be written: {refusal.strerror}.") from None


class StandardError(StandardOutput):
    """stderr, which goes on without a reader: what cannot be written there is lost."""

    def _give_up(self, refusal: OSError) -> None:
        forget(self)


def forget(stream: TextIO) -> None:
    """Points the stream at /dev/null, so that no later flush fails."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


class _ToStderr(logging.Filter):
    """Writes a logger's messages to stderr, and keeps them from its own handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always False. What DeepSpeed says of the accelerator that it found is left out: snugfit tells it
        which GPU a step is for."""
        if record.filename != "real_accelerator.py":
            print(escape_controls(f"{record.name}: {record.getMessage()}"), file=sys.stderr)
        return False


_TO_STDERR = _ToStderr()


def keep_libraries_off_stdout() -> None:
    """From here on, what DeepSpeed logs goes to stderr."""
    logging.getLogger("DeepSpeed").addFilter(_TO_STDERR)


def say_last(text: str) -> None:
    """Prints how a command ended; a stdout that takes nothing is ignored, because the exit code says it
    too."""
    try:
        print(escape_controls(text), flush=True)
    except (BrokenPipeError, SnugfitError):
        return


def open_all() -> None:
    """Replaces the process's streams by ones that can be written to, whatever they were opened on."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest number that is free: this one
    sys.stdout = _reopen(StandardOutput, 1, sys.stdout, "strict")
    sys.stderr = _reopen(StandardError, 2, sys.stderr, "backslashreplace")


def _reopen(
    kind: type[io.TextIOWrapper], number: int, before: TextIO | None, errors: str
) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    return kind(
        io.BufferedWriter(raw),
        encoding=before.encoding if before else "utf-8",
        errors=before.errors if before else errors,
        line_buffering=raw.isatty() or number == 2,
    )
