"""One rank of several: law 1 against real gloo processes on the CPU.

Of two and four ranks that train a small model for real, the first one's allocator reports (`gloo_ranks.py`)
every allocation and free from the first weight to the last step, and the rehearsal of that rank names the
same, in order. What stays different, and nothing else may:

- gloo's buffers, and those of the CPU's kernels (`OWN`, and `cpu_scratch.py`);
- blocks below `LEAST` bytes: DDP's lists of sizes and indices, which a GPU's process has on the host too;
- frees that the profiler does not hear of, since gloo's thread was the last to let go: only of tensors that
  were exchanged, and only where it hears of none at all (`unheard`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from aligned import Event, compare, peak
from cpu_scratch import compared
from gloo_ranks import Case, real_accounts
from reported import foreseen
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.record.allocations import Allocations
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.sharded import collectives
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus

LEAST = 1024
BATCH = 8

OWN: dict[str, Callable[[Event], bool]] = {
    "gloo gathers into a buffer of its own": lambda event: (
        "c10d::_allgather_base_" in event.operators or any(one.startswith("gloo:") for one in event.operators)
    ),
    "gloo scatters sums from a copy": lambda event: (
        "c10d::_reduce_scatter_base_" in event.operators and "aten::clone" in event.operators
    ),
    "the CPU chunks by way of copies and zeros": lambda event: "aten::_chunk_cat" in event.operators,
}
"""What only the CPU's ranks allocate, by the reason."""

EXCHANGED = ("FSDP::all_gather", "FSDP::post_backward_reduce", "DistributedDataParallel.forward", "aten::cat")
"""Operators in which tensors are made that gloo holds."""

TWO = [
    (family, recipe)
    for family, recipes in {
        "llama": (
            "ddp", "ddp(bucket_views=true) + bf16", "ddp + micro_batches(2)", "fsdp", "fsdp + bf16",
            "fsdp(reshard=false)", "fsdp + micro_batches(2)", "fsdp + every_layer + bf16", "zero1",
        ),
        "bert": (
            "ddp + bf16", "ddp(bucket_views=true)", "fsdp", "fsdp(reshard=false) + bf16 + micro_batches(2)",
            "zero1(bucket_views=true) + bf16 + adamw_fused + micro_batches(2)",
        ),
    }.items()
    for recipe in recipes
]  # fmt: skip
FOUR = [("llama", "hsdp(2)"), ("llama", "hsdp(2, reshard=false) + bf16"), ("bert", "fsdp + bf16")]


def case(family: str, recipe: str) -> Case:
    from test_law_rehearsed_equals_real import job

    return replace(job(family), batch_size=BATCH), recipe


@functools.cache
def real(ranks: int) -> dict[tuple[str, str], list[Event]]:
    """What the allocator did in every case of so many ranks, which are started once."""
    cases = TWO if ranks == 2 else FOUR
    accounts = real_accounts(ranks, [case(*one) for one in cases])
    return dict(zip(cases, accounts, strict=True))


def rehearsed(ranks: int, family: str, recipe: str) -> list[Event]:
    job, _ = case(family, recipe)
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    return foreseen(rehearse(job_of_rank(job, setup), setup, CpuPolicy()))


def without_own(events: Sequence[Event]) -> list[Event]:
    kept = [event for event in compared(events) if not any(is_own(event) for is_own in OWN.values())]
    return [event for event in kept if abs(event.nbytes) >= LEAST]


def births(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.nbytes > 0]


def to_last_birth(events: Sequence[Event]) -> list[Event]:
    """Without what the end of the run frees."""
    last = max(place for place, event in enumerate(events) if event.nbytes > 0)
    return [*events[: last + 1]]


def unheard(account: Sequence[Event], trace: Sequence[Event]) -> list[Event]:
    """The account with those frees where the trace has them that nobody heard of, of tensors that were
    exchanged. It is left as it is where births are not alike."""
    if [birth.nbytes for birth in births(account)] != [birth.nbytes for birth in births(trace)]:
        return [*account]
    dead = {event.block for event in account if event.nbytes < 0}
    partner = {two.block: one for one, two in zip(births(account), births(trace), strict=True)}
    missing: dict[int, list[Event]] = {}
    born = 0
    for event in trace:
        born += event.nbytes > 0
        one = partner[event.block]
        if event.nbytes < 0 and one.block not in dead and _is_exchanged(one):
            missing.setdefault(born, []).append(replace(one, nbytes=-one.nbytes))
    completed, born = [], 0
    for event in account:
        if event.nbytes > 0:
            completed += missing.pop(born, [])
            born += 1
        completed.append(event)
    return completed


def _is_exchanged(event: Event) -> bool:
    return any(one.startswith(EXCHANGED) for one in event.operators)


def hold(ranks: int, family: str, recipe: str) -> None:
    """Law 1 for the first of so many ranks."""
    trace = without_own(rehearsed(ranks, family, recipe))
    account = unheard(without_own(real(ranks)[family, recipe]), trace)
    comparison = compare(to_last_birth(account), to_last_birth(trace))
    assert comparison.similarity == 1.0, f"{family}, {recipe} on {ranks}: {comparison}"
    assert peak(account) == peak(trace)


@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), TWO)
def test_one_of_two_real_ranks_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold(2, family, recipe)


@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), FOUR)
def test_so_does_one_of_four(family: str, recipe: str) -> None:
    hold(4, family, recipe)


# ---- planted faults --------------------------------------------------------------------------------------


@pytest.mark.whole
def test_a_gathered_tensor_that_is_not_freed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    carried, kept = collectives.carried, []

    def keep(*arguments: Any) -> list[torch.Tensor]:
        found = carried(*arguments)
        kept.append(found)
        return found

    monkeypatch.setattr(collectives, "carried", keep)
    with pytest.raises(AssertionError):
        hold(2, "llama", "fsdp")


@pytest.mark.whole
def test_gathered_weights_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = Allocations.resize
    monkeypatch.setattr(
        Allocations, "resize", lambda self, storage, size: size and resize(self, storage, size)
    )
    with pytest.raises(AssertionError):
        hold(2, "llama", "fsdp")


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_another_recipe_is_noticed(recipe: str) -> None:
    other = {"ddp": "ddp(bucket_views=true)", "fsdp": "fsdp(reshard=false)"}[recipe]
    trace = without_own(rehearsed(2, "llama", other))
    account = unheard(without_own(real(2)["llama", recipe]), trace)
    assert compare(account, trace).similarity < 1.0


def test_the_order_of_streams_is_written_down() -> None:
    """What a rank gathers waits for what it is copied from, and layers wait for what was gathered."""
    trace = trace_of("fsdp")
    gathers = [kernel for kernel in trace.kernels if kernel.operator == "nccl::all_gather"]
    assert len(gathers) == 6  # each layer and the rest of the model, twice
    assert all(kernel.after and kernel.peers == (2, 1) for kernel in gathers)
    assert {kernel.stream for kernel in gathers}.isdisjoint({0})
    assert {*trace.streams.values()} == {1, 3}  # where copies for gathering are made, and where sums are


def trace_of(recipe: str) -> Trace:
    job, _ = case("llama", recipe)
    setup = on_gpus(Recipe.parse(recipe).setup(), 2)
    return rehearse(job_of_rank(job, setup), setup, CpuPolicy())
