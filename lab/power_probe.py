"""Measure the power, clock and seconds of single kernels that run for seconds without a pause, on one GPU.

    python lab/power_probe.py OUT.json [--seconds 3] [--only NAME ...]

Each probe repeats CUDA graphs of one mix of kernels. After one second of warming, it reads NVML's counter of
energy at both ends and the clock of the multiprocessors every 20 ms. A row has the mean watts and the mean
clock in MHz. It also has the share of readings at the power limit, and a kernel's seconds, FLOPs and bytes.
Values are normal, since products of zeros draw less power.

Probes `half NAME` alternate the kernels with a kernel that only waits on one multiprocessor for as long. So
they stay below the power limit. `prediction/power.py` has the fitted model.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import torch

POWER = 4
"""NVML's bit for a clock that the power limit lowers (`nvmlClocksEventReasonSwPowerCap`)."""

PRODUCTS = {
    "8192 cubed": (8192, 8192, 8192),
    "8B gate": (8192, 14336, 4096),
    "8B output": (8192, 4096, 4096),
    "1B gate": (4096, 8192, 2048),
    "1B output": (4096, 2048, 2048),
    "BERT wide": (2048, 4096, 1024),
    "BERT square": (2048, 1024, 1024),
    "narrow": (512, 1024, 1024),
}
"""Rows, columns and inner dimension of the matrix products in bf16."""


@dataclass
class Mix:
    """Kernels of one probe: a function that launches them once, with their FLOPs and bytes."""

    launch: Callable[[], None]
    flops: float
    nbytes: float


def _products(rows: int, columns: int, inner: int, dtype: torch.dtype) -> Mix:
    copies = max(2, min(8, int(2**30 / (columns * inner * dtype.itemsize))))
    x = torch.randn(rows, inner, device="cuda").to(dtype)
    weights = [torch.randn(inner, columns, device="cuda").to(dtype) for _ in range(copies)]
    out = torch.empty(rows, columns, device="cuda", dtype=dtype)

    def launch() -> None:
        for weight in weights:
            torch.mm(x, weight, out=out)

    moved = (rows * inner + inner * columns + rows * columns) * dtype.itemsize
    return Mix(launch, 2.0 * rows * columns * inner * copies, float(moved * copies))


def _copies() -> Mix:
    source, target = (torch.randn(2**28, device="cuda") for _ in range(2))

    def launch() -> None:
        target.copy_(source)

    return Mix(launch, 0.0, 2.0 * source.nbytes)


def _adds() -> Mix:
    a, b, out = (torch.randn(2**27, device="cuda").bfloat16() for _ in range(3))

    def launch() -> None:
        torch.add(a, b, out=out)

    return Mix(launch, 0.0, 3.0 * a.nbytes)


def _attention(backward: bool) -> Mix:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.randn(4, 32, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn(4, 32, 2048, 128, device="cuda", dtype=torch.bfloat16)
    flops = 4 * 2 * 2 * 32 * 2048 * 2048 * 128 / 2

    def launch() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), grad)

    return Mix(launch, flops * (3.5 if backward else 1.0), float(q.nbytes * (12 if backward else 4)))


def _probes() -> dict[str, Callable[[], Mix]]:
    bf16 = {
        f"bf16 {name}": (lambda size=size: _products(*size, torch.bfloat16))
        for name, size in PRODUCTS.items()
    }
    large = PRODUCTS["8192 cubed"]
    return {
        "copy": _copies,
        "add bf16": _adds,
        **bf16,
        "fp16 8192 cubed": lambda: _products(*large, torch.float16),
        "tf32 8192 cubed": lambda: _products(*large, torch.float32),
        "fp32 4096 cubed": lambda: _products(4096, 4096, 4096, torch.float32),
        "attention": lambda: _attention(backward=False),
        "attention both": lambda: _attention(backward=True),
    }


