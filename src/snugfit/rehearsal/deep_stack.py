"""A stack that holds the end of a deep model's graph.

Each autograd node that Python has seen owns a Python object, and a rehearsal sees each node that runs, to
find its module (`record/module_tracker.py`). torch deletes a chain of such nodes by recursion, some 10 KB of
the stack for each layer: with the usual 8 MiB the process ends in a segmentation fault after some hundred
layers (torch 2.13). So deep models are rehearsed in a thread whose stack is larger. Its pages are taken as
they are used.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from snugfit.job.config import LAYERS
from snugfit.job.job import Job

DEEP_LAYERS = 200
"""From which on the usual stack may not do. A choice."""

STACK_BYTES = 1 << 30
"""Address space: for fifty times the 1,000 layers that a config may have."""

Answer = TypeVar("Answer")


def is_deep(job: Job) -> bool:
    """Return True where a config counts so many layers."""
    counts = [job.model.config.get(key) for key in LAYERS]
    return any(type(count) is int and count >= DEEP_LAYERS for count in counts)


def run_on_deep_stack(work: Callable[[], Answer]) -> Answer:
    """Return what `work` returns, in a thread of its own. Raise what it raises."""
    answers: list[Answer] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as fault:
            faults.append(fault)

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if faults:
        raise faults[0]
    return answers[0]
