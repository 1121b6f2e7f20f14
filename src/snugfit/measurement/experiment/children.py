"""The processes of one experiment: they live together, and end together.

Processes that exchange tensors wait for each other, so when one of them dies the others would wait until
NCCL's own limit, which is ten minutes. Here the first that ends badly ends all: the others have a second to
say that they failed too (all may have run out of memory), and are killed. Others may fail because of the
first (a connection that closes), so each says when it failed, and the earliest is the cause; one that was
killed from outside could say nothing and comes first.

Each process is waited for by a thread of its own, which sleeps (`process.py`).
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
"""From the first that ends badly to the kill of the others: chosen."""


class Children:
    """Child processes that end together; a context manager that leaves nothing of them behind."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._children = [
            Child(command, environment=environment)
            for command, environment in zip(commands, environments, strict=True)
        ]
        self._open = ExitStack()
        self._change = threading.Condition()
        self.failed: list[int] = []
        """The numbers of those that ended badly by themselves, as they were noticed."""
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
        """Whether a process belongs to one of the children's sessions."""
        return any(child.owns(pid) for child in self._children)

    def wait(self, deadline_seconds: float) -> list[ChildExit]:
        """Sleeps until all have ended, one has ended badly, or the deadline has passed; then none lives."""
        if len(self._children) == 1:
            return [self._children[0].wait(deadline_seconds)]
        with ThreadPoolExecutor(len(self._children)) as threads:
            waits = [
                threads.submit(self._wait_for, number, deadline_seconds)
                for number in range(len(self._children))
            ]
            try:
                return [wait.result() for wait in waits]
            except BaseException:  # Ctrl-C too: the threads must not go on to wait
                self._kill()
                raise

    def first_cause(self, failed_at: Callable[[int], float | None]) -> int | None:
        """Which child's end is the cause of all, by when each says that it failed; None when none did."""
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
