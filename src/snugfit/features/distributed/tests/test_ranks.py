"""One rank of several: law 1 against real gloo processes on the CPU.

Two and four ranks train a small model for real. The first and the last rank report their allocations and
frees (`gloo_ranks.py`) from the first weight to the last step. The rehearsal of the rank lists the same
events in order. (A classifier of two classes is spread over four ranks unevenly.) Only these differences
are allowed:

- gloo's buffers, and those of the CPU's kernels (`OWN`, and `cpu_scratch.py`);
- blocks below `LEAST` bytes: DDP's lists of sizes and indices, which a GPU's process has on the host too;
- frees that the profiler misses because gloo's thread dropped the last reference. They concern only
  exchanged tensors, and only tensors without a recorded free (`unheard`).
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from aligned import Event, compare, peak
from gloo_ranks import Case, Ran, assert_same_account, by_case, in_steps, losses_of, run_ranks
from rank_events import unheard, without_own
from reported import foreseen
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.distributed.simulate import collectives
from snugfit.features.distributed.simulate.allocations import RankAllocations
from snugfit.features.distributed.simulate.offloaded_shards import HostShards
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.device import policy_for
from snugfit.prediction.pinned import host_state_bytes, pinned_bytes
from snugfit.prediction.profile import Software
from snugfit.rehearsal import rehearse as rehearsing
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import record_step, rehearse
from snugfit.rehearsal.trace.trace import STAGE_BACK, STAGE_OUT, MarkKind, Recording, Trace
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from tiers import few_of, slow_but

BATCH = 8

SEVERAL = ("ddp", "zero1", "fsdp", "hsdp", "tensor", "context", "expert")

TWO = [
    (family, recipe)
    for family, recipes in {
        "llama": (
            "ddp", "ddp(bucket_views=true) + bf16", "ddp + micro_batches(2)", "fsdp", "fsdp + bf16",
            "fsdp(reshard=none)", "fsdp + micro_batches(2)", "fsdp(reshard=all) + every_layer + bf16",
            "zero1", "tensor(2) + bf16", "tensor(2) + every_layer + bf16",
            "context(2)", "context(2) + every_layer + bf16", "context(2) + micro_batches(2)",
        ),
        "qwen3": ("tensor(2)", "tensor(2) + micro_batches(2) + adamw_fused"),
        "mixtral": ("tensor(2) + expert(2)", "bf16 + micro_batches(2) + tensor(2) + expert(2)"),
        "bert": (
            "ddp + bf16", "ddp(bucket_views=true)", "fsdp", "fsdp(reshard=none) + bf16 + micro_batches(2)",
            "zero1(bucket_views=true) + bf16 + adamw_fused + micro_batches(2)",
        ),
    }.items()
    for recipe in recipes
]  # fmt: skip
ADAPTERS = [
    ("llama", "fsdp + lora(r=4, targets=all-linear)"),
    ("llama", "fsdp + lora(r=4) + bf16 + micro_batches(2)"),
    ("llama", "fsdp(reshard=all) + lora(r=4) + bf16_pure + every_layer"),
    ("bert", "fsdp + lora(r=4, rslora=true)"),
    ("llama", "ddp(bucket_views=true) + lora(r=4, dora=true) + bf16_pure + every_layer"),
    ("bert", "ddp + lora(r=4, dropout=0.1) + bf16 + micro_batches(2)"),
    ("llama", "ddp + qlora(r=4) + bf16"),
    ("llama", "fsdp + qlora(r=4, targets=all-linear) + bf16_pure + every_layer"),
    ("llama", "fsdp(reshard=none) + qlora(r=4, double=false) + bf16"),
    ("mixtral", "fsdp + lora(r=4, parameters=experts.gate_up_proj, targets=q_proj)"),
]
KERNELS = [
    ("llama", "ddp + fused"),
    ("llama", "ddp(bucket_views=true) + fused + bf16 + micro_batches(2)"),
    ("llama", "ddp + fused + bf16_pure + lora(r=4, targets=all-linear)"),
    ("llama", "ddp + fused + bf16 + qlora(r=4)"),
    ("llama", "zero1 + fused + bf16_pure"),
    ("llama", "ddp + chunked_loss(tokens=64) + bf16"),
    ("llama", "fsdp + fused + chunked_loss(tokens=64) + bf16_pure"),
    ("qwen3", "fsdp(reshard=all) + chunked_loss(tokens=64) + lora(r=4) + bf16 + micro_batches(2)"),
    ("llama", "fsdp + fused"),
    ("llama", "fsdp + fused + bf16 + every_layer"),
    ("llama", "fsdp(reshard=all) + fused + bf16_pure + lora(r=4) + micro_batches(2)"),
    ("llama", "fsdp + fused + bf16 + lora(r=4, targets=all-linear) + every_layer"),
    ("llama", "fsdp + fused + bf16_pure + qlora(r=4, targets=all-linear)"),
    ("qwen3", "fsdp(reshard=none) + fused(recomputed_mlps=1) + bf16"),
    ("bert", "ddp + fused + bf16"),
    ("bert", "fsdp + fused + bf16 + micro_batches(2)"),
]
COVERING = [
    ("llama", "ddp(bucket_views=true) + bf16"), ("llama", "fsdp"), ("llama", "context(2)"),
    ("mixtral", "bf16 + micro_batches(2) + tensor(2) + expert(2)"),
    ("bert", "zero1(bucket_views=true) + bf16 + adamw_fused + micro_batches(2)"),
    ADAPTERS[2], ADAPTERS[4], ADAPTERS[7], KERNELS[2], KERNELS[6],
]  # fmt: skip
"""Cases with each technique for several GPUs in one or two jobs. `test_ranks_elsewhere.py` combines DDP with
micro-batches.
"""
EVERY = [*TWO, *ADAPTERS, *KERNELS]
TWO = few_of(EVERY, [case for case in EVERY if case not in COVERING])
FOUR = [
    ("llama", "hsdp(2)"), ("llama", "hsdp(2, reshard=none) + bf16"), ("bert", "fsdp + bf16"),
    ("llama", "ddp + tensor(2)"), ("llama", "fsdp + tensor(2)"),
    ("qwen3", "fsdp + bf16 + micro_batches(2) + tensor(2)"), ("mixtral", "fsdp + tensor(2) + expert(2)"),
    ("llama", "context(4)"), ("llama", "fsdp + context(2) + bf16"),
    ("llama", "ddp + context(2) + micro_batches(2)"), ("llama", "fsdp + context(2) + every_layer"),
]  # fmt: skip
FOUR = few_of(
    FOUR,
    [
        ("llama", "hsdp(2, reshard=none) + bf16"), ("llama", "fsdp + tensor(2)"), ("llama", "context(4)"),
        ("llama", "fsdp + context(2) + every_layer"), ("llama", "ddp + context(2) + micro_batches(2)"),
        ("bert", "fsdp + bf16"), ("llama", "ddp + tensor(2)"),
    ],
)  # fmt: skip


def case(family: str, recipe: str) -> Case:
    from test_law_rehearsed_equals_real import job

    if family == "qwen3":  # norms of each head, and a head that is tied to the embedding
        facts = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
        return small_job("llama", 2, facts, batch_size=BATCH), recipe
    return replace(job(family), batch_size=BATCH), recipe


@functools.cache
def real(ranks: int) -> dict[tuple[str, str, int], Ran]:
    """Start this number of ranks once, and return the results of each case and rank."""
    cases = TWO if ranks == 2 else FOUR
    return by_case(cases, run_ranks(ranks, [case(*one) for one in cases]))


def rehearsed(ranks: int, family: str, recipe: str, rank: int = 0) -> list[Event]:
    job, _ = case(family, recipe)
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    return foreseen(rehearse(job_of_rank(job, setup), setup, CpuPolicy(), rank=rank))


def hold(ranks: int, family: str, recipe: str, rank: int = 0) -> None:
    """Assert law 1 (real and simulated allocations are equal) for one of this number of ranks."""
    account, trace = real(ranks)[family, recipe, rank].account, rehearsed(ranks, family, recipe, rank)
    kept = in_steps if "qlora" in recipe else list  # the CPU quantizes weights with temporaries of its own
    assert_same_account(account, trace, f"{family}, {recipe}, rank {rank} of {ranks}", kept=kept)


@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), TWO)
def test_one_of_two_real_ranks_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    """In `make test` one rank of each case is compared, the first and the last one in turn."""
    for rank in few_of([0, 1], [TWO.index((family, recipe)) % 2]):
        hold(2, family, recipe, rank)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe"), FOUR)
def test_so_does_one_of_four(family: str, recipe: str) -> None:
    hold(4, family, recipe)
    hold(4, family, recipe, rank=3)


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "cases"), slow_but([(2, TWO), (4, FOUR)], 1))
def test_ranks_that_are_given_the_same_batch_train_as_one_does(
    ranks: int, cases: list[tuple[str, str]]
) -> None:
    """Law 3: gradients averaged over ranks equal those of each rank. The loss of a split sequence is the
    mean of its pieces'."""
    for family, recipe in cases:
        job, _ = case(family, recipe)
        alone = " + ".join(part for part in recipe.split(" + ") if not part.startswith(SEVERAL)) or "plain"
        wish = on_gpus(Recipe.parse(recipe).setup(), ranks).parallel
        assert wish is not None
        expected = losses_of(replace(job, batch_size=BATCH // wish.data_ranks), Recipe.parse(alone).setup())
        exact = "bf16" not in recipe  # sharded bf16 uses no autocast, so norms compute in bf16, too
        for part in range(wish.data_ranks):
            of_pieces = [
                real(ranks)[family, recipe, rank].losses
                for rank in range(ranks)
                if wish.data_rank(rank) == part
            ]
            losses = [sum(step) / len(step) for step in zip(*of_pieces, strict=True)]
            assert losses == pytest.approx(expected, rel=1e-4 if exact else 2e-2), f"{family}, {recipe}"


# ---- planted faults --------------------------------------------------------------------------------------


@pytest.mark.whole
def test_a_gathered_tensor_that_is_not_freed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    carried, kept = collectives.tensors_carried, []

    def keep(*arguments: Any) -> list[torch.Tensor]:
        found = carried(*arguments)
        kept.append(found)
        return found

    monkeypatch.setattr(collectives, "tensors_carried", keep)
    with pytest.raises(AssertionError):
        hold(2, "llama", "fsdp")


@pytest.mark.whole
@pytest.mark.slow
def test_gathered_weights_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = RankAllocations.resize
    monkeypatch.setattr(
        RankAllocations, "resize", lambda self, storage, size: size and resize(self, storage, size)
    )
    with pytest.raises(AssertionError):
        hold(2, "llama", "fsdp")


@pytest.mark.whole
def test_what_is_sent_and_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "is_functional", lambda func: False)
    with pytest.raises(AssertionError):
        hold(2, "llama", "context(2)")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        ("ddp(bucket_views=true) + bf16", "ddp + bf16"),
        ("fsdp", "fsdp(reshard=none)"),
    ],
)
def test_another_recipe_is_noticed(recipe: str, other: str) -> None:
    trace = without_own(rehearsed(2, "llama", other))
    account = unheard(without_own(real(2)["llama", recipe, 0].account), trace)
    assert compare(account, trace).similarity < 1.0


