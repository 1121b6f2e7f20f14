"""Scratch memory of kernels, beside histories of an H200's allocator (torch 2.11).

The runs are a random mixture of experts and torch's Adafactor. Without these rules their predicted
reserved bytes were wrong.

Consecutive frees are compared in order, too, since each frees a certain buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from snugfit.rehearsal.device.buffers import OUTPUTS
from snugfit.rehearsal.device.overrides import in_force
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.trace.trace import Trace

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def taken(func: Any, *arguments: Any, **more: Any) -> list[int]:
    """Return the allocated and freed bytes of a call in order, with 0 in place of the outputs."""
    out = func(*arguments, **more)
    scratch = CudaPolicy().scratch(func._schema.name, arguments, out)
    return [0 if (name, nbytes) == OUTPUTS else nbytes for name, nbytes in scratch]


TOKENS, INDICES = 1854, 1854 * 8
"""Tokens of the recorded mixture of experts, and the bytes of their indices."""

GATHERED = [
    *(0, INDICES, INDICES, -INDICES),  # the output; remainder, product
    *(INDICES, INDICES, INDICES, 1),  # two for the sorted, a range, a single tile's byte
    *(-1, -INDICES, -INDICES, -INDICES, -INDICES),
]


@pytest.mark.parametrize("shape", [(TOKENS, 640), (TOKENS,)])
def test_a_gradient_is_scattered_in_sorted_order(shape: Sequence[int]) -> None:
    index = meta(TOKENS, dtype=torch.long)
    assert taken(aten.index_put.default, meta(*shape), [index], meta(*shape), True) == GATHERED


def test_indices_only_written_are_not_sorted() -> None:
    index = meta(TOKENS, dtype=torch.long)
    assert taken(aten.index_put.default, meta(TOKENS, 640), [index], meta(TOKENS, 640)) == []


def test_a_scattered_row_is_expanded_and_several_indices_are_one() -> None:
    """The source has a `linearIndex` of two dimensions, and expands a value that fills many rows."""
    indices = [meta(5000, dtype=torch.long), meta(5000, dtype=torch.long)]
    found = taken(aten.index_put.default, meta(300, 200, 16), indices, meta(16), True)
    each, value = 5000 * 8, 5000 * 16 * 4
    assert found[:8] == [0, each, each, -each, each, each, -each, -each]
    assert found[8] == value
    sort = found[12]
    assert 2 * each < sort < 2 * each + 20_000  # two passes over 16 bits of 60,000 rows
    assert sum(found) == 0


def test_a_short_sort_takes_a_range() -> None:
    assert taken(aten.sort.default, meta(TOKENS, dtype=torch.long)) == [0, INDICES, -INDICES]


def test_a_long_sort_is_by_radix() -> None:
    """4,096 indices of an embedding's backward took 83,455 bytes in the recorded Llama."""
    count = 4097
    found = taken(aten.sort.default, meta(count, dtype=torch.long))
    assert found[:2] == [0, count * 8]
    assert found[2] == pytest.approx(83_455, abs=512)
    assert sum(found) == 0


def test_a_scan_of_few_numbers_takes_its_state() -> None:
    assert taken(aten.cumsum.default, meta(4, dtype=torch.int), 0, dtype=torch.int) == [0, 1023, -1023]
    assert taken(aten.cumsum.default, meta(5, 512, dtype=torch.long), 1) == [0]


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((2048, 2176), [35_651_584]),  # a projection: the peak of the requested bytes
        ((256_000, 2176), [139_264_000, 139_264_000]),  # an embedding beyond 2 GiB, by halves
    ],
)
def test_norms_of_columns_hold_partial_sums(shape: Sequence[int], seen: list[int]) -> None:
    found = taken(aten.linalg_vector_norm.default, meta(*shape), 2, [-2], True)
    assert found == [each for buffer in seen for each in (buffer, 68, -68, -buffer)]


def test_sums_in_half_precision_beyond_two_gigabytes_are_kept_in_fp32() -> None:
    """The source calls it `AccumulationBuffer`."""
    found = taken(aten.sum.dim_IntList, meta(600_000, 2176, dtype=torch.bfloat16), [0])
    assert (found[0], found[-1], sum(found)) == (2176 * 4, -2176 * 4, 0)


# ---- in a rehearsal --------------------------------------------------------------------------------------


def trace_of(run: Any) -> Trace:
    policy = CudaPolicy()
    recorder = Recorder(policy, 1)
    with in_force(policy) as notes, recorder:
        recorder.step_begins(0)
        recorder.phase("forward")
        run(recorder)
        recorder.step_ends(0)
    return recorder.recording(notes.attention).trace


