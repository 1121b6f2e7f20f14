"""The kernels of decoders against their references in plain torch, forward and backward.

Run as a process. With `TRITON_INTERPRET=1`, which Triton reads when kernels are defined, it runs on the CPU
in Triton's interpreter. With the argument `cuda` it runs on a GPU. With `cuda time` it also prints the time
of each and of plain torch, as lines of JSON. Shapes are those of Llama-3.2-1B, 2 x 2048 tokens in bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from snugfit.features.kernels.decoders import decomposed
from snugfit.features.kernels.operations import (
    column_sums,
    cross_entropy,
    dropped_rows,
    gated_mlp,
    low_rank,
    rms_norm,
    rotary,
)
from snugfit.features.kernels.operations.rotary import Heads, Norms
from snugfit.features.kernels.operations.scaling import Scaling
from triton_cases import asks_all

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Largest allowed error by dtype, relative to a number plus a sixteenth of the largest number. In 16 bits it
allows two roundings.
"""

CUT_OFF = 4
"""Factor on the bound for bfloat16 in Triton's interpreter, which truncates instead of rounding."""

FILES = {
    rms_norm: "rms_norm",
    rotary: "rotary",
    gated_mlp: "gated",
    column_sums: "column_sums",
    cross_entropy: "cross_entropy",
    low_rank: "split_halves",
    dropped_rows: "dropped_rows",
    decomposed: "scaled_columns",
}
"""snugfit's operations, with the file of each one's Triton programs."""

USES_KERNELS = [True]

Case = tuple[str, Callable[[], list[torch.Tensor]]]
"""The type of a test case: a name, and a function whose tensors must be equal for the kernel and the
reference.
"""


def launch_on_the_cpu() -> None:
    """Make operators launch their programs also for tensors on the CPU, in Triton's interpreter.

    The programs are attributes under their own names, as constants or not.
    """
    for file, programs in FILES.items():
        there = importlib.import_module(f"snugfit.features.kernels.operations.programs.{programs}")
        for name in list(vars(file)):
            program = getattr(there, name.lower().lstrip("_"), None)
            if (name.startswith("_") or file is column_sums) and callable(program):
                setattr(file, name, program)


@contextlib.contextmanager
def by_kernels(wanted: bool) -> Iterator[None]:
    """Run kernels within this context, or plain torch."""
    USES_KERNELS.append(wanted)
    with contextlib.ExitStack() as undo:
        for file in FILES:
            undo.enter_context(patch.object(file, "has_kernel", lambda tensor: wanted, create=True))
        undo.callback(USES_KERNELS.pop)
        yield


def drawn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(device, dtype)


# ---- cases -----------------------------------------------------------------------------------------------


