"""Run a simulation in a thread whose stack is large enough to delete the autograd graph of a deep model.

Each autograd node that Python has accessed owns a Python object. A simulation accesses every node that runs,
to find its module (`record/module_tracker.py`). torch deletes a chain of such nodes by recursion, with some
10 KB of stack per layer. The usual stack of 8 MiB overflows after some hundred layers, and the process ends
with a segmentation fault (torch 2.13).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from snugfit.job.config import LAYERS
from snugfit.job.job import Job

DEEP_LAYERS = 200
"""Number of a model's layers from which the simulation's thread gets a larger call stack (chosen)."""

# The system allocates the pages of a stack at their first use, so a large stack costs only addresses.
STACK_BYTES = 1 << 30
"""Size in bytes of address space of the thread's call stack. It suffices for fifty times the 1,000 layers
that a config may have.
"""

Answer = TypeVar("Answer")


def is_deep(job: Job, least: int) -> bool:
    """Return True if a model's config has at least this number of layers."""
    counts = [job.model.config.get(key) for key in LAYERS]
    return any(type(count) is int and count >= least for count in counts)


def run_on_deep_stack(work: Callable[[], Answer]) -> Answer:
    """Run `work` in a thread with a large stack. Return its result, or raise its exception."""
    answers: list[Answer] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as fault:
            faults.append(fault)

    # The size applies to threads that start later, so it is restored at once.
    before = threading.stack_size(STACK_BYTES)
    try:
        # Context variables belong to a thread, so the new thread gets a copy of the caller's.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if faults:
        raise faults[0]
    return answers[0]
