"""Next recipes of several GPUs after a memory error, and the number of recipes simulated for them.

The reference is every recipe with made-up bytes and seconds, and real predictions in the remaining tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_up_judge import MadeUpJudge

from small_models import small_job
from snugfit.errors import SnugfitError
from snugfit.features.distributed.plan import smaller
from snugfit.features.distributed.plan.candidates import cuts, recomputings
from snugfit.features.distributed.plan.evidence import MARGIN
from snugfit.features.distributed.plan.shared import Shared
from snugfit.features.distributed.plan.smaller import ENOUGH, smaller_on_several
from snugfit.frontends.next_recipe import MEMORY_FACTOR, next_recipe
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.prediction.headroom import at_most
from snugfit.prediction.predict import predict
from snugfit.prediction.worker_pool import WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import GIB
from tiers import slow_but

H200 = find_gpu("h200")
JOB = small_job("llama", 12, {"num_attention_heads": 8, "num_key_value_heads": 8}, batch_size=128)
SEARCHED = frozenset({Slot.CHECKPOINTING, Slot.BATCHING})

FEW = 10
"""Maximum number of recipes that a search may simulate with few layers. Each test's clusters have over 30
recipes.
"""


@contextmanager
def in_this_process(make: Callable[[], Any], **given: Any) -> Iterator[WorkerPool]:
    """Context that yields a pool of workers without processes: they run in this process."""
    assert given["workers"] > 1, "this process may belong to a group, so it simulates nothing"
    yield WorkerPool([make()])


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace predictions by formulas in this process. Return the list of recipes that were simulated with
    all layers.
    """
    asked: list[str] = []

    class Counting(MadeUpJudge):
        def in_full(self, gpus: int, recipe: Recipe) -> Any:
            asked.append(str(recipe))
            return super().in_full(gpus, recipe)

    monkeypatch.setattr(MadeUpJudge, "asked", [])
    monkeypatch.setattr(smaller, "Judge", Counting)
    monkeypatch.setattr(smaller, "is_picklable", lambda what: True)
    monkeypatch.setattr(smaller, "worker_pool", in_this_process)
    return asked


def following(recipe: str, gpus: int, job: Job = JOB, searched: frozenset[Slot] = SEARCHED) -> Recipe | None:
    return smaller_on_several(
        job, Recipe.parse(recipe), gpu=H200, gpus=gpus, searched=searched, share=MEMORY_FACTOR
    )


def every_one(recipe: Recipe, gpus: int) -> list[Recipe]:
    """Return every recipe with the same techniques for several GPUs."""
    fixed = Kept(slots={slot: (recipe[slot],) for slot in Slot if slot not in SEARCHED}, several_gpus=True)
    uncut = recipe.with_(roster.plain(Slot.BATCHING))
    techniques = dict.fromkeys([recipe[Slot.CHECKPOINTING], *recomputings(JOB, fixed)])
    ways = [Shared(gpus, uncut.with_(one)) for one in techniques]
    return [shared.cut(one) for shared in ways for one in cuts(JOB, shared, fixed)]


