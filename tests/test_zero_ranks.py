"""DeepSpeed's second and third stage on several ranks: law 1 against real gloo processes on the CPU.

As `test_ranks.py`: of two and four ranks that train a small model for real, each allocation and free of all
steps is the rehearsal's, in order. Building is not compared: on a CPU DeepSpeed makes there what on a GPU is
on the host, in the same memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from aligned import Event, compare, peak
from gloo_ranks import Ran, losses_of, run_ranks
from snugfit.errors import UsageError
from snugfit.prediction.pinned import host_state_bytes, pinned_bytes
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Trace
from snugfit.results.footprint import Kind
from snugfit.step.wishes.engine import config
from snugfit.step.wishes.engine.config import engine_config
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from test_ranks import BATCH, case, rehearsed, to_last_birth, unheard, without_own
from test_sharding import with_deepspeed

TWO = [
    ("llama", "zero2(offload=none)"),
    ("llama", "zero3(offload=none) + bf16"),
    ("bert", "zero2(offload=none) + bf16 + micro_batches(2)"),
    ("bert", "zero3(offload=none) + micro_batches(2)"),
    ("llama", "zero3(offload=none) + every_layer + bf16"),
]
FOUR = [("bert", "zero2(offload=none)"), ("bert", "zero3(offload=none) + bf16")]


@contextlib.contextmanager
def few_weights_live() -> Iterator[None]:
    """Within it, the third stage drops weights once a module has computed, as it does with a large model."""

    section = config.zero_section

    def sparing(wish: Any, *more: Any) -> dict[str, Any]:
        limits = {"stage3_max_live_parameters": 10_000, "stage3_max_reuse_distance": 10_000}
        return {**section(wish, *more), **limits}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "zero_section", sparing)
        yield


@functools.cache
def real(ranks: int) -> dict[tuple[str, str, int], Ran]:
    """What each of so many ranks did in every case; they are started once."""
    cases = TWO if ranks == 2 else FOUR
    ran = run_ranks(ranks, [case(*one) for one in cases], within="test_zero_ranks:few_weights_live")
    return {
        (*one, rank): what
        for rank, of_rank in enumerate(ran)
        for one, what in zip(cases, of_rank, strict=True)
    }


def of_steps(events: Sequence[Event]) -> list[Event]:
    """Those of blocks that are made in a step."""
    built = {event.block for event in events if event.nbytes > 0 and event.step < 0}
    return [event for event in events if event.block not in built]


def hold(ranks: int, family: str, recipe: str, rank: int) -> None:
    """Law 1 for one of so many ranks."""
    with few_weights_live():
        trace = of_steps(without_own(rehearsed(ranks, family, recipe, rank)))
    ran = real(ranks)[family, recipe, rank]
    account = unheard(of_steps(without_own(ran.account)), trace, ran.exchanged)
    comparison = compare(to_last_birth(account), to_last_birth(trace))
    assert comparison.similarity == 1.0, f"{family}, {recipe}, rank {rank} of {ranks}: {comparison}"
    assert peak(account) == peak(trace)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), TWO)
def test_one_of_two_real_ranks_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold(2, family, recipe, 0)
    hold(2, family, recipe, 1)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), FOUR)
def test_so_does_one_of_four(family: str, recipe: str) -> None:
    hold(4, family, recipe, 0)
    hold(4, family, recipe, 3)
