"""Time single kernels on a GPU: products whose rows are aligned and not, convolutions, attention, copies.

    python lab/time_kernels.py OUT.json [NAME ...]

NAME is one of `PARTS`; without a name the first four run. A part whose library is missing has the reason.

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


def optimizers() -> Iterator[dict[str, Any]]:
    """Yield updates of bitsandbytes, with their states on the device and in managed memory."""
    import bitsandbytes as bnb

    for name in ("AdamW8bit", "PagedAdamW8bit", "AdamW32bit", "PagedAdamW32bit", "PagedLion8bit"):
        for weights in (1 << 22, 1 << 26):
            weight = torch.nn.Parameter(torch.randn(weights, device="cuda"))
            weight.grad = torch.randn_like(weight)
            update = getattr(bnb.optim, name)([weight])
            yield {"what": "update", "kernel": name, "weights": weights, "seconds": seconds(update.step)}


def efficient() -> Iterator[dict[str, Any]]:
    """Yield efficient attention in fp32 with and without tf32, and with dropout."""
    for precision in ("fp32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        for shape, causal in SCORES:
            for dropout in (0.0, 0.1):
                query, key, value = (torch.randn(*shape, device="cuda", requires_grad=True) for _ in range(3))
                attend = partial(
                    F.scaled_dot_product_attention, query, key, value, is_causal=causal, dropout_p=dropout
                )
                with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                    output = attend()
                    back = partial(
                        torch.autograd.grad, output, (query, key, value), output, retain_graph=True
                    )
                    setting = {"precision": precision, "shape": [*shape], "causal": causal}
                    yield {
                        "what": "efficient attention", **setting, "dropout": dropout,
                        "forward": seconds(attend, 5), "backward": seconds(back, 5),
                    }  # fmt: skip


def grouped() -> Iterator[dict[str, Any]]:
    """Yield grouped products of rows (T, K) with matrices (E, K, N), and those of their gradients."""
    for experts, rows, inner, columns in (
        (8, 8192, 4096, 14336),
        (64, 16384, 2048, 1408),
        (128, 16384, 2048, 768),
    ):
        make = {"device": "cuda", "dtype": torch.bfloat16}
        tokens, matrices = torch.randn(rows, inner, **make), torch.randn(experts, inner, columns, **make)
        out = torch.randn(rows, columns, **make)
        ends = (torch.arange(1, experts + 1, device="cuda") * (rows // experts)).int()
        setting = {"experts": experts, "rows": rows, "inner": inner, "columns": columns}
        yield {
            "what": "grouped product", **setting,
            "forward": seconds(partial(torch._grouped_mm, tokens, matrices, offs=ends)),
            "of rows": seconds(partial(torch._grouped_mm, out, matrices.transpose(1, 2), offs=ends)),
            "of matrices": seconds(partial(torch._grouped_mm, tokens.t(), out, offs=ends)),
        }  # fmt: skip


def delta_rule() -> Iterator[dict[str, Any]]:
    """Yield the chunked scan of gated delta rules as transformers writes it out in torch."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as scan

    for batch, length in ((1, 2048), (2, 4096)):
        make = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        query, key, value = (torch.randn(batch, length, 32, 128, **make) for _ in range(3))
        gate = -torch.rand(batch, length, 32, device="cuda")
        run = partial(scan, query, key, value, g=gate, beta=torch.rand_like(gate).bfloat16())
        output = run()[0]
        back = partial(torch.autograd.grad, output, (query, key, value), output, retain_graph=True)
        yield {
            "what": "delta rule", "shape": [batch, length, 32, 128],
            "forward": seconds(run, 2), "backward": seconds(back, 2),
        }  # fmt: skip


def liger() -> Iterator[dict[str, Any]]:
    """Yield Liger's kernels with frozen weights, as under LoRA, and with trained ones."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    rows, width = 8192, 4096
    make = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(1, rows, width, **make, requires_grad=True)
    wide = [torch.randn(1, rows, 14336, **make, requires_grad=True) for _ in range(2)]
    heads = torch.randn(1, 32, rows, 128, **make, requires_grad=True)
    few = torch.randn(1, 8, rows, 128, **make, requires_grad=True)
    turns = [torch.randn(1, rows, 128, **make) for _ in range(2)]
    logits = torch.randn(rows, 32_000, **make, requires_grad=True)
    labels = torch.randint(0, 32_000, (rows,), device="cuda")
    cases: dict[str, tuple[Callable[[], Any], tuple[torch.Tensor, ...]]] = {
        "silu": (lambda: LigerSiLUMulFunction.apply(*wide), tuple(wide)),
        "rope": (lambda: LigerRopeFunction.apply(heads, few, *turns)[0], (heads,)),
        "cross entropy": (lambda: LigerCrossEntropyFunction.apply(logits, labels, None)[0], (logits,)),
    }
    for trained in (False, True):
        weight = torch.randn(width, **make, requires_grad=trained)
        inputs = (hidden, weight) if trained else (hidden,)
        norm = partial(LigerRMSNormFunction.apply, hidden, weight, 1e-6, 0.0, "llama", False)
        cases[f"rms norm, weight {'trained' if trained else 'frozen'}"] = (norm, inputs)
    for name, (run, inputs) in cases.items():

        def both(run: Any = run, inputs: Any = inputs) -> None:
            output = run()
            torch.autograd.grad(output, inputs, torch.ones_like(output))

        yield {"what": "liger", "kernel": name, "forward": seconds(run, 5), "both": seconds(both, 5)}


def in_place() -> Iterator[dict[str, Any]]:
    """Yield large products alone and added to a matrix in place."""
    for rows, inner, columns in ((8192, 4096, 4096), (8192, 4096, 28672), (4096, 14336, 4096)):
        make = {"device": "cuda", "dtype": torch.bfloat16}
        first, second = torch.randn(rows, inner, **make), torch.randn(columns, inner, **make).t()
        out = torch.randn(rows, columns, **make)
        yield {
            "what": "product in place", "rows": rows, "inner": inner, "columns": columns,
            "alone": seconds(partial(torch.mm, first, second, out=out)),
            "added": seconds(partial(out.addmm_, first, second)),
        }  # fmt: skip


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "products": products, "convolutions": convolutions, "attention": attention, "copies": copies,
    "optimizers": optimizers, "efficient": efficient, "grouped": grouped, "delta_rule": delta_rule,
    "liger": liger, "in_place": in_place,
}  # fmt: skip


def timed(name: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of one part, and the reason if it cannot go on."""
    try:
        yield from PARTS[name]()
    except (ImportError, AttributeError, RuntimeError, TypeError) as missing:
        yield {"what": name, "failed": " ".join(str(missing).split())[:300]}


def main() -> None:
    """Time the kernels and write the output file."""
    names = sys.argv[2:] or [*PARTS][:4]
    kernels: list[dict[str, Any]] = []
    document = {
        "schema": 1,
        "what": "timed-kernels",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "kernels": kernels,
    }
    for name in names:
        kernels += timed(name)
        # A later part may end the process.
        Path(sys.argv[1]).write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
