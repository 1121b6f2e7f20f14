"""The processes of one experiment, which end together.

Processes that exchange tensors wait for each other. When one of them dies, the rest would wait until NCCL's
own limit of ten minutes. Here the first bad exit ends all. The rest have a second to report their own failure
(all may have run out of memory), and are then killed. Some may fail only because of the first, for example
when a connection closes. So each process reports the time of its failure, and the earliest is the cause. A
process that was killed from outside reports nothing and counts as the earliest.

A sleeping thread waits for each process (`process.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from snugfit.measurement.process import Child, ChildExit

GRACE_SECONDS = 1.0
"""Seconds between the first bad exit and the kill of the rest. A choice."""


class Children:
    """Child processes that end together; a context manager that leaves no process behind."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._children = [
            Child(command, environment=environment)
            for command, environment in zip(commands, environments, strict=True)
        ]
        self._open = ExitStack()
        self._change = threading.Condition()
        self.failed: list[int] = []
        """The numbers of the children that failed by themselves, in the order of detection."""
        self._ended, self._killing = 0, False

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for child in self._children:
                opened.enter_context(child)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def owns(self, pid: int) -> bool:
        """Return True for a process in a session of one of the children."""
        return any(child.owns(pid) for child in self._children)

    def wait(self, deadline_seconds: float) -> list[ChildExit]:
        """Sleep until all have exited, one has failed, or the deadline has passed. No child is alive
        afterwards."""
        if len(self._children) == 1:
            return [self._children[0].wait(deadline_seconds)]
        with ThreadPoolExecutor(len(self._children)) as threads:
            waits = [
                threads.submit(self._wait_for, number, deadline_seconds)
                for number in range(len(self._children))
            ]
            try:
                return [wait.result() for wait in waits]
            except BaseException:  # Ctrl-C too: the threads must not continue to wait
                self._kill()
                raise

    def first_cause(self, failed_at: Callable[[int], float | None]) -> int | None:
        """Return the number of the child that failed first by `failed_at`; None without a failure."""
        return min(self.failed, key=lambda number: failed_at(number) or 0.0, default=None)

    def _wait_for(self, number: int, deadline_seconds: float) -> ChildExit:
        exited = self._children[number].wait(deadline_seconds)
        with self._change:
            killed = self._killing and exited.returncode < 0
            self._ended += 1
            self._change.notify_all()
            if exited.returncode == 0 or killed:
                return exited
            if not exited.timed_out:
                self.failed.append(number)
                self._change.wait_for(lambda: self._ended == len(self._children), GRACE_SECONDS)
        self._kill()
        return exited

    def _kill(self) -> None:
        with self._change:
            self._killing = True
        for child in self._children:
            child.kill()
