"""Time torch's attention kernels on one GPU for long sequences, and measure the bytes that they allocate.

    python lab/attention_speed.py OUT.json [--heads 32] [--shared 8] [--width 128] [LENGTH ...]

Each kernel runs causal attention of one sequence in bfloat16, forward and backward. Keys and values have
`--shared` heads. FLOPs are those of the lower triangle: 2 products forward, 5 backward. The bytes beside the
operands are the largest requested ones, of outputs, gradients and temporary tensors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def measured(call: Callable[[], Any], repeats: int = 3) -> tuple[float, int]:
    """Return the milliseconds of a call, the least of several, and the bytes that it requests at its peak."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times), torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def row(name: str, length: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return times, TFLOP/s and bytes of one kernel at one length."""
    heads = (given.heads, given.shared, given.shared)
    operands = [
        torch.randn(1, count, length, given.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in heads
    ]
    products = 2 * given.heads * length * length * given.width / 1e12 / 2
    found: dict[str, Any] = {"kernel": name, "length": length}
    with sdpa_kernel([KERNELS[name]]):

        def forward() -> torch.Tensor:
            return scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)

        ms, nbytes = measured(forward)
        found |= {"forward_ms": ms, "forward_tflops": 2 * products / ms * 1000, "forward_bytes": nbytes}
        out = forward()
        slope = torch.randn_like(out)
        ms, nbytes = measured(lambda: torch.autograd.grad(out, operands, slope, retain_graph=True))
    return found | {"backward_ms": ms, "backward_tflops": 5 * products / ms * 1000, "backward_bytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("lengths", nargs="*", type=int, default=[2048, 8192, 32768, 131072])
    for name, value in (("heads", 32), ("shared", 8), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    rows = []
    for length in given.lengths:
        for name in KERNELS:
            rows.append(row(name, length, given))
            print(rows[-1], flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
             "cudnn": torch.backends.cudnn.version(), "rows": rows}  # fmt: skip
    given.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
