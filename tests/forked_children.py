"""Measured processes that are forked from the clean one, for tests that do not need a fresh interpreter.

Importing torch and transformers takes each measured process seconds. Here a fork does the work. The process
that `Child` starts and watches waits for the fork and ends with its exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clean_forks import forks_of
from snugfit.documents import read_document, write_document
from snugfit.measurement import child
from snugfit.measurement.process import Child

WAITS = """
import sys, time
from pathlib import Path
code = Path(sys.argv[1])
while not code.exists():
    time.sleep(0.01)
sys.exit(int(code.read_text()))
"""


def measures(request: str, result: str, code: str) -> int:
    """Measure in this process, as `snugfit.measurement.child` does in a process of its own."""
    found = child.run(read_document(Path(request)), Path(result).with_name("history.pickle"))
    write_document(Path(result), found.to_json())
    ended = int(found.outcome != "ok")
    Path(code).with_suffix(".part").write_text(str(ended))
    Path(code).with_suffix(".part").rename(code)
    return 0


@contextmanager
def forked_children(warm: str = "many_fits") -> Iterator[None]:
    """Fork each measured process from one in which the function `warm` of this module has run."""
    enter, end, forks = Child.__enter__, Child.__exit__, forks_of(warm)
    started: dict[int, int] = {}

    def enter_forked(self: Child) -> Child:
        request, result = self._command[-2:]
        code = str(Path(result).with_name("code"))
        started[id(self)] = forks.start(measures, request, result, code, environment=self._environment)
        self._command = [sys.executable, "-I", "-S", "-c", WAITS, code]
        return enter(self)

    def exit_forked(self: Child, *raised: object) -> None:
        end(self, *raised)  # type: ignore[arg-type]
        forks.ended(started.pop(id(self)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "__enter__", enter_forked)
        patch.setattr(Child, "__exit__", exit_forked)
        yield