def combined(device: str, dtype: torch.dtype, *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of the axes: all of them, or each value once, other ones in 16 bits than in 32."""
    if asks_all(device):
        yield from itertools.product(*axes)
        return
    for turn in range(max(map(len, axes))):
        shift = int(dtype is torch.float32)
        yield tuple(axis[(turn + shift * at) % len(axis)] for at, axis in enumerate(axes))


def norm_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield norms of sizes that are no powers of two, of fewer rows than programs and of more.

    They run with and without the addition, and with a stream of 32 bits.
    """
    streams = (None, *dict.fromkeys((dtype, torch.float32)))
    sizes = ((1, 8), (17, 100), (3, 1029))
    with patch.object(rms_norm, "PROGRAMS", 7):
        for (rows, columns), scaling, of_stream in combined(device, dtype, sizes, tuple(Scaling), streams):
            given = functools.partial(norm, device, dtype, rows, columns, of_stream, scaling)
            yield f"norm {rows} x {columns}, stream={of_stream}, scaling={scaling}", given


def norm(
    device: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    stream_dtype: torch.dtype | None,
    scaling: int,
) -> list[torch.Tensor]:
    """Return both results and all gradients."""
    scale_dtype = stream_dtype or dtype
    branch = drawn(device, dtype, rows, columns).requires_grad_()
    scale = drawn(device, scale_dtype, columns, seed=2).requires_grad_()
    residual = None
    if stream_dtype is not None:
        residual = drawn(device, stream_dtype, rows, columns, seed=1).requires_grad_()
    both = rms_norm.add_rms_norm(branch, residual, scale, 1e-5, dtype, scaling=scaling)
    slopes = [drawn(device, one.dtype, rows, columns, seed=3 + at) for at, one in enumerate(both)]
    torch.autograd.backward(both, slopes)
    leaves = (branch, scale) if residual is None else (branch, scale, residual)
    *source, again = rms_norm.rows_to_keep(both[1], both[1], needs_it=True)
    both = (*both, rms_norm.rows_again(source, again, dtype))
    return [*both, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def gated_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield gated activations of less than a block and of more, by both activations."""
    sizes = ((1, 8), (5, 100), (3, 2100))
    for (rows, columns), tanh, again in combined(device, dtype, sizes, (False, True), (False, True)):
        given = functools.partial(gate, device, dtype, rows, columns, tanh, again)
        yield f"gated {rows} x {columns}, tanh={tanh}, again={again}", given


def gate(
    device: str, dtype: torch.dtype, rows: int, columns: int, tanh: bool, again: bool
) -> list[torch.Tensor]:
    """Return the result, and the tensors written over the product and over the result's gradient."""
    product = 2 * drawn(device, dtype, rows, 2 * columns)
    of_out = drawn(device, dtype, rows, columns, seed=1)
    out = gated_mlp.activate(product, tanh)
    gated_mlp.activate_backward(product, of_out, tanh, again=again)
    return [out, product, of_out]


def rotary_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield rotations of heads in groups and not, of three heads and of heads 2 * 3 wide; with norms and
    without. In the interpreter each kind has one dtype."""
    with patch.object(rotary, "PROGRAMS", 7):
        kinds = (
            Heads(2, 2, 8, 4), Heads(4, 1, 6, 3), Heads(3, 3, 64, 32), Heads(2, 1, 12, 4),
            Heads(2, 2, 8, 4, interleaved=True), Heads(4, 2, 10, 3, interleaved=True),
            Heads(2, 1, 8, 4, shared_angles=True), Heads(3, 1, 12, 4, gated=True),
        )  # fmt: skip
        part = kinds if asks_all(device) else kinds[dtype is torch.float32 :: 2]
        for heads, batch, from_one in combined(device, dtype, part, (1, 2), (None, False, True)):
            norms = bool(from_one) if heads.gated else from_one
            given = functools.partial(turn, device, dtype, heads, batch, norms)
            yield f"rotary {tuple(heads)}, angles of {batch}, from_one={norms}", given


def turn(
    device: str, dtype: torch.dtype, heads: Heads, batch: int, from_one: bool | None
) -> list[torch.Tensor]:
    """Return the rotated tensor, and the gradients of the product and of the norms' scales.

    Keys have other strides than queries.
    """
    length, (queries, keys, width, *_) = 5, heads
    product = drawn(device, dtype, 2 * length, heads.ends[1] + keys * width)
    before = product.clone()
    columns = heads.pairs if heads.shared_angles else 2 * heads.pairs
    cosines, sines = (drawn(device, torch.float32, batch, length, columns, seed=seed) for seed in (1, 2))
    norms = None
    if from_one is not None:
        scales = [drawn(device, dtype, width, seed=seed) for seed in (3, 4)]
        norms = Norms(*scales, 1e-6, from_one)
    turned = rotary.rotate(product, (cosines, sines), length, heads, norms)
    slopes = [
        drawn(device, dtype, 2, length, count, width, seed=5).transpose(1, 2)
        for count in (queries, keys, keys, *([queries] if heads.gated else []))
    ]
    slopes[1] = slopes[1].contiguous()
    back = rotary.rotate_backward(slopes, (cosines, sines), before, heads, norms)
    return [turned, product, *(one for one in back if one is not None)]


def loss_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield losses of less than a block of logits and of more, and of tokens that are ignored."""
    sizes = ((1, 5), (7, 1000), (3, 9001)) if asks_all(device) else ((1, 5), (2, 9001))
    for rows, columns in sizes:
        yield f"loss {rows} x {columns}", functools.partial(lose, device, dtype, rows, columns)
    for factor in (1.0, 1 / 3):
        yield f"gradients times {factor:.2f}", functools.partial(multiplied, device, dtype, factor)


def multiplied(device: str, dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
    """Return the product of more elements than a block, whose last block is not full."""
    values = drawn(device, dtype, 3, 5001)
    by_kernel = cross_entropy.multiply if USES_KERNELS[-1] else cross_entropy.reference_multiply
    by_kernel(values, torch.tensor(factor, device=device))
    return [values]


def lose(device: str, dtype: torch.dtype, rows: int, columns: int) -> list[torch.Tensor]:
    """Return the losses, and the gradient that overwrote the logits."""
    logits = 3 * drawn(device, dtype, rows, columns)
    labels = torch.arange(rows, device=device) * 991 % columns
    labels[rows // 2 :: 3] = -100 if rows > 1 else 2
    share = torch.tensor(0.25, device=device)
    run = cross_entropy.write_gradient if USES_KERNELS[-1] else cross_entropy.reference
    return [run(logits, labels, share, -100), logits]


def split_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield factors and sums of 32 bits in two parts of 16."""
    for rows, columns, scale in ((5, 300, 1.0), (300, 7, 0.3)) if dtype is not torch.float32 else ():
        given = functools.partial(split, device, dtype, rows, columns, scale)
        yield f"split {rows} x {columns}, scale={scale}", given


def split(device: str, dtype: torch.dtype, rows: int, columns: int, scale: float) -> list[torch.Tensor]:
    """Return both copies of the first part, and check that the parts' sum has 16 significant bits.

    The interpreter truncates the first part, so the second one differs from the reference.
    """
    halves = drawn(device, torch.float32, rows, 2 * columns).chunk(2, 1)
    parts = torch.zeros(rows, 3 * columns, device=device, dtype=dtype).chunk(3, 1)
    low_rank._split(halves[0], halves[1] if scale == 1 else None, parts, scale)
    exact = (halves[0] + halves[1] if scale == 1 else halves[0]) * scale
    error = (parts[0].float() + parts[1].float() - exact).abs() / exact.abs().clamp(min=1e-3)
    assert error.max() < 2.0**-14
    return [parts[2], parts[0]]


def drop_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield dropped rows of less than a block of columns and of more."""
    for rows, columns in ((5, 20), (70, 1100)):
        yield f"drop {rows} x {columns}", functools.partial(drop, device, dtype, rows, columns)


def drop(device: str, dtype: torch.dtype, rows: int, columns: int) -> list[torch.Tensor]:
    """Return the remaining elements, and those of a product added to other rows.

    A program drops elements of one row, and a tile of the product has 64. So only the product has many rows.
    """
    seed = torch.tensor([1 << 40 | 5], device=device)
    given, into = drawn(device, dtype, min(rows, 5), columns), drawn(device, dtype, rows, columns, seed=1)
    dropped = dropped_rows.drop_rows(given, seed, 2, 20_000)
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    if device == "cuda" or dtype is torch.float32:
        left, right = drawn(device, dtype, rows, 20, seed=2), drawn(device, dtype, 20, columns, seed=3) / 4
        dropped_rows.add_dropped_product(into, left, right.t(), seed, 2, 20_000)
    return [dropped, into]


def scale_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield rows with a factor for each column, with a bias and without."""
    for rows, columns, has_bias in ((1, 8, True), (9, 1100, False)):
        given = functools.partial(scale, device, dtype, rows, columns, has_bias)
        yield f"scaled {rows} x {columns}, bias={has_bias}", given


def scale(device: str, dtype: torch.dtype, rows: int, columns: int, has_bias: bool) -> list[torch.Tensor]:
    """Return the result, and the gradients of the rows and of the factor."""
    product, of_out = (drawn(device, dtype, rows, columns, seed=one) for one in (0, 1))
    factor, bias = drawn(device, torch.float32, columns, seed=2), drawn(device, dtype, columns, seed=3)
    out = decomposed.scale_columns(product, factor, bias if has_bias else None)
    return [out, *decomposed.scale_columns_backward(of_out, product, factor)]


def compare(device: str) -> bool:
    """Print a line for each case, and return True if all are close."""
    close = True
    bounds = {dtype: one for dtype, one in BOUNDS.items() if device == "cuda" or dtype is not torch.float16}
    every = (
        norm_cases, gated_cases, rotary_cases, loss_cases, split_cases, drop_cases,
        scale_cases,
    )  # fmt: skip
    for (dtype, bound), cases in itertools.product(bounds.items(), every):
        for name, run in cases(device, dtype):
            with by_kernels(False):
                expected = run()
            with by_kernels(True):
                got = run()
            error = max(map(largest_error, got, expected))
            if device == "cpu" and dtype is torch.bfloat16:
                error /= CUT_OFF
            close &= error <= bound
            print(f"{'close' if error <= bound else 'WRONG'} {error:.1e} {dtype} {name}")
    return close


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a tensor's elements, each relative to itself plus a sixteenth of the
    largest."""
    assert got.dtype is expected.dtype
    one, other = got.detach().double(), expected.detach().double()
    size = other.abs()
    return float(((one - other).abs() / (size + size.max() / 16 + 1e-30)).max())


# ---- seconds ---------------------------------------------------------------------------------------------

TOKENS, HIDDEN, INNER, VOCABULARY = 4096, 2048, 8192, 128256
LLAMA = Heads(32, 8, 64, 32)


def timed_cases() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield a name, the least bytes to move, and the function to time."""
    given = functools.partial(drawn, "cuda", torch.bfloat16)
    stream, branch, scale = given(TOKENS, HIDDEN), given(TOKENS, HIDDEN, seed=1), given(HIDDEN)
    row = 2 * TOKENS * HIDDEN
    _, _, roots = rms_norm._add_and_norm(branch, stream, scale, 1e-5, torch.bfloat16, False)
    yield (
        "add_rms_norm",
        4 * row,
        lambda: rms_norm._add_and_norm(branch, stream, scale, 1e-5, torch.bfloat16, False),
    )
    yield "rms_norm", 2 * row, lambda: rms_norm._norm(stream, scale, 1e-5, torch.bfloat16, False)
    yield (
        "rms_norm_backward with sums",
        4 * row,
        lambda: rms_norm._norm_backward(branch, stream, stream, scale, roots, False, torch.bfloat16, True),
    )
    product, of_out = given(TOKENS, 2 * INNER), given(TOKENS, INNER)
    inner = 2 * TOKENS * INNER
    yield "gate", 3 * inner, lambda: gated_mlp.activate(product, False)
    yield "gate_backward", 6 * inner, lambda: gated_mlp.activate_backward(product, of_out, False, again=True)
    logits, labels = given(1024, VOCABULARY), torch.arange(1024, device="cuda")
    share = torch.tensor(1 / TOKENS, device="cuda")
    yield (
        "cross_entropy_gradient of 1024 tokens",
        3 * logits.nbytes,
        lambda: (cross_entropy.write_gradient if USES_KERNELS[-1] else cross_entropy.reference)(
            logits, labels, share, -100
        ),
    )
    width = LLAMA.width
    whole = given(TOKENS, (LLAMA.queries + 2 * LLAMA.keys) * width)
    angles = given(1, TOKENS // 2, width), given(1, TOKENS // 2, width)
    for name, norms in (("", None), ("norm_and_", Norms(given(width), given(width), 1e-6, False))):
        moved = 2 * 2 * TOKENS * (LLAMA.queries + LLAMA.keys) * width
        yield (
            f"{name}rotate",
            moved,
            functools.partial(rotary.rotate, whole, angles, TOKENS // 2, LLAMA, norms),
        )
        slopes = [given(2, TOKENS // 2, count, width).transpose(1, 2) for count in (32, 8, 8)]
        back = functools.partial(rotary.rotate_backward, slopes, angles, whole, LLAMA, norms)
        yield f"{name}rotate_backward", 2 * whole.nbytes + (moved // 2 if norms else 0), back


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the median of 20 runs."""
    times = []
    for repeat in range(25):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        torch.cuda.synchronize()
        times += [events[0].elapsed_time(events[1])] if repeat >= 5 else []
    return statistics.median(times)


def time_all() -> None:
    """Print a line of JSON for each operation, by the kernel and by plain torch."""
    for name, moved, run in timed_cases():
        line: dict[str, Any] = {"operation": name}
        for way, wanted in (("kernel", True), ("torch", False)):
            with by_kernels(wanted):
                taken = milliseconds(run)
            line |= {f"{way} ms": round(taken, 4), f"{way} GB/s": round(moved / taken / 1e6)}
        print(json.dumps(line))


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if asked == "cpu":
        launch_on_the_cpu()
    right = compare(asked)
    if "time" in sys.argv[2:]:
        time_all()
    sys.exit(0 if right else 1)
