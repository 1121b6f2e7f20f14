"""Time our kernels and Liger's for the same part of a model, forward and backward, side by side on a GPU.

    python lab/kernels_beside_liger.py OUT.json

Seconds are those of all kernels of a call on the device, by torch's profiler. So neither side waits for its
host. Sides take turns. The row holds the largest difference of results, as a share of the largest result. It
shows that both sides computed the same; with dropout they draw different masks. The script needs
liger-kernel. Parts without a kernel of Liger's use torch's.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from snugfit.documents import write_document
from snugfit.features.kernels.head.chunked_loss import ChunkedCrossEntropy, Loss
from snugfit.features.kernels.operations.add_norm import add_norm
from snugfit.features.kernels.operations.attention_inputs import attention_inputs
from snugfit.features.kernels.operations.bias_gelu import bias_gelu
from snugfit.features.kernels.operations.cross_entropy import CrossEntropyKernel
from snugfit.features.kernels.operations.gated_mlp import gated_mlp
from snugfit.features.kernels.operations.joint_linear import lay_side_by_side
from snugfit.features.kernels.operations.projections import Projections
from snugfit.features.kernels.operations.rms_norm import add_rms_norm
from snugfit.features.kernels.operations.rotary import Heads
from snugfit.versions import versions

CUDA, HALF = torch.device("cuda", 0), torch.bfloat16
TURNS, CALLS = 5, 10
CHUNK = 1024
"""Tokens with logits in memory at once, on our side. Liger chooses its own number."""


class Shapes(NamedTuple):
    """Sizes of a decoder's layer."""

    name: str
    batch: int
    length: int
    hidden: int
    inner: int
    queries: int
    keys: int
    width: int
    vocabulary: int


DECODERS = (
    Shapes("Llama-3.2-1B 2 x 2048", 2, 2048, 2048, 8192, 32, 8, 64, 128256),
    Shapes("Qwen2.5-0.5B 1 x 512", 1, 512, 896, 4864, 14, 2, 64, 151936),
)
ENCODER = (2048, 1024, 4096)
"""Rows, columns, and columns of the MLP: BERT-large, 4 x 512."""


class Side(NamedTuple):
    """One way to compute a part."""

    compute: Callable[..., Any]
    """Function from the operands to one result or several."""
    operands: Sequence[torch.Tensor]


def made(*size: int, scale: float = 1.0) -> torch.Tensor:
    """Return an operand that requires a gradient."""
    return (torch.randn(*size, device=CUDA, dtype=HALF) * scale).requires_grad_()


def parts_of_decoder(shapes: Shapes) -> dict[str, tuple[Side, Side]]:
    """Return our side and Liger's of each part of a layer, and of the head with its loss."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    batch, length, hidden, inner = shapes.batch, shapes.length, shapes.hidden, shapes.inner
    linear = torch.nn.functional.linear
    x, residual, scale = made(batch, length, hidden), made(batch, length, hidden), made(hidden)
    gate, up, down = (
        made(inner, hidden, scale=0.02),
        made(inner, hidden, scale=0.02),
        made(hidden, inner, scale=0.02),
    )
    lay_side_by_side([gate, up])  # `fused` does this once with a model's weights
    counts = (shapes.queries, shapes.keys, shapes.keys)
    matrices = [made(count * shapes.width, hidden, scale=0.02) for count in counts]
    lay_side_by_side(matrices)
    angles = torch.rand(1, length, shapes.width // 2, device=CUDA).repeat(1, 1, 2)
    turned = angles.cos().to(HALF), angles.sin().to(HALF)
    heads = Heads(shapes.queries, shapes.keys, shapes.width)

    def their_inputs(states: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = (
            linear(states, weight).view(batch, length, -1, shapes.width).transpose(1, 2) for weight in weights
        )
        return (*LigerRopeFunction.apply(query, key, *turned), value)

    def our_inputs(states: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return attention_inputs(states, turned, heads, Projections(weights), None)

    rows, head = made(batch * length, hidden), made(shapes.vocabulary, hidden, scale=0.02)
    labels = torch.randint(shapes.vocabulary, (batch * length,), device=CUDA)
    loss = Loss(True, -100, 0.0, lambda logits: logits, kernel=CrossEntropyKernel())
    return {
        "residual + RMSNorm": (
            Side(lambda *a: add_rms_norm(*a, 1e-5, HALF, scaling=0), (x, residual, scale)),
            Side(
                lambda *a: LigerFusedAddRMSNormFunction.apply(*a, 1e-5, 0.0, "llama", False)[::-1],
                (x, residual, scale),
            ),
        ),
        "gated MLP": (
            Side(
                lambda x, *w: gated_mlp(x, Projections(w[:2]), Projections(w[2:]), tanh=False),
                (x, gate, up, down),
            ),
            Side(
                lambda h, g, u, d: linear(LigerSiLUMulFunction.apply(linear(h, g), linear(h, u)), d),
                (x, gate, up, down),
            ),
        ),
        "queries, keys, values, rotated": (
            Side(our_inputs, (x, *matrices)),
            Side(their_inputs, (x, *matrices)),
        ),
        "head + cross-entropy": (
            Side(lambda h, w: ChunkedCrossEntropy.apply(h, w, None, labels, loss, CHUNK, HALF), (rows, head)),
            Side(lambda h, w: LigerFusedLinearCrossEntropyFunction.apply(h, w, labels)[0], (rows, head)),
        ),
    }


def parts_of_encoder() -> dict[str, tuple[Side, Side]]:
    """Return the parts of BERT-large between its products, without and with dropout."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    count, columns, inner = ENCODER
    norm = torch.nn.LayerNorm(columns, device=CUDA, dtype=HALF)
    x, residual, bias = made(count, columns), made(count, columns), made(columns)
    seed = torch.tensor([7], device=CUDA)
    wide, wide_bias = made(count, inner), made(inner)
    gelu, drop = torch.nn.functional.gelu, torch.nn.functional.dropout
    operands = (x, residual, bias, norm.weight, norm.bias)

    def ours(dropout: float) -> Side:
        return Side(lambda a, r, b, *_: add_norm(a, r, norm, bias=b, dropout=dropout, seed=seed), operands)

    def theirs(dropout: float) -> Side:
        def compute(
            a: torch.Tensor, r: torch.Tensor, b: torch.Tensor, w: torch.Tensor, s: torch.Tensor
        ) -> Any:
            total = (drop(a + b, dropout) if dropout else a + b) + r
            return LigerLayerNormFunction.apply(total, w, s, norm.eps)

        return Side(compute, operands)

    return {
        "bias + residual + LayerNorm": (ours(0.0), theirs(0.0)),
        "bias + dropout + residual + LayerNorm": (ours(0.1), theirs(0.1)),
        "bias + GELU (torch's)": (
            Side(bias_gelu, (wide, wide_bias)),
            Side(lambda a, b: gelu(a + b), (wide, wide_bias)),
        ),
    }


