"""Every death of a measured process has a cause: out of memory by type, a signal, a timeout, no result."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

from snugfit.errors import ModelError, RecipeError
from snugfit.measurement.causes import cause_of_exception, cause_of_exit
from snugfit.measurement.host import oom_kills
from snugfit.measurement.process import ChildExit

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 5.00"
    " MiB is free. Including non-PyTorch memory, this process has 139.79 GiB memory in use."
)
AFTERMATH = "\nCUDA kernel errors might be asynchronously reported at some other API call."

MEMORY = [
    (torch.OutOfMemoryError(OUT_OF_MEMORY), "oom:torch"),
    (torch.OutOfMemoryError("worded otherwise"), "oom:torch"),
    (RuntimeError(OUT_OF_MEMORY), "oom:torch"),
    (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."), "oom:torch"),
    (torch.AcceleratorError("CUDA error: out of memory" + AFTERMATH), "oom:cuda"),
    (RuntimeError("CUDA error: out of memory" + AFTERMATH), "oom:cuda"),
    (RuntimeError("CUDA driver error: out of memory"), "oom:cuda"),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "oom:cublas",
    ),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom:cudnn"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom:cudnn"),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `x`"), "oom:cusolver"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "oom:triton"),
    (
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for"
            " details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'"
        ),
        "oom:nccl",
    ),
    (
        RuntimeError("NCCL error, NCCL version 2.18\nLast error:\nFailed to CUDA calloc 6291456 bytes"),
        "oom:nccl",
    ),
    (RuntimeError("Error out of memory at line 88 in file /src/csrc/ops.cu"), "oom:bitsandbytes"),
    (MemoryError(), "host-oom"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host-oom"),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to"
            " allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "host-oom",
    ),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you"),
        "host-oom",
    ),
    (
        RuntimeError(
            "DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that the workers"
            " are out of shared memory. Please try to raise your shared memory limit."
        ),
        "host-oom",
    ),
]

LOOK_ALIKES = [
    ValueError(OUT_OF_MEMORY),
    KeyError("CUDA error: out of memory"),
    FileNotFoundError(errno.ENOENT, "No such file", "CUDA out of memory."),
    RuntimeError("The text 'CUDA out of memory.' is not a label."),
    RuntimeError("Model out-of-memory-bank has no key CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: an illegal memory access was encountered" + AFTERMATH),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376."),
    RuntimeError("DataLoader worker (pid 17) exited unexpectedly with exit code 1."),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize(("error", "cause"), MEMORY)
def test_no_memory_has_its_own_cause(error: Exception, cause: str) -> None:
    assert cause_of_exception(error) == cause


@pytest.mark.parametrize("error", LOOK_ALIKES)
def test_a_text_that_speaks_of_memory_is_no_cause(error: Exception) -> None:
    assert cause_of_exception(error) == "exit:1"


def from_cause(inner: Exception) -> Exception:
    outer = ValueError("the step failed")
    outer.__cause__ = inner
    return outer


def from_none(inner: Exception) -> Exception:
    outer = ValueError("the step failed")
    outer.__context__, outer.__suppress_context__ = inner, True
    return outer


def grouped(inner: Exception) -> Exception:
    return ExceptionGroup("two failed", [ValueError("first"), from_cause(inner)])


def like_inductor(inner: Exception) -> Exception:
    return RuntimeError(
        f"backend='inductor' raised:\n{type(inner).__name__}: {inner}\n\nSet TORCHDYNAMO_VERBOSE=1"
    )


def like_a_loader(inner: Exception) -> Exception:
    return RuntimeError(
        f"Caught {type(inner).__name__} in DataLoader worker process 0.\nOriginal Traceback (most recent call"
        f" last):\n  File 'x.py', line 1\n{type(inner).__module__}.{type(inner).__name__}: {inner}\n"
    )


@pytest.mark.parametrize("wrap", [from_cause, from_none, grouped, like_inductor, like_a_loader])
@pytest.mark.parametrize(
    "inner", [torch.OutOfMemoryError(OUT_OF_MEMORY), RuntimeError("CUDA error: out of memory")]
)
def test_wrapped(wrap: Callable[[Exception], Exception], inner: Exception) -> None:
    assert cause_of_exception(wrap(inner)) == cause_of_exception(inner) != "exit:1"


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert cause_of_exception(first) == "exit:1"


def test_a_users_mistake_is_refused() -> None:
    assert cause_of_exception(RecipeError("no such technique")) == "refused"


def test_no_memory_for_building_is_no_mistake() -> None:
    mistake = ModelError("transformers cannot build it")
    mistake.__cause__ = torch.OutOfMemoryError(OUT_OF_MEMORY)
    assert cause_of_exception(mistake) == "oom:torch"


def ending(returncode: int, *, timed_out: bool = False, tail: str = "", kills: int = 0) -> ChildExit:
    return ChildExit(returncode=returncode, timed_out=timed_out, tail=tail, oom_kills=kills)


@pytest.mark.parametrize(
    ("end", "told", "cause"),
    [
        (ending(0), "ok", "ok"),
        (ending(0), "no-result", "no-result"),
        (ending(0), "bad-result", "bad-result"),
        (ending(1), "oom:torch", "oom:torch"),
        (ending(1), "exit:1", "exit:1"),
        (ending(1), "no-result", "exit:1"),
        (ending(3), "bad-result", "exit:3"),
        (ending(3), "ok", "exit:3"),
        (ending(-11), "ok", "signal:SEGV"),
        (ending(-11), "no-result", "signal:SEGV"),
        (ending(-4), "no-result", "signal:ILL"),
        (ending(-6), "no-result", "signal:ABRT"),
        (ending(-9), "no-result", "signal:KILL"),
        (ending(-9, kills=1), "no-result", "host-oom"),
        (ending(-11, kills=1), "no-result", "signal:SEGV"),
        # a loader's worker was killed, and the child raised an error
        (ending(1, kills=1), "exit:1", "host-oom"),
        (ending(-200), "no-result", "signal:200"),
        (ending(-15, timed_out=True), "no-result", "timeout"),
        (ending(0, timed_out=True), "ok", "timeout"),
        (
            ending(
                -6, tail="terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():"
            ),
            "no-result",
            "oom:torch",
        ),
        (
            ending(1, tail="Error out of memory at line 88 in file /a/csrc/ops.cu\n"),
            "no-result",
            "oom:bitsandbytes",
        ),
        (ending(1, tail="said: Error out of memory at line 88"), "no-result", "exit:1"),
    ],
)
def test_endings(end: ChildExit, told: str, cause: str) -> None:
    assert cause_of_exit(end, told) == cause


@pytest.mark.parametrize(
    ("cgroup", "counter", "text"),
    [
        ("0::/user.slice/job\n", "sys/fs/cgroup/user.slice/job/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("0::/\n", "sys/fs/cgroup/memory.events", "oom_kill 2\noom_group_kill 0\n"),
        ("4:cpu,memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("", "proc/vmstat", "nr_free_pages 1\noom_kill 2\n"),
    ],
)
def test_the_kernels_counters(tmp_path, cgroup: str, counter: str, text: str) -> None:
    for name, content in (("proc/self/cgroup", cgroup), (counter, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert oom_kills(tmp_path) == 2


def test_no_counters_count_nothing(tmp_path) -> None:
    assert oom_kills(tmp_path) == 0