def test_the_order_of_streams_is_written_down() -> None:
    """A gather waits for the copies of its inputs, and a layer waits for its gathered weights."""
    trace = trace_of("fsdp")
    gathers = [kernel for kernel in trace.kernels if kernel.operator == "nccl::all_gather"]
    assert len(gathers) == 5  # each layer twice, and the rest of the model
    assert all(kernel.after and kernel.peers == (2, 1) for kernel in gathers)
    assert {kernel.stream for kernel in gathers}.isdisjoint({0})
    assert {*trace.streams.values()} == {1, 3}  # the streams of gather copies and of sums


def trace_of(recipe: str) -> Trace:
    return trace_of_rank(case("llama", recipe)[0], recipe, 2)


def trace_of_rank(job: Job, recipe: str, ranks: int, **more: Any) -> Trace:
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    return rehearse(job_of_rank(job, setup), setup, CpuPolicy(), **more)


# ---- many micro-batches ----------------------------------------------------------------------------------


WIDENED = few_of(
    [
        ("fsdp", 2), ("fsdp(reshard=all) + every_layer + bf16", 2), ("hsdp(2) + bf16", 4), ("zero1", 2),
        ("fsdp(offload=cpu) + bf16", 2), ("ddp + bf16", 2), ("ddp(bucket_views=true)", 2),
        ("ddp + tensor(2)", 4), ("fsdp + tensor(2) + bf16", 4), ("fsdp + context(2) + bf16", 4),
    ],
    [
        ("fsdp", 2), ("fsdp(reshard=all) + every_layer + bf16", 2), ("ddp + bf16", 2),
        ("fsdp + context(2) + bf16", 4), ("fsdp + tensor(2) + bf16", 4), ("zero1", 2),
        ("ddp + tensor(2)", 4), ("hsdp(2) + bf16", 4), ("fsdp(offload=cpu) + bf16", 2),
    ],
)  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize(("recipe", "ranks"), WIDENED)
def test_micro_batches_that_repeat_are_written_again(
    recipe: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5 (repeated parts equal a full simulation) for a rank, in every field: streams, waits for
    exchanges, delayed frees.
    """
    job = small_job("llama", 2, batch_size=6 * ranks)
    setup = on_gpus(Recipe.parse(f"{recipe} + micro_batches(6)").setup(), ranks)
    policy = policy_for(find_gpu("h200"), Software())
    asked = []

    def recorded(step: Any, *more: Any) -> Recording:
        asked.append(step.setup.micro_batches)
        return record_step(step, *more)

    monkeypatch.setattr(rehearsing, "record_step", recorded)
    again = rehearse(job_of_rank(job, setup), setup, policy)
    assert asked == [4], "the remaining micro-batches are copied"
    monkeypatch.setattr(rehearsing, "short_run", lambda *given, **more: None)
    whole = rehearse(job_of_rank(job, setup), setup, policy)
    for field in fields(Trace):
        assert getattr(again, field.name) == getattr(whole, field.name), field.name
    assert any(kernel.after for kernel in whole.kernels)


# ---- building --------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(["hsdp(4) + bf16", "fsdp"], 1))
def test_no_rank_has_all_of_a_model_that_is_built_on_the_host(recipe: str) -> None:
    """A rank holds its parts and one whole layer at a time. The blocks of the steps stay the same."""
    job = small_job("llama", 4, batch_size=BATCH)
    on_device, on_host = (
        trace_of_rank(replace(job, build_on=where), recipe, 8, steps=1) for where in ("device", "host")
    )
    whole = most_while_built(on_device)
    parts = held(on_host, Kind.WEIGHTS)
    assert parts < whole / (4 if "hsdp" in recipe else 8) * 1.1
    assert most_while_built(on_host) < whole / 2
    assert most_while_built(on_host) > parts, "a layer is whole until each rank has its part"
    assert held(on_device, Kind.WEIGHTS) == parts


def test_what_whole_weights_lay_in_is_given_back_before_the_first_step() -> None:
    marks = {
        recipe: [mark.phase for mark in trace_of(recipe).marks if mark.kind is MarkKind.CACHE_EMPTIED]
        for recipe in ("fsdp", "ddp")
    }
    assert marks["fsdp"] == ["build"]
    assert "build" not in marks["ddp"]


def most_while_built(trace: Trace) -> int:
    """Return the maximum of requested, live bytes on the device before the first step."""
    now = most = 0
    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if block.step >= 0:
            break
        now += block.nbytes if event > 0 else -block.nbytes
        most = max(most, now)
    return most


# ---- shards on the host ----------------------------------------------------------------------------------


@pytest.mark.whole
def test_shards_and_states_are_the_host_s() -> None:
    """With offload, the device has the gathered weights. The host has page-locked shards and gradients, and
    both moments.
    """
    on_device, on_host = trace_of("fsdp + bf16"), trace_of("fsdp(offload=cpu) + bf16")
    weights = held(on_device, Kind.WEIGHTS)
    assert held(on_host, Kind.WEIGHTS) < weights / 20  # buffers remain
    assert held(on_device, Kind.OPTIMIZER_STATES) >= 2 * weights * 0.95
    assert held(on_host, Kind.OPTIMIZER_STATES) == 0
    assert pinned_bytes(on_host.kernels) >= 2 * weights * 0.95
    assert host_state_bytes(on_host.kernels) >= 2 * weights * 0.95
    assert not pinned_bytes(on_device.kernels)
    copied = {
        name: sum(kernel.nbytes // 2 for kernel in on_host.kernels if kernel.operator == name)
        for name in (STAGE_OUT, STAGE_BACK)
    }
    assert copied[STAGE_OUT] == pytest.approx(weights, rel=0.05)
    assert copied[STAGE_BACK] == pytest.approx(2 * weights, rel=0.05)  # forward and backward


def held(trace: Trace, kind: str) -> int:
    end = len(trace.events) - 1
    return sum(
        trace.blocks[block].nbytes for block in trace.alive_at(end) if trace.blocks[block].kind == kind
    )


def test_page_locked_memory_is_used_again() -> None:
    host = HostShards(lambda tensor, dtype: tensor.to(dtype))
    like = torch.empty(3000, dtype=torch.uint8, device="meta")
    for _ in range(3):
        gradient = host.keep(like)
        assert (host.pinned, host.nbytes) == (4096, 4096)
        del gradient
    both = host.keep(like), host.keep(like)
    assert (host.pinned, host.nbytes, host.most) == (8192, 8192, 8192)
    del both


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("fsdp(offload=cpu) + adamw_fused", "is for GPUs. Try 'adamw'"),
        ("zero1 + adafactor", "Try 'adamw' or 'adamw_fused'"),
    ],
)
def test_what_does_not_go_together(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(case("llama", recipe)[0], installed=False)


@pytest.mark.parametrize("ranks", slow_but([2, 4], 1))
def test_where_states_are_shared_out_the_rank_with_most_of_them_is_predicted(ranks: int) -> None:
    """The ranks differ only in the weights whose states they have."""
    setup = on_gpus(Recipe.parse("zero1").setup(), ranks)
    job = job_of_rank(small_job("llama", 3, batch_size=4), setup)

    def states(rank: int | None) -> tuple[int, int]:
        trace = rehearse(job, setup, CpuPolicy(), rank=rank)
        own = [block.nbytes for block in trace.blocks if block.kind == Kind.OPTIMIZER_STATES]
        return sum(own), peak(foreseen(trace))

    of_each = [states(rank) for rank in range(ranks)]
    assert len(set(of_each)) > 1
    assert states(None) == max(of_each)
    assert states(None) != of_each[0]
