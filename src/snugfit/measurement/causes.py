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

Inside the child exceptions are judged by type first, then by message, from the outermost inwards along what
they were raised from. Messages are trusted only in exceptions of the kinds that torch and its libraries raise
(RuntimeError and its children), and only from the beginning of a line: a text that merely speaks of memory,
such as a file name or a user's ValueError, is no cause.

Where each message was seen stands beside it: `binary` in the installed library, `log` in published logs or
issues, `met` raised in a test here, `unseen` written from memory and still to be met.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator

from snugfit.errors import UsageError
from snugfit.measurement.process import Ending

OK, HOST_OOM, TIMEOUT = "ok", "host-oom", "timeout"
NO_RESULT, BAD_RESULT, REFUSED = "no-result", "bad-result", "refused"

_LINE = r"^(?:[\w.]+(?:Error|Exception): )*"
"""A line's beginning, and exceptions' names where another exception quotes this one (inductor does)."""

MESSAGES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(_LINE + pattern, re.MULTILINE))
    for cause, pattern in (
        ("oom:torch", r"(?:CUDA|HIP|XPU|MPS backend) out of memory\."),  # log (CUDA), unseen (others)
        ("oom:triton", r"Triton Error \[CUDA\]: out of memory\b"),  # log
        ("oom:cuda", r"CUDA (?:driver )?error: out of memory\b"),  # log
        ("oom:cuda", r"CUDA error: CUDA_ERROR_OUT_OF_MEMORY\b"),  # unseen
        ("oom:cublas", r"CUDA error: CUBLAS_STATUS_ALLOC_FAILED\b"),  # name: log; whole line: unseen
        ("oom:cusparse", r"CUDA error: CUSPARSE_STATUS_ALLOC_FAILED\b"),  # unseen
        ("oom:cusolver", r"(?:cusolver error|CUDA error): CUSOLVER_STATUS_ALLOC_FAILED\b"),  # unseen
        ("oom:cudnn", r"cuDNN error: CUDNN_STATUS_(?:ALLOC|INTERNAL_ERROR_DEVICE_ALLOCATION)_FAILED\b"),
        # the line above: log
        ("oom:nccl", r"(?:Last error: *)?(?:Failed to CUDA calloc|Cuda failure (?:\d+ )?'?out of memory)\b"),
        # the line above: log (nccl issues 962, 1235); below: binary (format) and log (bitsandbytes issue 464)
        ("oom:bitsandbytes", r"Error out of memory at line \d+ in file .*\.(?:cu|cuh|cpp|c)\b"),
        (HOST_OOM, r"(?:\[enforce fail at .*\] .*)?DefaultCPUAllocator: (?:can't|not enough memory)\b"),
        # the line above: met (the second wording: log, on Windows)
        (HOST_OOM, r"DataLoader worker \(pid \d+\) is killed by signal: Bus error\b"),  # binary
        (HOST_OOM, r"unable to (?:mmap|allocate shared memory).*Cannot allocate memory"),  # binary
    )
)  # fmt: skip


def of_exception(error: BaseException) -> str:
    """The cause of death of a process that ended with this exception; `exit:1` when memory is none of it.

    Memory comes before mistakes: a model that could not be built for want of memory is told as a mistake in
    its config by whoever built it.
    """
    for link in _chain(error):
        cause = _by_type(link) or _by_message(link)
        if cause:
            return cause
    return REFUSED if isinstance(error, UsageError) else "exit:1"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, then what it was raised from, grouped or wrapped, outermost first."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inner = [link.__cause__, link.__context__, getattr(link, "inner_exception", None)]
        grouped = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [each for each in (*inner, *grouped) if isinstance(each, BaseException)]


def _by_type(error: BaseException) -> str | None:
    """Types are recognised by name and module, so that this file works without torch."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if names & {"torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"}:
        return "oom:torch"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return HOST_OOM
    return None


def _by_message(error: BaseException) -> str | None:
    if not isinstance(error, RuntimeError | SystemError):
        return None
    return next((cause for cause, pattern in MESSAGES if pattern.search(str(error))), None)


def of_ending(ending: Ending, told: str | None) -> str:
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


def _last_words(ending: Ending) -> str | None:
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
