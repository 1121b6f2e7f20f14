"""The processes of one experiment: they live together, and end together.

Processes that exchange tensors wait for each other, so when one of them dies the others would wait until
NCCL's own limit, which is ten minutes. Here the first that ends badly ends all: the others are killed at
once. Its end is the cause. Others may fail in the same instant because of it (a connection that closes), so
each says when it failed, and the earliest counts; one that was killed could say nothing and comes first.

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


class Children:
    """Child processes that end together; a context manager that leaves nothing of them behind."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._children = [
            Child(command, environment=environment)
            for command, environment in zip(commands, environments, strict=True)
        ]
        self._open = ExitStack()
        self._lock = threading.Lock()
        self.failed: list[int] = []
        """The numbers of those that ended badly by themselves, as they were noticed."""
        self._ending = False

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
        with self._lock:
            by_itself = not self._ending or exited.returncode > 0
            if exited.returncode and by_itself and not exited.timed_out:
                self.failed.append(number)
                self._ending = True
        if exited.returncode and by_itself:
            self._kill()
        return exited

    def _kill(self) -> None:
        with self._lock:
            self._ending = True
        for child in self._children:
            child.kill()
