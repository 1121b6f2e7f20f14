"""The kernels of encoders against plain torch: forward and backward, over odd sizes and dtypes.

Run as a process. With `TRITON_INTERPRET=1`, which Triton reads when kernels are defined, it runs on the CPU
in Triton's interpreter. With the argument `cuda` it runs on a GPU. With `cuda time` it also prints the times
there, at the shapes of BERT-large (4 x 512), as lines of JSON. Without `time` it prints a line for each case
with the largest difference, as a share of the largest number. The exit status is 1 if one is too large.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from snugfit.features.kernels.operations import add_norm as norms
from snugfit.features.kernels.operations import bias_gelu as gelus
from snugfit.features.kernels.operations import column_sums as sums
from snugfit.features.kernels.operations import join_slopes as joins
from snugfit.features.kernels.operations.joint_linear import joint_linear, lay_side_by_side
from triton_cases import asks_all

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Allowed error by dtype, relative to the largest number: a few roundings of results."""

SHAPES = ((1, 1, 8), (3, 43, 33), (1, 3, 1000))
"""Rows and columns that are and are not multiples of a program's tile."""

FEW_ROWS = (5, 3, 33)
"""Shape that Triton's interpreter runs in place of many rows.

Its kernel loads few rows at a time, so that two programs still take turns.
"""

MORE_SHAPES = (
    (5, 60, 33),
    (3, 5, 768),
    (2, 4, 1000),
    (1, 2, 1024),
    (1, 3, 4100),
    (3, 517, 1024),
    (40, 700, 96),
    (1, 2049, 257),
)
"""Shapes that only run on a GPU, because the interpreter is slow. Some have more rows than the tiles of all
programs.
"""


@contextlib.contextmanager
def by_kernel(device: str, *, kernels: bool) -> Iterator[None]:
    """Run the kernels within this context, on a GPU or in the interpreter, or plain torch."""
    with contextlib.ExitStack() as undo:
        for module in (norms, gelus, joins):
            undo.enter_context(patch.object(module, "has_kernel", lambda tensor: kernels))
        if device == "cpu" and kernels:
            from snugfit.features.kernels.operations.programs import (
                add_norm,
                bias_gelu,
                column_sums,
                join_slopes,
            )

            # so that programs take turns though there are few rows
            undo.enter_context(patch.object(sums, "PARTIALS", 2))
            for module, program, names in (
                (norms, add_norm, ("add_norm_forward", "add_norm_backward")),
                (gelus, bias_gelu, ("bias_gelu_forward", "bias_gelu_backward")),
                (joins, join_slopes, ("copy_slopes",)),
                (sums, column_sums, ("column_sums",)),
            ):
                for name in names:
                    undo.enter_context(patch.object(module, name, getattr(program, name)))
        yield