def results_of(side: Side) -> tuple[torch.Tensor, ...]:
    """Return the results of a side."""
    given = side.compute(*side.operands)
    return given if isinstance(given, tuple) else (given,)


def run(side: Side, slopes: Sequence[torch.Tensor]) -> None:
    """Run forward and backward."""
    torch.autograd.grad(results_of(side), side.operands, slopes)


def device_seconds(side: Side, slopes: Sequence[torch.Tensor]) -> float:
    """Return the seconds of all kernels of a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            run(side, slopes)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in seen.key_averages())) / CALLS / 1e6


def peak_bytes(side: Side, slopes: Sequence[torch.Tensor]) -> int:
    """Return the peak bytes of a call beside its operands and output gradients."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(side, slopes)
    return torch.cuda.max_memory_allocated() - before


def share_apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number."""
    return float((ours.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max())


def compare(job: str, part: str, sides: tuple[Side, Side]) -> dict[str, Any]:
    """Return a row of the result."""
    results = [results_of(side) for side in sides]
    apart = max(
        float((a.detach() - b.detach()).abs().max() / b.detach().abs().max())
        for a, b in zip(*results, strict=True)
    )
    slopes = [torch.randn_like(one) if one.dim() else torch.ones_like(one) for one in results[0]]
    del results
    for side in sides:
        run(side, slopes)
    peaks = [peak_bytes(side, slopes) for side in sides]
    turns = [[device_seconds(side, slopes) for side in sides] for _ in range(TURNS)]
    ours, theirs = (statistics.median(one) for one in zip(*turns, strict=True))
    return {
        "job": job, "part": part, "ours_seconds": ours, "theirs_seconds": theirs, "ratio": theirs / ours,
        "ours_peak_bytes": peaks[0], "theirs_peak_bytes": peaks[1], "apart": apart, "turns": turns,
    }  # fmt: skip


def main() -> None:
    """Compare all parts and write the output file."""
    torch.manual_seed(0)
    rows = []
    for shapes in DECODERS:
        rows += [compare(shapes.name, part, sides) for part, sides in parts_of_decoder(shapes).items()]
    rows += [compare("BERT-large 4 x 512", part, sides) for part, sides in parts_of_encoder().items()]
    for row in rows:
        ours, theirs = row["ours_seconds"] * 1e6, row["theirs_seconds"] * 1e6
        print(f"{row['job']:24} {row['part']:40} {ours:8.1f} us, {theirs:8.1f} us, {row['ratio']:.2f} x")
    document = {
        "schema": 1,
        "what": "kernels-beside-liger",
        "gpu": torch.cuda.get_device_name(CUDA),
        "versions": versions(),
        "rows": rows,
    }
    write_document(Path(sys.argv[1]), document)


if __name__ == "__main__":
    main()
