"""Power, clock and seconds of single kernels that run for seconds without a pause, on one GPU.

Each probe repeats a CUDA graph of one mix of kernels. After one second of warming, NVML's counter of energy
is read at both ends, and the clock of the multiprocessors every 20 ms. Values are normal, since products of
zeros draw less power. Probes `half NAME` alternate the kernels with a kernel that only waits for as long, so
they stay below the power limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.measurement.nvml import CLOCK_REASONS

if TYPE_CHECKING:
    import torch

WARM_SECONDS = 1.0
PAUSE_SECONDS = 1.0
"""Seconds without kernels before the burst, after which the clock is the highest one again (chosen)."""

GRAPH_SECONDS = 0.01
"""Approximate device time of one CUDA graph."""

READ_SECONDS = 0.02
"""Seconds between two readings of the clock."""

WAITING_GRAPHS = 4
"""Largest number of graphs in the queue of the device."""

LARGE = (8192, 8192, 8192)
FP32_SIZES = (4096, 4096, 4096)
"""Rows, columns and inner dimension of products. Those in fp32 are smaller, since each takes longer."""


@dataclass
class Mix:
    """Kernels of one probe: a function that launches them once, with their FLOPs and bytes."""

    launch: Callable[[], Any]
    flops: float
    nbytes: float


def products(rows: int, columns: int, inner: int, dtype: torch.dtype) -> Mix:
    """Return products of one matrix with several others, which do not fit in the L2 cache together."""
    import torch

    copies = max(2, min(8, int(2**30 / (columns * inner * dtype.itemsize))))
    x = torch.randn(rows, inner, device="cuda").to(dtype)
    weights = [torch.randn(inner, columns, device="cuda").to(dtype) for _ in range(copies)]
    out = torch.empty(rows, columns, device="cuda", dtype=dtype)

    def launch() -> None:
        for weight in weights:
            torch.mm(x, weight, out=out)

    moved = (rows * inner + inner * columns + rows * columns) * dtype.itemsize
    return Mix(launch, 2.0 * rows * columns * inner * copies, float(moved * copies))


def sums(dtype: torch.dtype) -> Mix:
    """Return a sum of two large tensors."""
    import torch

    a, b, out = (torch.randn(2**27, device="cuda", dtype=dtype) for _ in range(3))
    return Mix(lambda: torch.add(a, b, out=out), 0.0, 3.0 * a.nbytes)


def attention(*, backward: bool, dtype: torch.dtype) -> Mix:
    """Return causal attention of a decoder's size, without or with its backward pass."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    q, k, v = (
        torch.randn(4, 32, 2048, 128, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn(4, 32, 2048, 128, device="cuda", dtype=dtype)
    flops = 4 * 2 * 2 * 32 * 2048 * 2048 * 128 / 2

    def launch() -> None:
        with sdpa_kernel(order, set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), grad)

    # The backward pass computes 2.5 times the FLOPs of the forward pass.
    return Mix(launch, flops * (3.5 if backward else 1.0), float(q.nbytes * (12 if backward else 4)))


def waits() -> Mix:
    """Return a kernel that waits on one multiprocessor."""
    import torch

    return Mix(lambda: torch.cuda._sleep(10**6), 0.0, 0.0)


def calibration_mixes() -> Mapping[str, Callable[[], Mix]]:
    """Return the probes of `snugfit calibrate` by name, for the precisions of this GPU."""
    import torch

    tensor_cores = torch.cuda.get_device_capability()[0] >= 8  # bf16 and tf32 exist from Ampere on
    newer = {
        "bf16 large": lambda: products(*LARGE, torch.bfloat16),
        "half bf16 large": lambda: products(*LARGE, torch.bfloat16),
        "tf32 large": lambda: products(*LARGE, torch.float32),
    }
    sixteen = torch.bfloat16 if tensor_cores else torch.float16
    return {
        "wait": waits,
        # Values of bf16 have few digits, and draw 130 W less than those of fp16 on an H200.
        "add": lambda: sums(sixteen),
        **(newer if tensor_cores else {}),
        "fp16 large": lambda: products(*LARGE, torch.float16),
        "half fp16 large": lambda: products(*LARGE, torch.float16),
        "fp32 large": lambda: products(*FP32_SIZES, torch.float32),
        "attention both": lambda: attention(backward=True, dtype=sixteen),
    }


