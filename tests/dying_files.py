"""A file system that fails at event n: simulates a crash of the process at any call, within one process."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable

import pytest

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "open", "write", "fsync")
"""Functions of `os` that change a file system, or start to."""


def watch(patch: pytest.MonkeyPatch, meet: Callable[[Callable[[], object], str], object]) -> None:
    """Pass every call that changes the file system to `meet`, with the name of the call."""

    def through(real: Callable[..., object], name: str) -> Callable[..., object]:
        return lambda *args, **named: meet(lambda: real(*args, **named), name)

    def opening(file: object, mode: str = "r", *args: object, **named: object) -> object:
        def real() -> object:
            return io_open(file, mode, *args, **named)  # type: ignore[call-overload]

        return real() if set(mode) <= set("rbt") else meet(real, "open")

    io_open = io.open
    for name in CALLS:
        patch.setattr(os, name, through(getattr(os, name), name))
    patch.setattr(io, "open", opening)
    patch.setattr(builtins, "open", opening)


class Dead(BaseException):
    """Simulated end of the process."""


def dies(act: Callable[[], object], *, at: int) -> bool:
    """Run `act` in a process that appears to die at its point number `at`; return true if it did.

    A point precedes each call, and so follows the one before it. A point also follows each opening, because
    the process may save its next bytes. After the death the file system does nothing: each call raises. An
    open file, whose buffer and lock end with its process, is redirected to /dev/null. Nothing is truly
    synced, because the kernel lives on. Another test covers the contents of a disk.
    """
    return points(act, at) == at


def points(act: Callable[[], object], at: int = 0) -> int:
    """Return the number of points of `act`; the run dies at point number `at`."""
    passed = 0
    opened: dict[int, int] = {}

    def die() -> None:
        nonlocal passed
        if passed != at or not at:
            passed += 1
        if passed != at:
            return
        nothing = os_open(os.devnull, os.O_WRONLY)
        for descriptor, file in opened.items():
            if inode_of(descriptor) == file:
                os.dup2(nothing, descriptor)
        os.close(nothing)
        opened.clear()
        raise Dead

    def meet(real: Callable[[], object], name: str) -> object:
        die()
        answer = None if name == "fsync" else real()
        if name == "open":
            descriptor: int = answer if isinstance(answer, int) else answer.fileno()  # type: ignore[attr-defined]
            opened[descriptor] = inode_of(descriptor)
            die()
        return answer

    def inode_of(descriptor: int) -> int:
        try:
            return os.fstat(descriptor).st_ino
        except OSError:
            return 0

    os_open = os.open
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Dead):
        watch(patch, meet)
        act()
    return passed
