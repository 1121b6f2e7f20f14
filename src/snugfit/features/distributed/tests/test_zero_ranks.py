"""ZeRO-2 and ZeRO-3 on several ranks: law 1 (real and simulated allocations are equal) with gloo processes on
the CPU.

As in `test_ranks.py`, two and four ranks train a small model for real. The rehearsal lists their
allocations and frees of all steps in order. The construction of the model is not compared: on a CPU,
DeepSpeed's host tensors share the memory of its device tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_ranks import BATCH, case, rehearsed

from aligned import Event, compare
from deepspeed_here import with_deepspeed
from forked_children import forked_children
from gloo_ranks import Ran, assert_same_account, by_case, losses_of, run_ranks
from rank_events import unheard, without_own
from snugfit.errors import UsageError
from snugfit.features.distributed.engine.config import engine_config
from snugfit.features.distributed.price.evidence import evidence
from snugfit.features.distributed.price.exchanges import late_frees
from snugfit.job.gpu import find_gpu
from snugfit.measurement import causes
from snugfit.measurement.measure import measure
from snugfit.prediction.allocator import Allocator, replay
from snugfit.prediction.last_step import Frees, LastStep, begin_of_last_step
from snugfit.prediction.pinned import host_state_bytes, pinned_bytes
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import packaged_rates
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Block, Kernel, Mark, Trace
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.units import MIB
from test_measure import tiny_job
from tiers import few_of, slow_but
from zero_ranks_warm import few_weights_live

NCCL = {row["formula"]: row["value"] for row in evidence() if row["quantity"] == "nvml_bytes"}
"""GPU memory that NCCL takes, in bytes by NVML, by the formula that it is multiplied with."""

TWO = [
    ("llama", "zero2(offload=none)"),
    ("llama", "zero3(offload=none) + bf16"),
    ("bert", "zero2(offload=none) + bf16 + micro_batches(2)"),
    ("bert", "zero3(offload=none) + micro_batches(2)"),
    ("llama", "zero3(offload=none) + every_layer + bf16"),
    ("llama", "zero2(offload=none) + lora(r=4) + bf16"),
    ("bert", "zero2(offload=none) + lora(r=4, dora=true) + micro_batches(2)"),
    ("llama", "zero3(offload=none) + lora(r=4) + bf16"),
    ("llama", "zero2(offload=none) + qlora(r=4) + bf16"),
    ("llama", "zero3(offload=none) + qlora(r=4) + bf16"),
]
TWO = few_of(TWO, [*TWO[1:4], *TWO[5:]])
FOUR = [("bert", "zero3(offload=none) + bf16")]


@functools.cache
def real(ranks: int) -> dict[tuple[str, str, int], Ran]:
    """Start this number of ranks once, and return the results of each case and rank."""
    cases = TWO if ranks == 2 else FOUR
    how = {"within": "zero_ranks_warm:few_weights_live", "warm": "zero_ranks_warm"}
    return by_case(cases, run_ranks(ranks, [case(*one) for one in cases], **how))


def of_steps(events: Sequence[Event]) -> list[Event]:
    """Return the events of blocks that are allocated in a step."""
    built = {event.block for event in events if event.nbytes > 0 and event.step < 0}
    return [event for event in events if event.block not in built]


def hold(ranks: int, family: str, recipe: str, rank: int) -> None:
    """Assert law 1 (real and simulated allocations are equal) for one of this number of ranks."""
    with few_weights_live():
        trace = rehearsed(ranks, family, recipe, rank)
    ran, about = real(ranks)[family, recipe, rank], f"{family}, {recipe}, rank {rank} of {ranks}"
    assert_same_account(ran.account, trace, about, kept=of_steps, sizes=ran.exchanged)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), TWO)
def test_one_of_two_real_ranks_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold(2, family, recipe, 0)
    hold(2, family, recipe, 1)


@with_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe"), FOUR)
def test_so_does_one_of_four(family: str, recipe: str) -> None:
    hold(4, family, recipe, 0)
    hold(4, family, recipe, 3)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "cases"), slow_but([(2, TWO), (4, FOUR)], 1))
def test_ranks_that_are_given_the_same_batch_train_as_one_does(
    ranks: int, cases: list[tuple[str, str]]
) -> None:
    """Law 3 (equal training): the ranks have the losses of a loop without DeepSpeed."""
    for family, recipe in cases:
        this = replace(case(family, recipe)[0], batch_size=BATCH // ranks)
        alone = " + ".join(part for part in recipe.split(" + ") if not part.startswith("zero")) or "plain"
        expected = losses_of(this, Recipe.parse(alone).setup())
        exact = "bf16" not in recipe  # bf16 weights need no autocast
        for rank in range(ranks):
            losses = real(ranks)[family, recipe, rank].losses
            assert losses == pytest.approx(expected, rel=1e-4 if exact else 2e-2), f"{family}, {recipe}"


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(["zero3(offload=none) + every_layer + bf16", "zero2(offload=none)"], 1)
)
def test_another_run_is_noticed(recipe: str) -> None:
    """The planted faults are weights that stay gathered, and gradients of another stage."""
    other = "zero3(offload=none)" if recipe.startswith("zero2") else recipe
    trace = of_steps(without_own(rehearsed(2, "llama", other)))
    ran = real(2)["llama", recipe, 0]
    account = unheard(of_steps(without_own(ran.account)), trace, ran.exchanged)
    assert compare(account, trace).similarity < 1.0


# ---- options of a rank, and its exchanges ------------------------------------------------------------------


@functools.cache
def trace_of(recipe: str, ranks: int, *, few_live: bool = False) -> Trace:
    job, _ = case("llama", recipe)
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    with few_weights_live() if few_live else contextlib.nullcontext():
        return rehearse(job_of_rank(job, setup), setup, CudaPolicy(), rank=0)


def exchanges(trace: Trace, operator: str) -> list[Kernel]:
    return [kernel for kernel in trace.kernels if kernel.operator == operator]


def held(trace: Trace, kind: str) -> int:
    return sum(
        trace.blocks[at].nbytes
        for at in trace.alive_at(trace.peak().position)
        if trace.blocks[at].kind == kind
    )


@pytest.mark.parametrize(("ranks", "overlaps"), [(1, False), (4, True)])
def test_the_global_batch_is_kept(ranks: int, overlaps: bool) -> None:
    setup = on_gpus(Recipe.parse("zero3 + micro_batches(2)").setup(), ranks)
    part = job_of_rank(replace(case("llama", "")[0], batch_size=16), setup)
    asked = engine_config(setup, batch_size=part.batch_size, clip=None, width=64)
    assert asked["train_batch_size"] == 16
    assert asked["train_micro_batch_size_per_gpu"] == 16 // ranks // 2
    assert asked["gradient_accumulation_steps"] == 2
    assert asked["zero_optimization"]["overlap_comm"] is overlaps


def test_what_several_gpus_refuse() -> None:
    job, _ = case("llama", "")
    with pytest.raises(UsageError, match="cannot be shared evenly by 3 GPUs"):
        predict(job, "zero3", gpu="h200", gpus=3)
    for loop in ("accelerate", "trainer"):
        with pytest.raises(UsageError, match=f"{loop} loop cannot do this: DeepSpeed"):
            predict(job, "zero2", gpu="h200", gpus=2, loop=loop)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize("stage", slow_but([3, 2], 1))
def test_a_rank_has_its_part_of_what_is_updated(stage: int) -> None:
    one, four = (trace_of(f"bf16 + zero{stage}(offload=none)", ranks) for ranks in (1, 4))
    states = [held(trace, Kind.OPTIMIZER_STATES) for trace in (one, four)]
    assert states[1] == pytest.approx(states[0] / 4, rel=0.01)
    assert any(block.kind == Kind.COMMUNICATION for block in four.blocks)
    assert bool(held(four, Kind.GATHERED)) == (stage == 3)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize("stage", slow_but([2, 3], 1))
def test_the_host_of_each_rank_has_its_part(stage: int) -> None:
    one, four = (trace_of(f"bf16 + zero{stage}", ranks).kernels for ranks in (1, 4))
    assert 0 < host_state_bytes(four) <= 1.05 * host_state_bytes(one) / 4
    assert pinned_bytes(four) < pinned_bytes(one) / 3


@with_deepspeed
@pytest.mark.whole
def test_weights_come_and_gradients_go_beside_the_computation() -> None:
    trace = trace_of("zero3(offload=none)", 4, few_live=True)
    gathers, scatters = exchanges(trace, ALL_GATHER), exchanges(trace, REDUCE_SCATTER)
    assert {kernel.phase for kernel in gathers} == {"forward", "backward", "update"}
    assert all(kernel.peers == (4, 1) and kernel.stream != 0 for kernel in (*gathers, *scatters))
    numbers = {number for number, kernel in enumerate(trace.kernels) if kernel.operator == ALL_GATHER}
    assert any(kernel.stream == 0 and numbers & {*kernel.after} for kernel in trace.kernels)
    assert {*trace.streams.values()} == {1, 2}
    assert all(
        kernel.stream == 1 for kernel in exchanges(trace_of("zero2(offload=none)", 4), ALL_REDUCE)[:-2]
    )


@with_deepspeed
@pytest.mark.whole
def test_nccl_has_two_groups_where_the_run_exchanges_in_two() -> None:
    """DeepSpeed creates a group of all ranks of its own, beside torch's."""
    footprint = predict(case("llama", "")[0], "zero2(offload=none)", gpu="h200", gpus=2).footprint
    assert footprint.communication_bytes == NCCL["first group"] + NCCL["further groups"]
    assert footprint.nvml_bytes is not None
    alone = predict(case("llama", "")[0], "zero2(offload=none)", gpu="h200").footprint
    assert alone.communication_bytes == 0


