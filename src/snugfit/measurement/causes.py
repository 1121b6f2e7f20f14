"""Every death has a cause: one word for how an experiment ended.

    ok            it did what it should
    oom:WHO       no memory on the GPU; WHO noticed: torch, cuda, cublas, cudnn, cusparse, cusolver, nccl,
                  triton, bitsandbytes
    host-oom      no memory on the host: refused to the child, or the kernel killed it for that
    timeout       still running at its deadline
    signal:NAME   killed by a signal (signal:SEGV, signal:ABRT, ...)
    exit:CODE     ended with this code and told nothing better
    no-result     ended well and left no result
    bad-result    left something that is no result
    refused       a mistake of the user's that only the child could see; becomes an error, never a measurement

How an exception is told to mean memory stands in `step/memory_errors.py`; here it meets how a process ended.
Where each of the words below was seen stands beside it, as it does there.
"""

from __future__ import annotations

import re
import signal

from snugfit.errors import UsageError
from snugfit.measurement.process import ChildExit
from snugfit.step.memory_errors import HOST_OOM, memory_cause

OK, TIMEOUT = "ok", "timeout"
NO_RESULT, BAD_RESULT, REFUSED = "no-result", "bad-result", "refused"


def cause_of_exception(error: BaseException) -> str:
    """The cause of death of a process that ended with this exception; `exit:1` when memory is none of it."""
    return memory_cause(error) or (REFUSED if isinstance(error, UsageError) else "exit:1")


def cause_of_exit(ending: ChildExit, told: str | None) -> str:
    """The cause of death of a child: how it ended, beside what its result told.

    `told` is the outcome in the child's own result, `no-result` or `bad-result`. A child that told `ok` and
    then died is no success; a child that told a cause and then ended is believed.
    """
    if ending.timed_out:
        return TIMEOUT
    if ending.returncode == 0:
        return told or NO_RESULT
    if told not in (None, OK, NO_RESULT, BAD_RESULT, "exit:1"):
        return told
    if ending.oom_kills > 0 and (ending.returncode == -signal.SIGKILL or ending.returncode > 0):
        return HOST_OOM
    return _last_words(ending) or _by_code(ending.returncode)


_LAST_WORDS = tuple(
    (code, cause, re.compile(words, re.MULTILINE))
    for code, cause, words in (
        # unseen: a C++ thread without Python above it, so that the exception ends the process
        (-signal.SIGABRT, "oom:torch", r"^terminate called after throwing .* 'c10::OutOfMemoryError'"),
        # log; that bitsandbytes then ends the process with 1 and raises nothing is unseen
        (1, "oom:bitsandbytes", r"^Error out of memory at line \d+ in file .*\.(?:cu|cuh|cpp|c)\b"),
    )
)
"""What C++ code writes when it ends the process itself: exit code, cause, words."""


def _last_words(ending: ChildExit) -> str | None:
    """The cause that the process named itself before it ended."""
    for code, cause, words in _LAST_WORDS:
        if code == ending.returncode and words.search(ending.tail):
            return cause
    return None


def _by_code(returncode: int) -> str:
    if returncode >= 0:
        return f"exit:{returncode}"
    try:
        return f"signal:{signal.Signals(-returncode).name.removeprefix('SIG')}"
    except ValueError:
        return f"signal:{-returncode}"
