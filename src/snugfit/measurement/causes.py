"""The outcome of an experiment: one word for the end of the measured process.

- `ok`: success.
- `oom:WHO`: out of GPU memory. WHO detected it: torch, cuda, cublas, cudnn, cusparse, cusolver, nccl, triton
  or bitsandbytes.
- `host-oom`: out of host memory. An allocation failed, or the kernel killed the process.
- `timeout`: still running at its deadline.
- `signal:NAME`: killed by a signal (signal:SEGV, signal:ABRT, ...).
- `exit:CODE`: an exit code without a better report.
- `no-result`: a successful exit without a result.
- `bad-result`: a result that cannot be decoded.
- `refused`: a user's mistake that only the child could detect. It is raised as an error, never a measurement.

`step/memory_errors.py` recognises exceptions of exhausted memory. This file combines them with the exit of
the process. As in that file, a comment at each message below gives its origin.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from snugfit.errors import UsageError
from snugfit.measurement.process import ChildExit
from snugfit.step.memory_errors import HOST_OOM, memory_cause

OK, TIMEOUT = "ok", "timeout"
NO_RESULT, BAD_RESULT, REFUSED = "no-result", "bad-result", "refused"


def cause_of_exception(error: BaseException) -> str:
    """Return the outcome of a process that ended with this exception, such as `oom:torch`; `exit:1` if memory
    is not the cause.
    """
    return memory_cause(error) or (REFUSED if isinstance(error, UsageError) else "exit:1")


def cause_of_exit(child: ChildExit, reported: str | None) -> str:
    """Return the outcome of a child process from its exit and its own report.

    `reported` is the outcome in the child's own result, `no-result` or `bad-result`. A child that reported
    `ok` and then died counts as failed. A cause that a child reported before its exit is accepted.
    """
    if child.timed_out:
        return TIMEOUT
    if child.returncode == 0:
        return reported or NO_RESULT
    # `exit:1` may be any exception, so the kernel's count of killed processes is better evidence.
    if reported not in (None, OK, NO_RESULT, BAD_RESULT, "exit:1"):
        return reported
    # An exit code above 0 may be the consequence of a killed worker process.
    if child.oom_kills > 0 and (child.returncode == -signal.SIGKILL or child.returncode > 0):
        return HOST_OOM
    return _cause_in_output(child) or _cause_of_code(child.returncode)


class _FatalMessage(NamedTuple):
    """A message of C++ code that ends the process itself."""

    returncode: int
    cause: str
    pattern: str


_FATAL_MESSAGES = (
    # Such an exception in a C++ thread without Python frames would end the process. It was never observed.
    _FatalMessage(
        -signal.SIGABRT, "oom:torch", r"^terminate called after throwing .* 'c10::OutOfMemoryError'"
    ),
    # Taken from a published log. It was never observed that bitsandbytes then exits with 1 and raises
    # nothing.
    _FatalMessage(1, "oom:bitsandbytes", r"^Error out of memory at line \d+ in file .*\.(?:cu|cuh|cpp|c)\b"),
)


def _cause_in_output(child: ChildExit) -> str | None:
    """Return the outcome that the last output of the process shows; None for other output."""
    for message in _FATAL_MESSAGES:
        if message.returncode == child.returncode and re.search(message.pattern, child.tail, re.MULTILINE):
            return message.cause
    return None


def _cause_of_code(returncode: int) -> str:
    if returncode >= 0:
        return f"exit:{returncode}"
    try:
        return f"signal:{signal.Signals(-returncode).name.removeprefix('SIG')}"
    except ValueError:
        return f"signal:{-returncode}"
