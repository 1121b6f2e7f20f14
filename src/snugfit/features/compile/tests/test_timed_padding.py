"""Memory of Inductor while it times products without and with padding, as recorded on an H100 (torch
2.11)."""

from __future__ import annotations

import pytest
import torch

from small_models import small_job
from snugfit.features.compile.simulation.timed_padding import Operand, PaddedProduct, time_padding
from snugfit.rehearsal.device.overrides import in_force
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record.first_launches import known_settings
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

FLUSHED, WORKSPACE = 52_428_800, 33_554_432
POLICY = CudaPolicy(cache_bytes=FLUSHED)


def matrix(*shape: int, written_padded: bool = False) -> Operand:
    return Operand(shape, torch.empty(shape, device="meta").stride(), torch.float32, written_padded)


def times(products: list[PaddedProduct], timed: set[str]) -> list[int]:
    """Return allocated bytes, and freed ones as negative numbers, in order."""
    recorder = Recorder(POLICY, 1)
    with in_force(POLICY) as notes, recorder:
        recorder.step_begins(0)
        recorder.phase("forward")
        time_padding(POLICY, products, timed)
        recorder.step_ends(0)
    trace = recorder.recording(notes.attention).trace
    return [trace.blocks[abs(event) - 1].nbytes * (1 if event > 0 else -1) for event in trace.events]


ADAPTER = PaddedProduct("key", "unpadded", "mm", matrix(8, 394), matrix(394, 1408, written_padded=True), None)
"""The first timed product of a ViT with adapters: the gradient of an adapter over 2 x 197 tokens."""


def test_a_product_is_run_as_it_is_and_padded_beside_a_flushed_cache() -> None:
    first, second, padded, wider, out = 12_608, 2_219_008, 2_230_272, 12_672, 45_056
    once = [wider, out, -wider, -out]
    assert times([ADAPTER], set()) == [
        *(first, second, padded),
        *(out, WORKSPACE, -out, FLUSHED, out, -out, -FLUSHED),
        *(*once, FLUSHED, *once, -FLUSHED),
        *(-second, -first, -padded),
    ]  # fmt: skip


def test_what_was_timed_is_not_timed_again() -> None:
    timed = set[str]()
    times([ADAPTER], timed)
    assert times([ADAPTER], timed) == []
    assert FLUSHED not in times([ADAPTER._replace(key="other")], timed)[:4]
    with known_settings():
        assert times([ADAPTER], set()) == []


def compiled(sequence_length: int) -> Trace:
    job = small_job("llama", 2, batch_size=3, sequence_length=sequence_length)
    return rehearse(job, Recipe.parse("compiled + bf16").setup(), POLICY)


def padded(trace: Trace, step: int) -> int:
    return sum(block.operator == "aten::constant_pad_nd" and block.step == step for block in trace.blocks)


@pytest.mark.whole
@pytest.mark.parametrize(("length", "pads"), slow_but([(17, True), (16, False)], 1))
def test_products_are_timed_where_sizes_are_no_multiple_of_16_bytes(length: int, pads: bool) -> None:
    """Only the first step benchmarks matrix products. The padding itself occurs in every step."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    trace = compiled(length)
    assert (padded(trace, 0) > padded(trace, 1)) is pads
    assert padded(trace, 1) == padded(trace, 2)
