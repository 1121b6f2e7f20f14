"""Text patterns of out-of-memory errors in logs.

The messages are those of torch 1.8 to 2.15 for CUDA, HIP and XPU, of libraries, of Linux and of SLURM. Each
pattern matches in linear time, because a log may have millions of characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from snugfit.features.diagnosis.result import FailureKind


@dataclass(frozen=True)
class Sign:
    """A text pattern of log messages, and the cause of an out-of-memory failure that it indicates."""

    words: tuple[str, ...]
    """Substrings of which each line with this error has at least one. A search for them is much faster than
    the pattern."""
    pattern: re.Pattern[str]
    kind: FailureKind
    summary: str
    """Sentences about the error for the report. `{0}` is replaced by the text that the pattern found."""
    certain: bool = True
    """False for patterns that also match other failures. They count only if no certain one matches."""


def _sign(
    words: tuple[str, ...], pattern: str, kind: FailureKind, summary: str, *, certain: bool = True
) -> Sign:
    return Sign(words, re.compile(pattern, re.MULTILINE), kind, summary, certain)


REQUEST = re.compile(
    r"(?:[Tt]ried\s+to\s+allocate\s+|Requested {10,}: )(?P<size>[\d.]{1,20}\s?(?:bytes|[KMGT]?i?B))"
)
"""Pattern of a failed request in error messages of PyTorch's CUDA allocators, both its own and
`cudaMallocAsync`."""

FIRST_WORDS = ("Tried", "tried", "Requested ")
"""First words of the message of a failed request. A search for them is much faster than the pattern."""

CPU_REQUEST = re.compile(r"you tried to allocate (\d+) bytes")
KILLED_BYTES = re.compile(r"anon-rss:(\d+)kB")

SIGNS = (
    # This sign comes first, because `text.py` also uses it for requests with figures.
    _sign(
        ("out of memory", "exceed allowed memory"),
        # Prose about `out of memory errors` is no failure.
        r"(?:CUDA|HIP|XPU|MPS backend) out of memory(?! (?:errors?|exceptions?|issues?|problems?)\b)"
        r"|would exceed allowed memory",
        FailureKind.UNCLEAR,
        "PyTorch's allocator found no memory for a tensor, and the text has no figures.",
    ),
    _sign(
        ("Triton Error",),
        r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
        FailureKind.LIBRARY,
        "Triton loaded a kernel, and the driver had no GPU memory left for it.",
    ),
    _sign(
        ("Cuda failure", "ncclCuMem"),
        r"Cuda failure (?:2 )?'out of memory'|ncclCuMem\w+[^\n]{0,80}out of memory",
        FailureKind.LIBRARY,
        "NCCL found no GPU memory for its buffers. It allocates outside of PyTorch's allocator.",
    ),
    _sign(
        ("ALLOC_FAILED", "MEMORY_ERROR", "memory_error"),
        r"(?:CU|HIP|ROC)(?:BLAS|SOLVER|SPARSE|FFT)_(?:STATUS_)?(?:ALLOC_FAILED|MEMORY_ERROR)"
        r"|(?:cu|roc)(?:blas|solver|fft)_status_memory_error",
        FailureKind.LIBRARY,
        "{0}: the library found no GPU memory for its handle or workspace, outside of PyTorch's allocator.",
    ),
    _sign(
        ("CUDNN_STATUS", "miopenStatus"),
        r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|miopenStatusAllocFailed",
        FailureKind.LIBRARY,
        "{0}: cuDNN or MIOpen found no GPU memory outside of PyTorch's allocator.",
    ),
    _sign(
        ("out of memory", "OUT_OF_MEMORY", "MemoryAllocation", "ErrorOutOfMemory"),
        r"(?:CUDA|HIP)(?: driver| runtime)? error:? out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA error 2: out of memory",
        FailureKind.LIBRARY,
        "The driver had no GPU memory left for a call outside of PyTorch's allocator. Such calls make "
        "contexts, graphs, page-locked host memory, or pages of expandable segments.",
    ),
    _sign(
        ("out of memory at line",),
        r"Error out of memory at line \d+ in file \S{1,4000}",
        FailureKind.LIBRARY,
        "bitsandbytes found no GPU memory for its own call, outside of PyTorch's allocator.",
    ),
    _sign(
        ("DefaultCPUAllocator",),
        r"DefaultCPUAllocator:[^\n]{0,40}(?:can't allocate|not enough) memory",
        FailureKind.HOST,
        "The host had no memory left for a tensor.",
    ),
    _sign(
        # `Out` and `out` share this substring.
        ("ut of memory: Kill",),
        r"(?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process \d+",
        FailureKind.HOST,
        "Linux killed the process, because the memory of the host, or the limit of its container, was used "
        "up ({0}).",
    ),
    _sign(
        ("oom", "OOM", "Out Of Memory"),
        r"oom[-_]kill event|oom-kill:constraint=\w+|\bOOM Killed\b|\bOOMKilled\b|task \d+: Out Of Memory",
        FailureKind.HOST,
        "The memory that the job had requested from the host was used up, so a process was killed ({0}).",
    ),
    _sign(
        ("DataLoader worker", "bus error", "(shm)", "/dev/shm", "torch_"),
        r"DataLoader worker \(pid[^)]{0,200}\) is killed by signal: Bus error"
        r"|Unexpected bus error encountered in worker|insufficient shared memory \(shm\)"
        r"|(?:write|allocate|resize|open)[^\n]{0,80}(?:/dev/shm|</?torch_)[^\n]{0,160}"
        r"(?:No space left|Cannot allocate)",
        FailureKind.SHARED_MEMORY,
        "The host's shared memory (/dev/shm) was used up. Loader workers pass batches through it.",
    ),
    _sign(
        ("DataLoader worker",),
        r"DataLoader worker \(pid[^)]{0,200}\) is killed by signal: (?:Killed|Aborted)",
        FailureKind.HOST,
        "A loader worker was killed, as Linux does when the memory of the host is used up.",
    ),
    _sign(
        ("Unable to allocate", "MemoryError", "Cannot allocate memory", "bad_alloc"),
        r"Unable to allocate [\d.]+ [KMGT]iB for an array|^MemoryError\b"
        r"|(?:\[Errno 12\]|mmap|fork|std::bad_alloc)[^\n]{0,200}Cannot allocate memory|std::bad_alloc",
        FailureKind.HOST,
        "The host had no memory left ({0}).",
    ),
    _sign(
        ("-9", "SIGKILL", "137"),
        r"(?:exit|return) ?code[ \t]{0,8}[:=]?[ \t]{0,8}\(?-9\b|Signal 9 \(SIGKILL\)"
        r"|Signals\.SIGKILL|signal SIGKILL"
        r"|(?:exit(?:ed)?|status|code|returned)[^\n\d-]{0,30}\b137\b|non-zero exit status -9\b",
        FailureKind.HOST,
        "A process was killed with signal 9 ({0}). Linux does so when the memory of the host is used up, and "
        "a scheduler or a person can do so too.",
        certain=False,
    ),
    _sign(
        ("Killed", "zsh: killed", "Getötet", "Processus arrêté", "Terminado (killed)", "已杀死"),
        r"^(?:\S{1,200} ?: \w{1,12} \d+ ?: *\d+ |[ \t]{0,20}\d+ |\[\d+\] *\+? {0,9}\d* ?)?"
        r"(?:Killed\b|Getötet\b|Processus arrêté|Terminado \(killed\)|已杀死)|^zsh: killed\b",
        FailureKind.HOST,
        "A process was killed. Linux does so when the memory of the host is used up, and a scheduler or a "
        "person can do so too.",
        certain=False,
    ),
    _sign(
        ("-7", "SIGBUS", "Bus error"),
        r"(?:exit|return) ?code[ \t]{0,8}[:=]?[ \t]{0,8}\(?-7\b|Signal 7 \(SIGBUS\)|Signals\.SIGBUS"
        r"|\bBus error \(core dumped\)",
        FailureKind.SHARED_MEMORY,
        "A process ended with signal 7 ({0}). A full shared memory of the host (/dev/shm) is a usual cause.",
        certain=False,
    ),
    _sign(
        ("DataLoader worker",),
        r"DataLoader worker \(pid[^)]{0,200}\) exited unexpectedly",
        FailureKind.HOST,
        "A loader worker ended without a message, often because the memory of the host was used up.",
        certain=False,
    ),
    _sign(
        ("NOT_INITIALIZED", "find a valid cuDNN", "find an engine"),
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED"
        r"|Unable to find a valid cuDNN algorithm|unable to find an engine to execute this computation",
        FailureKind.LIBRARY,
        "{0}: a full GPU is a frequent cause, because the library allocates outside of PyTorch's allocator.",
        certain=False,
    ),
    _sign(
        ("unhandled", "ncclUnhandled"),
        r"unhandled (?:cuda|system) error|ncclUnhandledCudaError",
        FailureKind.LIBRARY,
        "NCCL failed in a call to CUDA. A full GPU is one cause; NCCL_DEBUG=INFO gives the reason.",
        certain=False,
    ),
)
"""Patterns of all known failures. The first certain match in a log counts."""

FOREIGN = re.compile(
    r"RESOURCE_EXHAUSTED|XlaRuntimeError|JaxRuntimeError|ResourceExhaustedError"
    r"|OOM when allocating tensor with shape"
)
"""Pattern of error messages of JAX and TensorFlow, whose logs cannot be diagnosed."""

KERNEL_LIMIT = re.compile(r"out of resources?: (?:shared memory|registers)")
"""Pattern of Triton's message for a kernel that needs more registers or shared memory than the GPU has."""
