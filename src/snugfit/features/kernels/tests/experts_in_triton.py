"""The kernels of experts against their references in plain torch.

Run as a process, on the CPU in Triton's interpreter, or with the argument `cuda` on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch

from snugfit.features.kernels.decoders.experts import activation, grouped_linear, mxfp4, routing
from snugfit.features.kernels.decoders.experts.activation import CLAMPED, SILU, TANH, Gate
from snugfit.features.kernels.decoders.experts.routing import Routing
from snugfit.features.kernels.operations.programs import experts
from snugfit.features.kernels.operations.programs.mxfp4 import unpack_mxfp4

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-5}
"""Largest allowed error by dtype, relative to the largest number. The interpreter truncates to bfloat16."""

GATES = Gate(SILU), Gate(TANH), Gate(CLAMPED, 1.702, 1.5)
SIZES = (1, 8), (7, 100), (3, 1100)


@contextlib.contextmanager
def by_kernels(wanted: bool) -> Iterator[None]:
    """Run kernels within this context, or plain torch."""
    with contextlib.ExitStack() as undo:
        for file, names in ((activation, ("gate_experts", "gate_experts_backward")),
                            (routing, ("combine_experts",)),
                            (grouped_linear, ("add_low_rank_experts",))):  # fmt: skip
            undo.enter_context(patch.object(file, "has_kernel", lambda tensor: wanted))
            for name in names:
                undo.enter_context(patch.object(file, f"_{name.upper()}", getattr(experts, name)))
        yield


def gated(device: str, dtype: torch.dtype, rows: int, columns: int, gate: Gate) -> list[torch.Tensor]:
    """Return the output of a gate, and all that its backward pass writes."""
    draw = torch.Generator().manual_seed(0)
    product = torch.randn(rows, 2 * columns, generator=draw).to(device, dtype)
    of_out = torch.randn(rows, columns, generator=draw).to(device, dtype)
    weights = torch.rand(rows, generator=draw).to(device, dtype)
    out = gate.apply(product)
    return [out, gate.backward(product, of_out, weights), product, of_out]


def combined(device: str, dtype: torch.dtype, rows: int, columns: int, weighted: bool) -> list[torch.Tensor]:
    """Return the sums of each token's rows."""
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(5, (rows, 3), generator=draw).to(device)
    given = torch.randn(3 * rows, columns, generator=draw).to(device, dtype)
    weights = torch.rand(rows, 3, generator=draw).to(device, dtype) if weighted else None
    return [Routing.start(index, 5).combine(given, weights)]


def updated(device: str, dtype: torch.dtype, rows: int, columns: int, rank: int) -> list[torch.Tensor]:
    """Return rows to which low-rank updates of their experts were added; some experts have no rows."""
    # torch's grouped product takes aligned rows.
    columns += -columns % 8
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(36, (rows, 30), generator=draw).to(device) // 3
    given = torch.randn(30 * rows, columns, generator=draw).to(device, dtype)
    left = torch.randn(30 * rows, rank, generator=draw).to(device, dtype)
    matrices = torch.randn(13, rank, columns, generator=draw).to(device, dtype)
    grouped_linear.add_low_rank(given, left, matrices, Routing.start(index, 13).ends)
    return [given]


def is_near(got: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    """Return True if no error exceeds the bound."""
    return bool((got - expected).abs().max() <= bound * max(1.0, float(expected.abs().max())))


def compare(device: str) -> bool:
    """Return True if all kernels write the numbers of their references."""
    right = True
    for dtype, (rows, columns) in itertools.product(BOUNDS, SIZES):
        cases = [(f"gate {gate}", gated, gate) for gate in GATES]
        cases += [(f"combine {weighted}", combined, weighted) for weighted in (False, True)]  # type: ignore[list-item]
        # Triton's interpreter multiplies the bits of bfloat16 as integers.
        if device == "cuda" or dtype is torch.float32:
            cases += [(f"update {rank}", updated, rank) for rank in (8, 24)]  # type: ignore[list-item]
        for name, run, setting in cases:
            pair = []
            for wanted in (True, False):
                with by_kernels(wanted):
                    pair.append(run(device, dtype, rows, columns, setting))
            for number, (got, expected) in enumerate(zip(*pair, strict=True)):
                if not is_near(got.double(), expected.double(), BOUNDS[dtype]):
                    print(f"{name} {rows} x {columns} {dtype}: tensor {number} differs")
                    right = False
    right &= all(unpacks(device, dtype, blocks) for dtype in BOUNDS for blocks in (1, 7, 90))
    print("compared")
    return right


def unpacks(device: str, dtype: torch.dtype, blocks: int) -> bool:
    """Return True if weights of MXFP4 are unpacked bit for bit, with scales up to 254."""
    draw = torch.Generator().manual_seed(blocks)
    packed = torch.randint(256, (3, 5, blocks, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(255, (3, 5, blocks), generator=draw, dtype=torch.uint8)
    if device == "cuda" or dtype is torch.float32:
        scales.view(-1)[:4] = torch.tensor([0, 1, 2, 254], dtype=torch.uint8)
    else:  # the interpreter drops subnormal numbers of bfloat16
        scales.clamp_(4, 250)
    packed, scales = packed.to(device), scales.to(device)
    out = torch.empty(3, 5, 32 * blocks, dtype=dtype, device=device)
    unpack_mxfp4(packed, scales, out=out)
    if torch.equal(out, mxfp4.reference(packed, scales, dtype)):
        return True
    print(f"MXFP4 of {blocks} blocks in {dtype} differs")
    return False


if __name__ == "__main__":
    sys.exit(0 if compare(sys.argv[1] if len(sys.argv) > 1 else "cpu") else 1)
