"""Layers in stages: laws 1 and 3 against real gloo processes, what is refused, and what a step takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from aligned import Event, compare, peak
from gloo_ranks import Case, Ran, run_ranks, trained
from reported import foreseen
from small_models import small_job
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.sharded import stages
from snugfit.rehearsal.trace.trace import RECEIVE, SEND, Trace
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from test_ranks import to_last_birth, unheard, without_own

JOB = small_job("llama", 4, batch_size=16, clip=1.0)
"""Four layers, so that four stages have one each."""

TWO = (
    "pipeline(2) + micro_batches(4)",
    "pipeline(2, schedule=gpipe) + micro_batches(4)",
    "pipeline(2) + micro_batches(2) + every_layer + bf16",
    "pipeline(2, schedule=gpipe) + micro_batches(8) + bf16 + adamw_fused",
)
FOUR = (
    "pipeline(4) + micro_batches(8)",
    "pipeline(4, schedule=gpipe) + micro_batches(4) + every_layer",
    "pipeline(2) + ddp + micro_batches(4)",
    "pipeline(2) + fsdp + micro_batches(4)",
)
EVERY = [*((2, recipe) for recipe in TWO), *((4, recipe) for recipe in FOUR)]


@functools.cache
def real(ranks: int) -> dict[tuple[str, int], Ran]:
    """What each of so many ranks did under every recipe; they are started once."""
    recipes = TWO if ranks == 2 else FOUR
    cases: list[Case] = [(JOB, recipe) for recipe in recipes]
    return {
        (recipe, rank): ran
        for rank, of_rank in enumerate(run_ranks(ranks, cases))
        for recipe, ran in zip(recipes, of_rank, strict=True)
    }


@functools.cache
def rehearsed(ranks: int, recipe: str, rank: int) -> Trace:
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    return rehearse(job_of_rank(JOB, setup), setup, CpuPolicy(), rank=rank)


def built(events: Sequence[Event]) -> list[Event]:
    """Without what is dropped while the model is built: a CPU's process builds the whole model where it
    trains, and a GPU's sees its stage alone. Nor with what DDP joins the weights in to compare them, of which
    gloo's thread lets go."""
    dropped = {event.block for event in events if event.nbytes < 0 and event.phase == "build"}
    joined = {
        event.block
        for event in events
        if event.phase == "build" and any("flatten_dense" in one for one in event.operators)
    }
    return [event for event in events if event.block not in dropped | joined]


def hold(ranks: int, recipe: str, rank: int) -> None:
    """Law 1 for one of so many ranks."""
    trace = built(without_own(foreseen(rehearsed(ranks, recipe, rank))))
    account = unheard(built(without_own(real(ranks)[recipe, rank].account)), trace)
    comparison = compare(to_last_birth(account), to_last_birth(trace))
    assert comparison.similarity == 1.0, f"{recipe}, rank {rank} of {ranks}: {comparison}"
    assert peak(account) == peak(trace)


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "recipe"), EVERY)
def test_each_real_stage_allocates_what_its_trace_says(ranks: int, recipe: str) -> None:
    for rank in range(ranks):
        hold(ranks, recipe, rank)


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "recipe"), EVERY)
def test_stages_train_as_one_process_does(ranks: int, recipe: str) -> None:
    """Law 3: losses of three steps, and each stage's weights after them."""
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    alone = [word for word in recipe.split(" + ") if not word.startswith(("pipeline", "ddp", "fsdp"))]
    losses, weights = trained(job_of_rank(JOB, setup), Recipe.parse(" + ".join(alone)).setup())
    seen: set[str] = set()
    for rank in range(ranks):
        ran = real(ranks)[recipe, rank]
        assert ran.losses == pytest.approx(losses, rel=1e-5)
        for name, weight in ran.weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5)
        seen |= set(ran.weights)
    assert seen == set(weights)


@pytest.mark.whole
def test_what_is_sent_and_not_held_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = stages.instead_of_others
    monkeypatch.setattr(
        "snugfit.rehearsal.sharded.ranks.instead_of_others", lambda *, until_waited: plain(until_waited=True)
    )
    rehearsed.cache_clear()
    with pytest.raises(AssertionError):
        hold(2, TWO[1], 0)
    rehearsed.cache_clear()


def test_stages_send_each_micro_batch_once_each_way() -> None:
    first, middle, last = (rehearsed(4, FOUR[0], rank) for rank in (0, 1, 3))
    assert sent(first) == {(SEND, 1): 8, (RECEIVE, 1): 8}
    assert sent(middle) == {(SEND, 1): 8, (RECEIVE, 1): 8, (SEND, -1): 8, (RECEIVE, -1): 8}
    assert sent(last) == {(SEND, -1): 8, (RECEIVE, -1): 8}


def sent(trace: Trace) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for kernel in trace.kernels:
        if kernel.operator in (SEND, RECEIVE):
            key = (kernel.operator, kernel.peers[1])
            counts[key] = counts.get(key, 0) + 1
    return counts
