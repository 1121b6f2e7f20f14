"""A file system that dies at event n: crashes of a process at any call, within one process."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable

import pytest

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "open", "write", "fsync")
"""What of `os` changes a file system, or begins to."""


def watch(patch: pytest.MonkeyPatch, meet: Callable[[Callable[[], object], str], object]) -> None:
    """Every call that changes the file system goes through `meet`, which gets the call and its name."""

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
    """The end of a process, as far as this one can have it."""


def dies(act: Callable[[], object], *, at: int) -> bool:
    """Run `act` in a process that seems to die at its point number `at`; return whether it did.

    A point is before a call, which is after the one before it, and after each opening, because the process
    may keep what is written next. From then on the file system does nothing: each call raises, and an open
    file, whose buffer and lock die with its process, leads to /dev/null. Nothing is truly synced: the kernel
    lives on, and another test covers the contents of a disk.
    """
    return points(act, at) == at


def points(act: Callable[[], object], at: int = 0) -> int:
    """Return the number of points of `act`; it dies at point number `at`."""
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
