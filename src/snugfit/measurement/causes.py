"""The outcome of an experiment: one word for how the measured process ended.

    ok            it did what it should
    oom:WHO       no memory on the GPU; WHO noticed: torch, cuda, cublas, cudnn, cusparse, cusolver, nccl,
                  triton, bitsandbytes
    host-oom      no memory on the host: refused to the child, or the kernel killed it for that
    timeout       still running at its deadline
    signal:NAME   killed by a signal (signal:SEGV, signal:ABRT, ...)
    exit:CODE     ended with this code and reported nothing better
    no-result     ended well and left no result
    bad-result    left something that is no result
    refused       a mistake of the user's that only the child could see; becomes an error, never a measurement

`step/memory_errors.py` recognises exceptions that mean memory; this file joins that with how the process
ended. Beside each message below stands where it was met, as it does there.
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
    """The cause of death of a process that ended with this exception; `exit:1` when memory is none of it."""
    return memory_cause(error) or (REFUSED if isinstance(error, UsageError) else "exit:1")


def cause_of_exit(child: ChildExit, reported: str | None) -> str:
    """The outcome of a child: how it ended, beside what its result reports.

    `reported` is the outcome in the child's own result, `no-result` or `bad-result`. A child that reported
    `ok` and then died is no success; a child that reported a cause and then ended is believed.
    """
    if child.timed_out:
        return TIMEOUT
    if child.returncode == 0:
        return reported or NO_RESULT
    if reported not in (None, OK, NO_RESULT, BAD_RESULT, "exit:1"):
        return reported
    if child.oom_kills > 0 and (child.returncode == -signal.SIGKILL or child.returncode > 0):
        return HOST_OOM
    return _cause_in_output(child) or _cause_of_code(child.returncode)


class _FatalMessage(NamedTuple):
    """What C++ code writes when it ends the process itself."""

    returncode: int
    cause: str
    pattern: str


_FATAL_MESSAGES = (
    # not met yet: a C++ thread without Python above it, so that the exception ends the process
    _FatalMessage(
        -signal.SIGABRT, "oom:torch", r"^terminate called after throwing .* 'c10::OutOfMemoryError'"
    ),
    # from a log; that bitsandbytes then ends the process with 1 and raises nothing was not met yet
    _FatalMessage(1, "oom:bitsandbytes", r"^Error out of memory at line \d+ in file .*\.(?:cu|cuh|cpp|c)\b"),
)


def _cause_in_output(child: ChildExit) -> str | None:
    """The cause that the process wrote before it ended."""
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