@pytest.mark.parametrize("more", slow_but([1.0, 1.05], lambda more: more > 1))
@pytest.mark.parametrize("piece", [0.05, 2.0])
@pytest.mark.parametrize(("states", "sample"), [(1, 20), (60, 6), (100, 1), (100, 0.2), (20, 2)])
@pytest.mark.parametrize(
    "recipe", ["ddp", "fsdp", "every_layer + fsdp", "micro_batches(4) + ddp", "ddp + tensor(2)"]
)
def test_it_is_nearly_the_fastest_that_needs_less_and_soon_found(
    recipe: str,
    states: float,
    sample: float,
    piece: float,
    more: float,
    in_full: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recipe is the fastest one that fits, or at most a tenth slower than the failed one.

    All compared recipes have the same techniques for several GPUs. The result also holds if the whole model
    takes more than few layers predict.
    """
    monkeypatch.setattr(MadeUpJudge, "states", states * GIB)
    monkeypatch.setattr(MadeUpJudge, "sample", sample * GIB)
    monkeypatch.setattr(MadeUpJudge, "piece", piece)
    monkeypatch.setattr(MadeUpJudge, "more_in_full", more)
    before, gpus = Recipe.parse(recipe), 4
    found = following(recipe, gpus)
    broken = MadeUpJudge.of(JOB, H200, gpus, before)
    bound = at_most(MEMORY_FACTOR * more * broken.needed_bytes, H200)
    every = [(one, MadeUpJudge.of(JOB, H200, gpus, one)) for one in every_one(before, gpus)]
    fit = [(one, judged) for one, judged in every if judged.needed_bytes * max(MARGIN, more) <= bound]
    assert (found is None) == (not fit)
    assert len(MadeUpJudge.asked) == len(set(MadeUpJudge.asked)) <= FEW < len(every)
    assert in_full[0] == recipe
    assert len(in_full) <= 1 + smaller.MOST_IN_FULL
    if found is not None:
        judged = dict(every)[found]
        assert judged.needed_bytes * more <= bound
        fastest = min(one.step_seconds for _, one in fit)
        assert judged.step_seconds <= max(ENOUGH * broken.step_seconds, fastest)
        assert {slot for slot in Slot if found[slot] != before[slot]} <= SEARCHED


def test_where_finer_pieces_are_nearly_as_fast_nothing_else_is_asked(
    in_full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search evaluates the failed recipe, single samples, and the recipe interpolated between them."""
    monkeypatch.setattr(MadeUpJudge, "states", 60 * GIB)
    found = following("ddp", 4)
    assert str(found) == "micro_batches(4) + ddp"
    asked = [recipe for _, recipe, _ in MadeUpJudge.asked]
    assert asked == ["ddp", "micro_batches(32) + ddp", "micro_batches(4) + ddp"]
    assert in_full == ["ddp", "micro_batches(4) + ddp"]


def test_a_batch_that_is_not_cut_is_recomputed(in_full: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpJudge, "states", 60 * GIB)
    found = following("ddp", 4, searched=frozenset({Slot.CHECKPOINTING}))
    assert isinstance(found, Recipe)
    assert found[Slot.BATCHING].plain
    assert not found[Slot.CHECKPOINTING].plain


def test_what_cannot_be_simulated_is_told(in_full: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, gpus: int, recipe: Recipe) -> Any:
        raise SnugfitError("No.")

    monkeypatch.setattr(smaller.Judge, "in_full", refuse)
    with pytest.raises(SnugfitError, match="No"):
        following("ddp", 4)


def test_deepspeed_and_one_gpu_are_left_to_others(in_full: list[str]) -> None:
    assert following("zero3", 4) is None
    assert following("plain", 1) is None
    assert not MadeUpJudge.asked


@pytest.mark.stored_rehearsals
@pytest.mark.parametrize("processes", slow_but([False, True], 0))
def test_two_gpus_go_on_with_what_is_predicted_to_need_less(
    processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes simulate the steps as in a real run, or this process does."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    if not processes:
        monkeypatch.setattr(smaller, "worker_pool", in_this_process)
    job = small_job("llama", 2, batch_size=256, sequence_length=512)
    before = Recipe.parse("bf16 + adamw_fused + ddp")
    found = next_recipe(torch.device("cuda"), gpus=2)(job, before, "oom:torch")
    assert isinstance(found, Recipe)
    assert found.with_(before[Slot.BATCHING]).with_(before[Slot.CHECKPOINTING]) == before
    needed, less = (predict(job, one, gpu=H200, gpus=2).needed_bytes for one in (before, found))
    assert less <= MEMORY_FACTOR * needed


def test_the_next_needs_no_more_than_the_gpu_has() -> None:
    assert at_most(1e9, H200) == 10**9
    assert at_most(1e15, H200) < (H200.memory_bytes or 0)
    assert at_most(1e15, replace(H200, memory_bytes=None)) == 10**15
