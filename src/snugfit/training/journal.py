"""The journal of a run: a file with one JSON object per event, appended as events happen.

{"event": "step", "step": 31, "loss": 0.4127, "norm": 1.93, ...}

A resumed run appends to the same file. Steps that were lost and repeated are in it twice, and the later line
counts. Watchers of the run (such as a progress bar) receive the same events.

A journal that cannot be written does not end the training. A full disk gives one warning, and later events
are missing from the file.
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
"""The type of an entry in the journal: a dict whose key `event` is its kind. `train.py` lists the kinds and
their fields."""

JOURNAL = "journal.jsonl"


def open_journal(path: Path) -> BinaryIO:
    """Open a run's journal file for appending and for reading its end.

    A symbolic link is refused: in a folder with files of another user it may lead to any file of this one.
    """
    return open(path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


class Journal:
    """A writer of a run's events that also passes them to watchers; without a folder it writes no file."""

    def __init__(self, folder: Path | None, *watchers: Callable[[Event], None]) -> None:
        for watch in watchers:
            if not callable(watch):
                raise UsageError(f"watch is {watch!r}; it must be a function that takes an event, a dict.")
        self._path, self._watchers = folder and folder / JOURNAL, watchers
        self._begun = self._broken = False
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def writing_to(self, folder: Path) -> Iterator[None]:
        """Context in which the journal's events are also written to a file in this folder."""
        self._path, self._begun, self._broken = folder / JOURNAL, False, False
        try:
            yield
        finally:
            self._path = None

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Write an event of the type `kind` into the journal, and pass it to the watchers."""
        event: Event = {"event": kind, **fields}
        self._append(event)
        self._pass_on(event)

    def warn_once(self, text: str) -> bool:
        """Write a warning into the journal unless it was written before; return False for an empty `text`."""
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
                if not self._begun and file.tell():  # a killed process may have left an incomplete line
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
    """Return the event with NaN and infinities as text, because strict JSON has no such numbers."""
    return {
        key: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in event.items()
    }


def read_journal(folder: Path) -> Iterator[Event]:
    """Yield the events of a run in the order of writing, without truncated or damaged lines.

    Raises `FileNotFoundError` if the folder has no journal.
    """
    with open(folder / JOURNAL, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
