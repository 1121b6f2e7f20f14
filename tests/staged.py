"""Compare real pipeline stages with rehearsed ones: allocations (law 1) and training (law 3)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from aligned import Event, compare, peak
from gloo_ranks import Case, Ran, run_ranks, trained
from rank_events import to_last_birth, unheard, without_own
from reported import foreseen
from snugfit.job.job import Job
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus

Cases = tuple[tuple[int, Job, str], ...]
"""Number of ranks, the job of all ranks together, and the recipe."""


@functools.cache
def real(ranks: int, every: Cases) -> dict[tuple[Job, str, int], Ran]:
    """Return the results of each rank in every case with this number of ranks; the processes start once."""
    cases: list[Case] = [(job, recipe) for many, job, recipe in every if many == ranks]
    return {
        (*case, rank): ran
        for rank, of_rank in enumerate(run_ranks(ranks, cases))
        for case, ran in zip(cases, of_rank, strict=True)
    }


@functools.cache
def rehearsed(ranks: int, recipe: str, rank: int, job: Job) -> Trace:
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    return rehearse(job_of_rank(job, setup), setup, CpuPolicy(), rank=rank)


def built(events: Sequence[Event]) -> list[Event]:
    """Return the events without blocks that are freed while the model is built. A CPU process builds the
    whole model; a GPU's process builds its stage alone. Also drop the buffer that DDP joins weights in to
    compare them, which gloo's thread frees."""
    dropped = {event.block for event in events if event.nbytes < 0 and event.phase == "build"}
    joined = {
        event.block
        for event in events
        if event.phase == "build" and any("flatten_dense" in one for one in event.operators)
    }
    return [event for event in events if event.block not in dropped | joined]


def hold(every: Cases, ranks: int, job: Job, recipe: str, rank: int) -> None:
    """Assert law 1 for one of so many ranks."""
    trace = built(without_own(foreseen(rehearsed(ranks, recipe, rank, job))))
    account = unheard(built(without_own(real(ranks, every)[job, recipe, rank].account)), trace)
    comparison = compare(to_last_birth(account), to_last_birth(trace))
    assert comparison.similarity == 1.0, f"{recipe}, rank {rank} of {ranks}: {comparison}"
    assert peak(account) == peak(trace)


def hold_training(every: Cases, ranks: int, job: Job, recipe: str) -> None:
    """Assert law 3: losses of three steps, and each stage's weights after them."""
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    alone = [
        word for word in recipe.split(" + ") if not word.startswith(("pipeline", "tensor", "ddp", "fsdp"))
    ]
    exact = "fsdp" not in recipe or "bf16" not in recipe  # with shards bf16 is not autocast
    losses, weights = trained(job_of_rank(job, setup), Recipe.parse(" + ".join(alone)).setup())
    seen: set[str] = set()
    for rank in range(ranks):
        ran = real(ranks, every)[job, recipe, rank]
        assert ran.losses == pytest.approx(losses, rel=1e-5 if exact else 2e-2)
        for name, weight in ran.weights.items() if exact else ():
            torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5)
        seen |= set(ran.weights)
    assert seen == set(weights)
