"""Time single kernels on a GPU: products whose rows are aligned and not, convolutions, attention, copies.

    python lab/time_kernels.py OUT.json

Each kernel is queued behind a sleeping device and timed by events, the median of three times ten. The figures
of an H200 are in `results/`. The rates follow them if no profiled step shows enough (`prediction/rates.json`,
`MatmulRate.unaligned`, convolutions in `prediction/kernel_seconds.py`, `LARGEST_SMALL_COPY`).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from snugfit.versions import versions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
VOCABULARIES = (50_257, 50_258, 50_260, 50_264, 30_522, 32_000, 1_001)
SCORES = (((32, 16, 512, 64), False), ((8, 32, 1024, 64), True), ((2, 16, 2048, 128), True))
SLEEP = 2_000_000
LONG_SLEEP = 20_000_000
"""Cycles for which the device is busy before a copy."""


def seconds(run: Callable[[], object], times: int = 10) -> float:
    """Return the seconds of one kernel, with the host's part hidden behind a sleeping device."""
    for _ in range(3):
        run()
    rounds = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP)
        begin.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) / times / 1000)
    return statistics.median(rounds)


def product(precision: str, rows: int, inner: int, columns: int, form: str) -> dict[str, Any]:
    """Return one product of (rows, inner) and (inner, columns).

    `form` names the operand that is transposed in memory, in BLAS's terms: `NT TN NN`.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    make = {"device": "cuda", "dtype": DTYPES[precision]}
    first = torch.randn(rows, inner, **make) if form[0] == "N" else torch.randn(inner, rows, **make).t()
    second = (
        torch.randn(inner, columns, **make) if form[1] == "N" else torch.randn(columns, inner, **make).t()
    )
    out = torch.empty(rows, columns, **make)
    took = seconds(lambda: torch.mm(first, second, out=out))
    sizes = {"rows": rows, "inner": inner, "columns": columns, "form": form}
    return {"what": "product", "precision": precision, **sizes, "seconds": took}


def products() -> Iterator[dict[str, Any]]:
    """Yield the products of a classifier over a vocabulary, and products of random sizes."""
    for precision in DTYPES:
        for vocabulary in VOCABULARIES:
            for tokens, width in ((2048, 768), (8192, 1024)):
                yield product(precision, tokens, width, vocabulary, "NT")
                yield product(precision, tokens, vocabulary, width, "NN")
                yield product(precision, vocabulary, tokens, width, "TN")
        draw = random.Random(1)
        for _ in range(60):
            rows, inner, columns = (int(2 ** draw.uniform(6, 13)) for _ in range(3))
            if draw.random() < 0.6:
                inner, columns = inner // 8 * 8, columns // 8 * 8
            yield product(precision, rows, inner, columns, draw.choice(("NT", "NN", "TN")))


def convolutions() -> Iterator[dict[str, Any]]:
    """Yield convolutions for patches of pictures, a network's middle and sound.

    A shape is (batch, channels, length, channels, width, stride).
    """
    shapes = (
        (8, 3, 224, 768, 16, 16),
        (32, 64, 56, 64, 3, 1),
        (3, 80, 3000, 960, 3, 1),
        (3, 960, 3000, 960, 3, 2),
    )
    for precision in ("fp32", "tf32", "bf16"):
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        for batch, channels, length, out, width, stride in shapes:
            flat = length >= 1000
            size = (length,) if flat else (length, length)
            make = {"device": "cuda", "dtype": DTYPES[precision], "requires_grad": True}
            given = torch.randn(batch, channels, *size, **make)
            weights = torch.randn(out, channels, *[width] * len(size), **make)
            convolve = F.conv1d if flat else F.conv2d
            output = convolve(given, weights, stride=stride)
            upstream = torch.randn_like(output)
            yield {
                "what": "convolution",
                "precision": precision,
                "shape": [batch, channels, length, out, width, stride],
                "forward": seconds(partial(convolve, given, weights, stride=stride), 5),
                "backward": seconds(
                    partial(torch.autograd.grad, output, (given, weights), upstream, retain_graph=True), 5
                ),
            }


def attention() -> Iterator[dict[str, Any]]:
    """Yield every kernel of torch, causal and not. A shape is (batch, heads, length, width of a head)."""
    for kernel in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for precision in ("bf16", "fp32") if kernel is SDPBackend.EFFICIENT_ATTENTION else ("bf16",):
            for shape, causal in (
                ((32, 16, 512, 64), False),
                ((8, 32, 1024, 64), True),
                ((2, 16, 2048, 128), True),
            ):
                make = {"device": "cuda", "dtype": DTYPES[precision], "requires_grad": True}
                query, key, value = (torch.randn(*shape, **make) for _ in range(3))

                attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
                with sdpa_kernel(kernel):
                    output = attend()
                    upstream, leaves = torch.randn_like(output), (query, key, value)
                    yield {
                        "what": "attention",
                        "kernel": kernel.name,
                        "precision": precision,
                        "shape": [*shape],
                        "causal": causal,
                        "forward": seconds(attend, 5),
                        "backward": seconds(
                            partial(torch.autograd.grad, output, leaves, upstream, retain_graph=True), 5
                        ),
                    }


def copies() -> Iterator[dict[str, Any]]:
    """Yield seconds of copies to a busy device, as in the plain loop.

    They show the speed, and the wait of the host.
    """
    for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 21, 1 << 22, 1 << 25):
        for pinned in (False, True):
            host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
            for busy in (0, LONG_SLEEP):
                torch.cuda.synchronize()
                if busy:
                    torch.cuda._sleep(busy)
                begin = time.perf_counter()
                host.to("cuda", non_blocking=True)
                returned = time.perf_counter() - begin
                torch.cuda.synchronize()
                whole = time.perf_counter() - begin
                setting = {"nbytes": nbytes, "pinned": pinned, "busy": bool(busy)}
                yield {"what": "copy", **setting, "returned": returned, "seconds": whole}


def main() -> None:
    """Time the kernels and write the output file."""
    document = {
        "schema": 1,
        "what": "timed-kernels",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "kernels": [*products(), *convolutions(), *attention(), *copies()],
    }
    Path(sys.argv[1]).write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