def results_of(run: Callable[..., Any], operands: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the results, and the gradients of the operands under output gradients from a fixed seed."""
    leaves = [None if one is None else one.clone().requires_grad_() for one in operands]
    out = run(*leaves)
    results = list(out) if isinstance(out, tuple) else [out]
    draw = torch.Generator().manual_seed(11)
    slopes = [torch.randn(one.shape, generator=draw).to(one) for one in results]
    torch.autograd.backward(results, slopes)
    return [one.detach() for one in results] + [
        one.grad for one in leaves if one is not None and one.grad is not None
    ]


def check(
    name: str, device: str, dtype: torch.dtype, run: Callable[..., Any], operands: list[torch.Tensor | None]
) -> bool:
    """Print the largest difference, and return True if it is small."""
    found = []
    for kernels in (False, True):
        with by_kernel(device, kernels=kernels):
            found.append(results_of(run, operands))
    worst = 0.0
    for plain, own in zip(*found, strict=True):
        assert (plain.dtype, plain.shape) == (own.dtype, own.shape), name
        largest = float(plain.double().abs().max()) or 1.0
        worst = max(worst, float((plain.double() - own.double()).abs().max()) / largest)
    good = worst <= TOLERANCE[dtype]
    print(f"{'ok' if good else 'WRONG'} {name} {str(dtype).removeprefix('torch.')}: {worst:.1e}", flush=True)
    return good


def norm_cases(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[bool]:
    """Yield results for residual and norm in the forms that models use."""
    columns = shape[-1]
    seed = torch.tensor([(1 << 61) + 12345], device=device)

    def case(*, residual: str, bias: bool, **options: Any) -> bool:
        draw = torch.Generator().manual_seed(5)

        def make(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(size, generator=draw).to(device, of)

        other = {
            "whole": make(*shape),
            "stream": make(*shape, of=torch.float32),
            "repeats": make(*shape[1:], of=torch.float32),
            "none": None,
        }[residual]
        operands = [make(*shape), other, make(columns), make(columns), make(columns) if bias else None]

        def run(x: Any, rest: Any, weight: Any, shift: Any, added: Any) -> Any:
            norm = torch.nn.LayerNorm(columns, eps=1e-12, device="meta")
            norm.weight, norm.bias = None, None  # type: ignore[assignment]
            norm.__dict__.update(weight=weight, bias=shift)
            return norms.add_norm(x, rest, norm, bias=added, seed=seed, site=3, **options)

        words = " ".join(
            [f"residual={residual}", *(["bias"] if bias else []), *(f"{k}={v}" for k, v in options.items())]
        )
        return check(f"add_norm {shape} {words}", device, dtype, run, operands)

    yield case(residual="whole", bias=True, dropout=0.1)
    if shape[-1] >= SHAPES[1][-1] and dtype is torch.float32 and not asks_all(device):
        return  # more elements: the same programs in the interpreter
    yield case(residual="whole", bias=False)
    yield case(residual="repeats", bias=False, dropout=0.3, drops_last=True)
    yield case(residual="whole", bias=False, dropout=0.5, gives_sum=True)
    yield case(residual="none", bias=False)
    yield case(residual="stream", bias=True, dropout=0.1, gives_stream=True)
    yield case(residual="repeats", bias=False, dropout=0.3, drops_last=True, gives_stream=True)


def join_cases(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[bool]:
    """Yield results for three gradients joined, and their column sums."""
    draw = torch.Generator().manual_seed(7)
    slopes = [torch.randn(shape, generator=draw).to(device, dtype) for _ in range(3)]
    found = []
    for kernels in (False, True):
        with by_kernel(device, kernels=kernels):
            found.append(joins.join_slopes(slopes, torch.float32))
            copied, nothing = joins.join_slopes(slopes, None)
        assert nothing is None
        assert torch.equal(copied, found[-1][0])
    (plain, of_bias), (own, sums_of) = found
    assert of_bias is not None
    assert sums_of is not None
    worst = float((slopes_in_fp32(slopes).sum(0) - sums_of).abs().max())
    good = torch.equal(plain, own) and worst <= 1e-3
    print(f"{'ok' if good else 'WRONG'} join_slopes {shape} {str(dtype).removeprefix('torch.')}: {worst:.1e}")
    yield good


def slopes_in_fp32(slopes: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(slopes, dim=-1).flatten(0, -2).float()


def gelu_cases(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[bool]:
    """Yield results for both forms, with large numbers too."""
    draw = torch.Generator().manual_seed(6)
    x = (torch.randn(shape, generator=draw) * 3).to(device, dtype)
    x.view(-1)[:2] = torch.tensor([60.0, -60.0])
    bias = torch.randn(shape[-1:], generator=draw).to(device, dtype)
    for by_tanh in (False, True):

        def run(value: Any, shift: Any, by_tanh: bool = by_tanh) -> Any:
            return gelus.bias_gelu(value, shift, by_tanh=by_tanh)

        yield check(f"bias_gelu {shape} by_tanh={by_tanh}", device, dtype, run, [x, bias])


def sums_are_those_of_torch(device: str) -> bool:
    """Compare the second stage of sums with torch, over more rows than a program adds up at once."""
    partials = torch.randn((3, 150, 70), generator=torch.Generator().manual_seed(2)).to(device)
    with by_kernel(device, kernels=True):
        found = sums.add_partials(partials, torch.float32)
    worst = float((found - partials.sum(1)).abs().max())
    print(f"{'ok' if worst < 1e-4 else 'WRONG'} column_sums (3, 150, 70): {worst:.1e}")
    return worst < 1e-4


def padded_attention_is_that_under_a_mask() -> bool:
    """Compare results at tokens and gradients on a GPU, without dropout."""
    from snugfit.features.kernels import attention

    mask = torch.ones((4, 77), dtype=torch.int64, device="cuda")
    mask[0, 50:], mask[1, :30], mask[2, 5:] = 0, 0, 0
    draw = torch.Generator().manual_seed(8)
    joint = torch.randn((4, 77, 3 * 128), generator=draw).to("cuda", torch.bfloat16).requires_grad_()
    slope = torch.randn((4, 77, 128), generator=draw).to("cuda", torch.bfloat16) * mask.unsqueeze(-1)
    results = []
    for stretches in (False, True):
        heads = [one.view(4, 77, 2, 64).transpose(1, 2) for one in joint.split(128, dim=-1)]
        if stretches:
            keywords = {"cu_seq_lens_q": attention.stretches(mask), "max_length_q": 77}
            out = attention.attend_in_stretches(torch.nn.Module(), heads, 0.0, 0.125, keywords)
        else:
            visible = mask.bool()[:, None, None, :]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible, scale=0.125)
            out = out.transpose(1, 2).reshape(4, 77, 128)
        (gradient,) = torch.autograd.grad(out, joint, slope)
        results.append((out * mask.unsqueeze(-1), gradient))
    worst = max(
        float((a.float() - b.float()).abs().max() / a.float().abs().max())
        for a, b in zip(*results, strict=True)
    )
    print(f"{'ok' if worst < 3e-2 else 'WRONG'} padded attention (4, 77): {worst:.1e}")
    return worst < 3e-2


# ---- how long they take ----------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the median of 20 runs, after 5."""
    times = []
    for repeat in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 5:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays the same kernels from a CUDA graph, without the host's launch times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compare(
    name: str, moved: int, ours: Callable[..., Any], plain: Callable[..., Any], operands: list[Any]
) -> None:
    """Print the milliseconds of both, forward, and forward with backward."""
    said: dict[str, Any] = {"name": name, "bytes": moved}
    for label, run in (("ours", ours), ("torch", plain)):
        slope = torch.randn_like(run(*operands))

        def both(run: Callable[..., Any] = run, slope: torch.Tensor = slope) -> Any:
            return torch.autograd.grad(run(*operands), [one for one in operands if one.requires_grad], slope)

        def alone(run: Callable[..., Any] = run) -> Any:
            with torch.no_grad():
                return run(*operands)

        said[f"{label}_forward_ms"] = milliseconds(captured(alone))
        said[f"{label}_both_ms"] = milliseconds(captured(both))
    said["ours_gb_per_s"] = moved / said["ours_both_ms"] / 1e6
    print(json.dumps({key: round(one, 4) if isinstance(one, float) else one for key, one in said.items()}))


