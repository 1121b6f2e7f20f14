"""The journal of a run: one JSON object per line, appended as things happen.

    {"event": "step", "step": 31, "loss": 0.4127, "norm": 1.93, ...}

A run that was resumed goes on in the same file: steps that were lost and taken again stand there twice, and
the later line counts. Whoever watches the run (a progress bar, a test) hears the same events.

Training does not end because its journal cannot be written: a full disk is one warning, and what came after
it is missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from snugfit.errors import UsageError

Event = dict[str, Any]
"""`event` is its kind; `train.py` says which there are and what they hold."""

JOURNAL = "journal.jsonl"


def open_journal(path: Path) -> BinaryIO:
    """Open the file to append to it and to read its end. A link is refused: it may lead to any file of the
    user's, in a folder that somebody else may have filled."""
    return open(path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


class Journal:
    """Writes a run's events, and passes them on to whoever watches; of a run without a folder it writes
    nothing."""

    def __init__(self, folder: Path | None, *watchers: Callable[[Event], None]) -> None:
        for watch in watchers:
            if not callable(watch):
                raise UsageError(f"watch is {watch!r}; it must be a function that takes an event, a dict.")
        self._path, self._watchers = folder and folder / JOURNAL, watchers
        self._begun = self._broken = False
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def writing_to(self, folder: Path) -> Iterator[None]:
        """Within it the events are written into this folder too."""
        self._path, self._begun, self._broken = folder / JOURNAL, False, False
        try:
            yield
        finally:
            self._path = None

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Writes an event of this kind, now, and passes it on."""
        event: Event = {"event": kind, **fields}
        self._append(event)
        self._pass_on(event)

    def warn_once(self, text: str) -> bool:
        """Tells a warning the first time that it is given; says whether `text` is one at all."""
        if text and text not in self._warned:
            self._warned.add(text)
            self.tell("warning", text=text)
        return bool(text)

    def _pass_on(self, event: Event) -> None:
        for watch in self._watchers:
            watch(event)

    def _append(self, event: Event) -> None:
        if self._path is None or self._broken:
            return
        try:
            with open_journal(self._path) as file:
                if not self._begun and file.tell():  # a process that was killed may have left half a line
                    file.seek(-1, os.SEEK_END)
                    file.write(b"" if file.read() == b"\n" else b"\n")
                file.write(json.dumps(_strict(event), default=str, allow_nan=False).encode() + b"\n")
                self._begun = True
        except OSError as refusal:
            self._broken = True
            is_link = refusal.errno == errno.ELOOP
            reason = "it is a symbolic link, which is not followed" if is_link else refusal.strerror
            text = f"{self._path} cannot be written ({reason}). The run continues without it."
            self._pass_on({"event": "warning", "text": text})


def _strict(event: Event) -> Event:
    """NaN and infinities as words, for JSON has no such numbers."""
    return {
        key: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in event.items()
    }


def read_journal(folder: Path) -> Iterator[Event]:
    """The events of a run, in the order in which they were written; a line that was cut off
    or damaged is left out. Raises `FileNotFoundError` where no run was."""
    with open(folder / JOURNAL, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