class PowerReadings:
    """Clock and energy of the GPU, read by NVML in a thread."""

    def __init__(self, index: int = 0) -> None:
        import pynvml
        import torch

        pynvml.nvmlInit()
        self._nvml = pynvml
        # CUDA may number the GPUs in another order than NVML.
        uuid = torch.cuda.get_device_properties(index).uuid
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.limit_watts = pynvml.nvmlDeviceGetPowerManagementLimit(self.handle) / 1e3
        self.highest_mhz = pynvml.nvmlDeviceGetMaxClockInfo(self.handle, pynvml.NVML_CLOCK_SM)

    def energy(self) -> float:
        """Return the joules that the GPU has used since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3

    def during(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Run this function; return the clocks, reasons and watts of its time."""
        clocks: list[int] = []
        reasons: list[int] = []
        ended = threading.Event()

        def read() -> None:
            while not ended.wait(READ_SECONDS):
                clocks.append(self._nvml.nvmlDeviceGetClockInfo(self.handle, self._nvml.NVML_CLOCK_SM))
                reasons.append(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        before, start = self.energy(), time.perf_counter()
        result = run()
        watts = (self.energy() - before) / (time.perf_counter() - start)
        ended.set()
        thread.join()
        limited = sum(bool(reason & CLOCK_REASONS["power"]) for reason in reasons)
        return {
            **(result or {}),
            "watts": round(watts, 1),
            "mhz": round(sum(clocks) / max(1, len(clocks)), 1),
            "lowest_mhz": min(clocks, default=0),
            "highest_mhz": max(clocks, default=0),
            "power_limited": round(limited / max(1, len(reasons)), 3),
            "degrees": self._nvml.nvmlDeviceGetTemperature(self.handle, 0),
        }


def measure_mixes(
    mixes: Mapping[str, Callable[[], Mix]], readings: PowerReadings, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield one row for each mix, measured for these seconds. Rows of `half` mixes run half of the time."""
    import torch

    for name, mix in mixes.items():
        torch.backends.cuda.matmul.allow_tf32 = "tf32" in name
        yield {"name": name} | measure_mix(mix(), readings, seconds, half=name.startswith("half"))
        torch.cuda.empty_cache()


def measure_mix(mix: Mix, readings: PowerReadings, seconds: float, *, half: bool) -> dict[str, Any]:
    """Return the row of this mix. With `half`, a waiting kernel follows each launch for as long."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mix.launch()
        torch.cuda.synchronize()
        alone = _event_seconds(mix.launch, 3)
        repeats = max(1, int(GRAPH_SECONDS / alone))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                mix.launch()
                if half:
                    torch.cuda._sleep(int(alone * readings.highest_mhz * 1e6))
        time.sleep(PAUSE_SECONDS)
        # One graph after a pause ends before the power limit acts.
        burst = _event_seconds(graph.replay, 1) / repeats
        _replay(graph, WARM_SECONDS)
        row = readings.during(
            lambda: (
                {"replays": _replay(graph, seconds)}
                | {"launch_seconds": _event_seconds(graph.replay, 5) / repeats}
            )
        )
    sizes = {"kernel_flops": mix.flops, "kernel_bytes": mix.nbytes}
    return {**sizes, "burst_seconds": burst, "half": half, **row}


def _replay(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """Replay a graph without a pause for about these seconds; return the number of replays."""
    import torch

    count, end = 0, time.perf_counter() + seconds
    waiting: list[torch.cuda.Event] = []
    while time.perf_counter() < end:
        graph.replay()
        count += 1
        event = torch.cuda.Event()
        event.record()
        waiting.append(event)
        if len(waiting) > WAITING_GRAPHS:
            waiting.pop(0).synchronize()
    torch.cuda.synchronize()
    return count


def _event_seconds(launch: Callable[[], Any], times: int) -> float:
    """Return the seconds of one launch on the device, as the mean of these times."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        launch()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times