@pytest.mark.parametrize("autocast", [False, True])
def test_a_gathered_gradient_is_written_in_place(autocast: bool) -> None:
    """Autocast wraps `index_put` and `scatter_add`, enabled or not.

    A tensor with a single reference in the derivative keeps it on the way through the wrapper. An update
    out of place took one matrix too many.
    """
    rows = meta(TOKENS, 640).requires_grad_()

    def run(recorder: Recorder) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            gathered = (rows * 2)[meta(TOKENS, dtype=torch.long)]
            picked = gathered.gather(0, meta(10, 640, dtype=torch.long))
        recorder.phase("backward")
        picked.sum().backward()

    made = [block.operator for block in trace_of(run).blocks]
    assert "aten::index_put: sorted" in made
    assert not {"aten::index_put", "aten::scatter_add"} & set(made)


@pytest.mark.parametrize(("columns", "padded"), [(216, 0), (214, 216)])
def test_rows_of_a_mask_are_stored_in_eights(columns: int, padded: int) -> None:
    """The recorded T5 used a mask of 216 columns unchanged."""
    query, key = meta(2, 10, 64, 64), meta(2, 10, columns, 64)
    mask = meta(2, 1, 64, columns)

    def run(recorder: Recorder) -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, key, mask)

    found = [block.nbytes for block in trace_of(run).blocks if block.operator == "aten::constant_pad_nd"]
    assert found == ([2 * 64 * padded * 4] if padded else [])


def test_the_triangle_of_causal_attention_dies_when_it_is_a_mask() -> None:
    """Recorded: 3,437,316 bytes of booleans were freed before the scores were allocated."""
    query, key = meta(1, 5, TOKENS, 128), meta(1, 1, TOKENS, 128)

    def run(recorder: Recorder) -> None:
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(query, key, key, is_causal=True, enable_gqa=True)

    trace = trace_of(run)
    assert "math" in trace.attention
    triangle = next(place for place, block in enumerate(trace.blocks) if block.operator == "aten::tril")
    scores = next(place for place, block in enumerate(trace.blocks) if block.operator == "aten::bmm")
    assert trace.blocks[triangle].nbytes == 3_437_316
    assert trace.events.index(-triangle - 1) < trace.events.index(scores + 1)


@pytest.mark.parametrize(("elements", "partials"), [(1_204_224, 294), (3_411_968, 834)])
def test_the_largest_of_all_is_looked_for_in_numbers_of_its_own_size(elements: int, partials: int) -> None:
    """torchao searches the maximum in bfloat16 this way on an H100."""
    found = taken(aten.max.default, meta(elements, dtype=torch.bfloat16))
    assert found == [0, partials, 4, -4, -partials]


def efficient_backward(dtype: torch.dtype, width: int, capability: tuple[int, int] = (9, 0)) -> list[int]:
    operand, row = meta(1, 11, 924, width, dtype=dtype), meta(1, 11, 928)
    scratch = CudaPolicy(capability=capability).scratch(
        "aten::_scaled_dot_product_efficient_attention_backward", (operand,) * 4 + (None, operand, row), ()
    )
    return [nbytes for _, nbytes in scratch]


PRODUCT, ROW, WIDE = 5_203_968, 40_656, 5_769_984
"""Bytes in a layer of the recorded Mistral: a query in fp32, one number per row, the workspace."""


def test_efficient_attention_works_in_larger_tiles_where_heads_are_wide() -> None:
    """Recorded on an H100 with heads 128 wide. Tiles have 64 rows if 128 do not fit into shared memory.
    Heads 64 wide always have 64 rows."""
    deltas = [PRODUCT, ROW, ROW, -ROW, -PRODUCT]
    assert efficient_backward(torch.float32, 128) == [*deltas, WIDE, -ROW, -WIDE]
    small = 11 * 15 * 2 * (64 * 64 * 4 + 16)
    assert efficient_backward(torch.float32, 128, (8, 9))[5] == small
    assert efficient_backward(torch.float32, 64)[5] == small // 2


def test_in_16_bits_its_kernel_makes_what_others_make_in_32() -> None:
    """The source allocates nothing of a query's size beside the workspace."""
    tiles = 11 * 8 * (128 * 128 * 4 + 16)
    assert efficient_backward(torch.bfloat16, 128) == [ROW, tiles, -ROW, -tiles]


def test_a_grouped_product_has_pointers_and_maps_of_its_groups() -> None:
    """Steps of Qwen3-30B-A3B, with 128 experts, requested 75,264 bytes for them on an H200
    (`results/h200-2026-11-30/experts.json`)."""
    rows, weights = meta(4096, 64, dtype=torch.bfloat16), meta(128, 64, 32, dtype=torch.bfloat16)
    ends = meta(128, dtype=torch.int32)
    buffers = taken(aten._grouped_mm.default, rows, weights, ends)
    assert buffers == [0, 7680, 67584, -67584, -7680]
    assert sum(size for size in buffers if size > 0) == 75_264
    # Ampere launches a product for each group.
    arguments, out = (rows, weights, ends), meta(4096, 32, dtype=torch.bfloat16)
    assert CudaPolicy(capability=(8, 0)).scratch("aten::_grouped_mm", arguments, out) == (OUTPUTS,)
