"""Output streams that keep working without a reader, such as a closed terminal or a log on a full disk.

stderr has progress and messages. A training of days does not end when they have no reader. Text that cannot
be written there is lost, and everything important is in files. stdout has the answer, so a failed write there
ends the command with an error. The exception is a reader that went away by itself (`| head`).

A descriptor that was closed before the start (`2>&-`) is opened on /dev/null. Otherwise the next file that
the process opens would get its number, and messages would be written into it.

DeepSpeed logs to stdout. accelerate and the HF Trainer import it where it is installed. Its messages would
precede an answer and break its JSON, so they go to stderr.

An encoding without the letters of a report (`LC_ALL=C`) gets similar ones: `4 x 512` for `4 × 512`.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import sys
from typing import TextIO

from snugfit.errors import SnugfitError, escape_controls

SIMILAR_LETTERS = {"×": "x", "→": "->", "·": "-", "–": "-", "—": "-", "…": "...", "’": "'", "µ": "u"}
"""ASCII replacements of characters that the output's encoding lacks, apart from those of tables and curves.
"""

SIMILAR = "snugfit.similar"
"""Name of the codec error handler that uses `SIMILAR_LETTERS`."""


_UNDECODED = re.compile("[\udc80-\udcff]+")


def similar_letters(fault: UnicodeError) -> tuple[str | bytes, int]:
    """Return similar ASCII letters for one that cannot be encoded, and the position after it.

    Surrogates are bytes of a path that Python did not decode. They are returned as bytes if these are UTF-8.
    """
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    letters = fault.object[fault.start : fault.end]
    undecoded = _UNDECODED.match(letters)
    if undecoded is None:
        return _similar(letters[0]), fault.start + 1
    path, end = undecoded[0].encode("ascii", "surrogateescape"), fault.start + undecoded.end()
    try:
        path.decode("utf-8")
    except UnicodeDecodeError:
        return path.decode("ascii", "backslashreplace"), end
    return path, end


def _similar(letter: str) -> str:
    if "\N{BOX DRAWINGS LIGHT HORIZONTAL}" <= letter < "\N{UPPER HALF BLOCK}":
        return "|" if letter in "│┃║" else "-"
    if "\N{UPPER HALF BLOCK}" <= letter <= "\N{QUADRANT UPPER RIGHT AND LOWER LEFT AND LOWER RIGHT}":
        return "#"
    return SIMILAR_LETTERS.get(letter) or letter.encode("ascii", "backslashreplace").decode()


codecs.register_error(SIMILAR, similar_letters)


class StandardOutput(io.TextIOWrapper):
    """The stdout stream. Raises `BrokenPipeError` when its reader is gone, and `SnugfitError` when a write
    fails.
    """

    def write(self, text: str) -> int:
        """Write all of `text` and return its length."""
        try:
            return super().write(text)
        except OSError as refusal:
            self._give_up(refusal)
            return len(text)

    def flush(self) -> None:
        """Write the buffered text to the descriptor."""
        try:
            super().flush()
        except OSError as refusal:
            self._give_up(refusal)

    def _give_up(self, refusal: OSError) -> None:
        redirect_to_null(self)
        if isinstance(refusal, BrokenPipeError):
            raise refusal from None
        raise SnugfitError(
            f"The output cannot be written: {refusal.strerror}. Free space, or write it elsewhere."
        ) from None


class StandardError(StandardOutput):
    """The stderr stream, which continues without a reader: text that cannot be written there is lost."""

    def _give_up(self, refusal: OSError) -> None:
        redirect_to_null(self)


def redirect_to_null(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null, so that no later flush fails."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


class _ToStderr(logging.Filter):
    """Writes a logger's messages to stderr, and keeps them from its own handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Print a logging record on stderr, and return False so that its own handlers skip it.

        DeepSpeed's message about the accelerator that it found is dropped: snugfit chooses the GPU of a step.
        """
        if record.filename != "real_accelerator.py":
            print(escape_controls(f"{record.name}: {record.getMessage()}"), file=sys.stderr)
        return False


_TO_STDERR = _ToStderr()


def keep_libraries_off_stdout() -> None:
    """Redirect DeepSpeed's log messages to stderr from now on."""
    logging.getLogger("DeepSpeed").addFilter(_TO_STDERR)


def print_outcome(text: str) -> None:
    """Print the outcome of a command. A failed write is ignored, because the exit code reports the outcome
    too.
    """
    try:
        print(escape_controls(text), flush=True)
    except (BrokenPipeError, SnugfitError):
        return


def open_all() -> None:
    """Replace the process's standard streams by ones that accept writes, even if their descriptors are
    closed.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number, which is this one
    sys.stdout = _reopen(StandardOutput, 1, sys.stdout)
    sys.stderr = _reopen(StandardError, 2, sys.stderr)


def _reopen(kind: type[io.TextIOWrapper], number: int, before: TextIO | None) -> io.TextIOWrapper:
    # The descriptor belongs to the process, so closing this object must not close it.
    raw = io.FileIO(number, "w", closefd=False)
    return kind(
        io.BufferedWriter(raw),
        encoding=before.encoding if before else "utf-8",
        errors=SIMILAR,
        # Each message is flushed at once, even if stderr is a log file.
        line_buffering=raw.isatty() or number == 2,
    )
