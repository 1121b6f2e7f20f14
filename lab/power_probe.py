"""Measure the power, clock and seconds of single kernels that run for seconds without a pause, on one GPU.

    python lab/power_probe.py OUT.json [--seconds 3] [--only NAME ...]

The mixes are those of `features/calibration/power_probe.py` in more sizes, each alone and for half of the
time. A row has the mean watts and the mean clock in MHz. It also has the share of readings at the power
limit, and a kernel's seconds, FLOPs and bytes. `prediction/power.py` has the fitted model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from snugfit.features.calibration.power_probe import (
    Mix,
    PowerReadings,
    attention,
    measure_mixes,
    products,
    sums,
    waits,
)

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


def _copies() -> Mix:
    source, target = (torch.randn(2**28, device="cuda") for _ in range(2))
    return Mix(lambda: target.copy_(source), 0.0, 2.0 * source.nbytes)


def _probes() -> dict[str, Callable[[], Mix]]:
    bf16 = {
        f"bf16 {name}": (lambda size=size: products(*size, torch.bfloat16)) for name, size in PRODUCTS.items()
    }
    large = PRODUCTS["8192 cubed"]
    return {
        "copy": _copies,
        "add bf16": lambda: sums(torch.bfloat16),
        **bf16,
        "fp16 8192 cubed": lambda: products(*large, torch.float16),
        "tf32 8192 cubed": lambda: products(*large, torch.float32),
        "fp32 4096 cubed": lambda: products(4096, 4096, 4096, torch.float32),
        "attention": lambda: attention(backward=False, dtype=torch.bfloat16),
        "attention both": lambda: attention(backward=True, dtype=torch.bfloat16),
    }


def main() -> None:
    """Run the probes and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    readings = PowerReadings()
    torch.empty(1, device="cuda")
    rows = [{"name": "idle", **readings.during(lambda: time.sleep(arguments.seconds))}]
    mixes = {"wait": waits}
    for name, probe in _probes().items():
        if not arguments.only or name in arguments.only:
            mixes |= {name: probe, f"half {name}": probe}
    for row in measure_mixes(mixes, readings, arguments.seconds):
        rows.append(row)
        print(row, flush=True)
    document = {
        "what": "power and clock of single kernels that run without a pause",
        "gpu": torch.cuda.get_device_name(),
        "limit_watts": readings.limit_watts,
        "highest_mhz": readings.highest_mhz,
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