def time_kernels() -> None:
    """Time kernels at the shapes of a layer of BERT-large, 4 x 512 tokens, in bfloat16."""
    functional = torch.nn.functional
    rows, wide, size = (4, 512, 1024), (4, 512, 4096), 2
    make = {"device": "cuda", "dtype": torch.bfloat16}
    seed = torch.tensor([77], device="cuda")
    x, residual = (torch.randn(rows, **make).requires_grad_() for _ in range(2))
    bias, norm = torch.randn(1024, **make).requires_grad_(), torch.nn.LayerNorm(1024, **make)
    one = 4 * 512 * 1024 * size
    for drop in (0.1, 0.0):
        compare(
            f"dropout({drop}) + residual + norm", (4 + 4) * one,
            lambda x, r, b, w, s, drop=drop: norms.add_norm(
                x, r, norm, bias=b, dropout=drop, seed=seed, site=1
            ),
            lambda x, r, b, w, s, drop=drop: functional.layer_norm(
                r + functional.dropout(x + b, drop), (1024,), w, s
            ),
            [x, residual, bias, norm.weight, norm.bias],
        )  # fmt: skip
    up, shift = torch.randn(wide, **make).requires_grad_(), torch.randn(4096, **make).requires_grad_()
    for form in ("none", "tanh"):
        compare(
            f"bias + gelu ({form})", (2 + 3) * 4 * one,
            lambda x, b, form=form: gelus.bias_gelu(x, b, by_tanh=form == "tanh"),
            lambda x, b, form=form: functional.gelu(x + b, approximate=form), [up, shift],
        )  # fmt: skip
    places = torch.randn(512, 1024, **make).requires_grad_()
    compare(
        "embeddings: sum + norm + dropout", (3 + 3) * one,
        lambda x, p, w, s: norms.add_norm(x, p, norm, dropout=0.1, seed=seed, site=2, drops_last=True),
        lambda x, p, w, s: functional.dropout(functional.layer_norm(x + p, (1024,), w, s), 0.1),
        [x, places, norm.weight, norm.bias],
    )  # fmt: skip
    layers = [torch.nn.Linear(1024, 1024, **make) for _ in range(3)]
    lay_side_by_side([layer.weight for layer in layers])
    lay_side_by_side([layer.bias for layer in layers])
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]

    def attend(heads: Any) -> torch.Tensor:
        query, key, value = (head.view(4, 512, 16, 64).transpose(1, 2) for head in heads)
        out = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return out.transpose(1, 2).reshape(rows)

    compare(
        "queries, keys, values and attention with dropout 0.1", 0,
        lambda x, *own: attend(joint_linear(x, own[:3], own[3:])),
        lambda x, *own: attend([functional.linear(x, own[i], own[3 + i]) for i in range(3)]),
        [x, *parameters],
    )  # fmt: skip


def main() -> int:
    """Run all cases on the given device; return 1 if one is wrong."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    good = True
    good &= sums_are_those_of_torch(device)
    good &= device == "cpu" or padded_attention_is_that_under_a_mask()
    for shape in SHAPES if device == "cpu" else (*SHAPES, *MORE_SHAPES):
        for dtype in TOLERANCE:
            if device == "cpu" and dtype is torch.float16:
                continue
            if dtype is torch.bfloat16 and shape[-1] > 33 and not asks_all(device):
                continue
            fewer = FEW_ROWS if shape == SHAPES[1] and not asks_all(device) else shape
            for case in (
                *norm_cases(device, fewer if dtype is torch.bfloat16 else shape, dtype),
                *gelu_cases(device, fewer, dtype),
                *join_cases(device, fewer, dtype),
            ):
                good &= case
    if good:
        print("as the reference")
    if "time" in sys.argv[2:]:
        time_kernels()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
