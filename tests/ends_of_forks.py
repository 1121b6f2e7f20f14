"""Waiting for a condition, and the end of a forked process."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from clean_forks import Forks

compiles = pytest.mark.skipif(
    not shutil.which("g++") or not shutil.which("ninja"), reason="needs g++ and ninja"
)


def end(of: Callable[[], Forks], pid: int) -> None:
    """Kill this fork unless it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    of().ended(pid)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until the condition holds. Fail after this many seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