class Readings:
    """Clock and energy of the GPU, read by NVML in a thread."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def energy(self) -> float:
        """Return the joules that the GPU has used since the driver was loaded."""
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3

    def during(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Run this function; return the clocks, reasons and watts of its time."""
        clocks: list[int] = []
        reasons: list[int] = []
        ended = threading.Event()

        def read() -> None:
            while not ended.wait(0.02):
                clocks.append(pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM))
                reasons.append(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle))

        thread = threading.Thread(target=read)
        thread.start()
        before, start = self.energy(), time.perf_counter()
        result = run()
        watts = (self.energy() - before) / (time.perf_counter() - start)
        ended.set()
        thread.join()
        return {
            **(result or {}),
            "watts": round(watts, 1),
            "mhz": round(sum(clocks) / max(1, len(clocks)), 1),
            "lowest_mhz": min(clocks, default=0),
            "highest_mhz": max(clocks, default=0),
            "power_limited": round(sum(bool(r & POWER) for r in reasons) / max(1, len(reasons)), 3),
            "degrees": pynvml.nvmlDeviceGetTemperature(self.handle, 0),
        }


def _replay(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """Replay a graph without a pause for about these seconds; return the number of replays."""
    count, end = 0, time.perf_counter() + seconds
    waiting: list[torch.cuda.Event] = []
    while time.perf_counter() < end:
        graph.replay()
        count += 1
        event = torch.cuda.Event()
        event.record()
        waiting.append(event)
        if len(waiting) > 4:
            waiting.pop(0).synchronize()
    torch.cuda.synchronize()
    return count


def _measure(mix: Mix, readings: Readings, seconds: float, *, half: bool) -> dict[str, Any]:
    """Measure this mix; with `half`, a waiting kernel follows each launch for as long."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mix.launch()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            mix.launch()
        end.record()
        torch.cuda.synchronize()
        alone = start.elapsed_time(end) / 3e3
        repeats = max(1, int(0.01 / alone))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                mix.launch()
                if half:
                    torch.cuda._sleep(int(alone * 1.98e9))
        burst = _burst(graph, repeats)
        _replay(graph, 1.0)
        row = readings.during(lambda: {"replays": _replay(graph, seconds)} | _last(graph, repeats))
    return {
        "kernel_flops": mix.flops,
        "kernel_bytes": mix.nbytes,
        "burst_seconds": burst,
        "half": half,
        **row,
    }


def _burst(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Return the seconds of one launch in a short run after a pause, before the power limit acts."""
    time.sleep(0.5)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _last(graph: torch.cuda.CUDAGraph, repeats: int) -> dict[str, float]:
    """Return the seconds of one launch while the GPU is in its steady state."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return {"launch_seconds": start.elapsed_time(end) / 5e3 / repeats}


def main() -> None:
    """Run the probes and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    readings = Readings()
    limit = pynvml.nvmlDeviceGetPowerManagementLimit(readings.handle) / 1e3
    torch.empty(1, device="cuda")
    rows = [{"name": "idle", **readings.during(lambda: time.sleep(arguments.seconds))}]
    rows.append(
        {"name": "wait", **_measure(Mix(lambda: torch.cuda._sleep(10**6), 0, 0), readings, 2, half=False)}
    )
    for name, probe in _probes().items():
        if arguments.only and name not in arguments.only:
            continue
        torch.backends.cuda.matmul.allow_tf32 = name.startswith("tf32")
        mix = probe()
        for half in (False, True):
            row = _measure(mix, readings, arguments.seconds, half=half)
            rows.append({"name": f"{'half ' if half else ''}{name}", **row})
            print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    document = {
        "what": "power and clock of single kernels that run without a pause",
        "gpu": torch.cuda.get_device_name(),
        "limit_watts": limit,
        "highest_mhz": pynvml.nvmlDeviceGetMaxClockInfo(readings.handle, pynvml.NVML_CLOCK_SM),
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