@with_deepspeed
@pytest.mark.whole
@pytest.mark.slow
def test_two_processes_are_measured() -> None:
    """DeepSpeed trains in the process group of the measurement."""
    with forked_children("zero_ranks_warm"):
        measured = measure(
            tiny_job(), "zero3(offload=none)", device="cpu", gpus=2, warmup=1, steps=2, ledger=None
        )
    assert measured.outcome == causes.OK, measured.message
    assert len([rank for rank in measured.ranks if rank.step_seconds]) == 2
    assert len(measured.losses) == 3


# ---- blocks that another stream still works on -------------------------------------------------------------


def test_a_dropped_block_is_not_handed_out_before_it_is_back() -> None:
    allocator = Allocator()
    frees = Frees(allocator, {7: 9})
    first = allocator.allocate(4 * MIB)
    frees.free(7, first)
    assert (allocator.allocated, allocator.requested) == (0, 4 * MIB)
    frees.pass_by(8)
    second = allocator.allocate(4 * MIB)
    assert second.address != first.address
    frees.pass_by(9)
    assert allocator.requested == 4 * MIB
    assert allocator.allocate(4 * MIB).address == first.address
    frees.free(10, second)
    assert allocator.requested == 4 * MIB


def test_a_free_is_late_by_the_queue() -> None:
    """Simulate three kernels.

    A slow kernel runs in a side stream, on a block that is freed right after its launch. Two fast kernels
    follow, and another block is allocated before the last one.
    """
    gpu = find_gpu("h200")
    rates = packaged_rates(gpu)
    side = Kernel("aten::add", "", "forward", 0, 10**12, (), "float32", 2, stream=1)
    main = side._replace(nbytes=1000, stream=0)
    blocks = tuple(Block(MIB, "aten::add", "", "forward", 0, "") for _ in range(3))
    trace = Trace(
        blocks, (1, -1, 2, 3), (Mark(0, 0, "forward"),), (main, side, main), (0,), (),
        awaited={0: (1,)}, launched=(0, 1, 3),
    )  # fmt: skip
    assert late_frees(trace, gpu, Setup(), rates) == {1: 4}
    assert replay(trace, late={1: 4}).reserved_peak == 4 * MIB
    assert replay(trace).reserved_peak == 2 * MIB
    assert replay(trace, late={1: 4}).requested_peak == 3 * MIB
    assert replay(trace).requested_peak == 2 * MIB
    assert late_frees(replace(trace, awaited={0: (0,)}), gpu, Setup(), rates) == {}
    assert late_frees(trace, None, Setup(), rates) == {}


@with_deepspeed
@pytest.mark.whole
def test_weights_that_one_stream_gathers_wait_for_the_one_that_computes() -> None:
    trace = trace_of("zero3(offload=none)", 4, few_live=True)
    waiting = [trace.blocks[block] for block in trace.awaited]
    assert any(block.kind == Kind.GATHERED for block in waiting)
    assert len(trace.launched) == len(trace.kernels)
    ends = {-event - 1: position for position, event in enumerate(trace.events) if event < 0}
    for block, kernels in trace.awaited.items():
        assert all(trace.launched[kernel] <= ends[block] for kernel in kernels)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize("stage", slow_but([3, 2], 1))
def test_the_last_step_leaves_what_it_found(stage: int) -> None:
    """The simulated allocator therefore replays the last step until its memory no longer changes."""
    trace = trace_of(f"bf16 + zero{stage}(offload=none)", 4)
    start = begin_of_last_step(trace)
    assert LastStep(trace, start, dict.fromkeys(range(len(trace.blocks) + 1))).leaves_as_many
