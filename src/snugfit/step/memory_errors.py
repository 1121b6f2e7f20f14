"""Classify exceptions that mean memory ran out, and name the memory's owner.

The type is checked first, then the message, from the outermost exception inwards along its causes. Messages
count only in exceptions of the kinds that torch and its libraries raise (RuntimeError and its subclasses).
They count only at the beginning of a line, since a file name or a user's ValueError may mention memory too.

A comment at each message names its source: `binary` is the installed library, `log` published logs or issues,
`met` a run of the tests. `unseen` messages are written from memory and not yet observed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

HOST_OOM = "host-oom"

_LINE = r"^(?:[\w.]+(?:Error|Exception): )*"
"""Regular expression of the beginning of a message's line. It accepts names of exceptions, since other
exceptions (inductor's) quote this one.
"""

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
        (HOST_OOM, r"could not create a primitive$"),  # met (oneDNN, which finds no room for a kernel's code)
        (HOST_OOM, r"DataLoader worker \(pid \d+\) is killed by signal: Bus error\b"),  # binary
        (HOST_OOM, r"unable to (?:mmap|allocate shared memory).*Cannot allocate memory"),  # binary
    )
)  # fmt: skip


def memory_cause(error: BaseException) -> str | None:
    """Return a word for the memory that ran out, of the device (`oom:WHO`) or of the host (`host-oom`)
    (`measurement/causes.py`); None for errors without a memory cause.

    Memory is checked before other causes, since transformers reports a lack of memory during construction as
    a config error.
    """
    for link in _chain(error):
        cause = _by_type(link) or _by_message(link)
        if cause:
            return cause
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its causes, also those in exception groups, the outermost first."""
    waiting, visited = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        inner = [link.__cause__, link.__context__, getattr(link, "inner_exception", None)]
        grouped = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [error for error in (*inner, *grouped) if isinstance(error, BaseException)]


def _by_type(error: BaseException) -> str | None:
    """Return the memory cause of an exception by the name and module of its type, without importing torch."""
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
