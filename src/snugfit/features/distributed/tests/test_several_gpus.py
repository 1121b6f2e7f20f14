"""Training on several GPUs: settings of a recipe, bytes of one rank, and seconds of collectives."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest

from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import RecipeError, UsageError
from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.price import streams
from snugfit.features.distributed.price.communication import (
    Interconnect,
    communication_bytes,
    interconnect_of,
)
from snugfit.features.distributed.price.evidence import evidence, total
from snugfit.features.distributed.price.streams import SimulatedStreams
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import packaged_rates
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, Kernel, Trace
from snugfit.results.footprint import Footprint, Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.training.ranks import Ranks

NCCL = {row["formula"]: row["value"] for row in evidence() if row["quantity"] == "nvml_bytes"}
"""GPU memory that NCCL takes, in bytes by NVML, by the formula that it is multiplied with."""

JOB = replace(small_job("llama", 1), batch_size=8, clip=1.0)
TWO_LAYERS = replace(JOB, model=small_job("llama", 2).model)


@functools.cache
def trace_of(recipe: str, gpus: int, rank: int = 0, job: Job = JOB) -> Trace:
    setup = on_gpus(Recipe.parse(recipe).setup(), gpus)
    return rehearse(job_of_rank(job, setup), setup, CudaPolicy(), rank=rank)


@functools.cache
def footprint_of(recipe: str, gpus: int = 1) -> Footprint:
    return predict(JOB, recipe, gpu="h200", gpus=gpus).footprint


def exchanges(trace: Trace, operator: str) -> list[Kernel]:
    return [kernel for kernel in trace.kernels if kernel.operator == operator]


# ---- options of a recipe -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "gpus", "why"),
    [
        ("bf16", 2, "the recipe trains on one. Add a technique of the slot 'sharding'"),
        ("ddp", 1, "trains on several GPUs, and one was named"),
        ("hsdp(4)", 6, "multiple of 4, or write hsdp.n. with a divisor n of 6"),
        ("fsdp", 0, "must be a whole number from 1"),
        ("fsdp", 3, "cannot be shared evenly by 3 GPUs. Try 6 or 9"),
        ("tensor(2)", 4, "Add fsdp or ddp, which share the batch among 2 such groups"),
        ("expert(2)", 2, r"Write 'tensor\(2\) \+ expert\(2\)'"),
        ("fsdp + tensor(2)", 2, "nothing is left to divide the batch over"),
        ("fsdp + tensor(2)", 3, r"takes 2 GPUs \(2 for tensor\) or a multiple"),
    ],
)
def test_gpus_that_do_not_go_with_the_recipe_or_the_batch(recipe: str, gpus: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        predict(JOB, recipe, gpu="h200", gpus=gpus)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("fsdp + lion", "is not simulated on shards of weights. Try 'adamw'"),
        ("fsdp + fp16", "weights are gathered in bf16 or as they are"),
        ("tensor(2) + lora(r=2)", "is not simulated together with lora"),
        ("ddp + tensor(2) + lora(r=2)", "is not simulated together with lora"),
        ("zero1 + lora(r=2)", "is not simulated together with lora"),
        ("ddp + frozen(parts=embed_tokens)", "is not simulated together with frozen"),
        ("fsdp + qlora(r=2, bits=8)", "8-bit weights are not simulated together with fsdp. Try bits=4"),
        ("tensor(3)", "4 attention heads and 2 key/value heads and 112 columns .* by 3 GPUs. Try 2."),
        ("zero1 + tensor(2)", "is not simulated together with zero1. Try 'fsdp' or 'ddp'"),
        ("ddp(bucket_views=true) + tensor(2)", "Leave bucket_views out"),
        ("tensor(2) + expert(4)", r"makes no groups of 4. Write 'tensor\(4\) \+ expert\(4\)'"),
        ("tensor(2) + expert(2)", "transformers has no expert-parallel plan for llama"),
        ("tensor(2) + adafactor", "is not simulated on parts of matrices. Try 'adamw'"),
        ("tensor(2) + fp16", "it cannot be combined with fp16. Try 'bf16'"),
        ("tensor(2) + compiled", "is not simulated together with compiled"),
    ],
)
def test_what_several_gpus_do_not_go_with(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(JOB, installed=False)


@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_other_loops_refuse_it_by_name(loop: str) -> None:
    with pytest.raises(UsageError, match="ZeroRedundancyOptimizer"):
        predict(JOB, "zero1", gpu="h200", gpus=2, loop=loop)


def test_autocast_becomes_the_dtype_of_gathered_weights_and_stays_where_weights_are_copied() -> None:
    sharded, copied = (Recipe.parse(f"bf16 + {name}").setup() for name in ("fsdp", "ddp"))
    assert sharded.autocast is None
    assert sharded.parallel is not None
    assert sharded.parallel.dtype == "bfloat16"
    assert copied.autocast == "bfloat16"
    assert Setup.from_json(json.loads(json.dumps(sharded.to_json()))) == sharded


def test_ranks_of_a_mesh_know_their_part_of_the_batch() -> None:
    """Ranks of one part are neighbours along the axes beside the data axis.

    Ranks of the last stage report the loss. One rank of each tensor group reports it, and each rank of a
    sequence reports a part.
    """
    mesh = ParallelWish(weights="sharded", ranks=16, tensor=2, context=2, stages=2)
    assert mesh.data_ranks == 2
    assert [mesh.data_rank(rank) for rank in range(16)] == 2 * [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.counts(rank) for rank in range(16)] == [0.0] * 8 + [0.5, 0.0] * 4
    data = ParallelWish(ranks=4)
    assert [data.data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert all(data.counts(rank) == 1 for rank in range(4))
    ranks = Ranks(9, 16).sharing(mesh)
    assert (ranks.rank, ranks.size, ranks.data_rank, ranks.data_ranks, ranks.counts) == (9, 16, 0, 2, 0.0)


# ---- costs of one rank -------------------------------------------------------------------------------------


def test_each_rank_holds_its_part_of_weights_and_states() -> None:
    of_two, of_four = (footprint_of("fsdp", gpus).kinds for gpus in (2, 4))
    for kind in (Kind.WEIGHTS, Kind.OPTIMIZER_STATES):
        assert of_four[kind] / of_two[kind] == pytest.approx(0.5, abs=0.05)
    assert Kind.GATHERED in of_four


def test_a_rank_of_a_group_takes_what_one_of_so_many_takes() -> None:
    """A rank of two groups of two has the tensors of a rank of one group of two. It also averages gradients
    over the groups.
    """
    job_of_two = replace(JOB, batch_size=4)
    grouped = footprint_of("fp32 + hsdp(2)", 4)
    single = predict(job_of_two, "fp32 + fsdp", gpu="h200", gpus=2).footprint
    assert grouped.requested_bytes == single.requested_bytes
    assert grouped.reserved_bytes == single.reserved_bytes
    assert grouped.communication_bytes == single.communication_bytes + 2 * NCCL["further groups"]


def test_weights_that_stay_gathered_are_gathered_once() -> None:
    again, once = (trace_of(recipe, 4, job=TWO_LAYERS) for recipe in ("fsdp", "fsdp(reshard=none)"))
    layers = TWO_LAYERS.model.layers
    assert len(exchanges(again, ALL_GATHER)) == 2 * layers + 1  # the rest of the model stays gathered
    assert len(exchanges(once, ALL_GATHER)) == layers + 1
    assert len(exchanges(once, REDUCE_SCATTER)) == layers + 1
    assert all(kernel.peers == (4, 1) for kernel in exchanges(once, ALL_GATHER))


def test_groups_average_among_ranks_that_are_far_apart() -> None:
    trace = trace_of("hsdp(2)", 4, job=TWO_LAYERS)
    averaged = [kernel.peers for kernel in exchanges(trace, ALL_REDUCE) if kernel.phase == "backward"]
    assert averaged == [(2, 2)] * (TWO_LAYERS.model.layers + 1)
    assert {kernel.peers for kernel in exchanges(trace, ALL_GATHER)} == {(2, 1)}


def test_gradients_of_the_last_micro_batch_alone_are_exchanged() -> None:
    whole, cut = (trace_of(f"{cut}fsdp", 2) for cut in ("", "micro_batches(2) + "))
    assert len(exchanges(cut, REDUCE_SCATTER)) == len(exchanges(whole, REDUCE_SCATTER))
    whole, cut = (trace_of(f"{cut}ddp", 2) for cut in ("", "micro_batches(2) + "))
    assert len(exchanges(cut, ALL_REDUCE)) == len(exchanges(whole, ALL_REDUCE))


def test_an_exchange_waits_for_what_it_carries_and_is_waited_for() -> None:
    """A layer's weights are copied together, gathered in another stream, and then used."""
    trace = trace_of("fsdp", 2)
    first = next(n for n, kernel in enumerate(trace.kernels) if kernel.operator == ALL_GATHER)
    gathered = trace.kernels[first]
    assert gathered.stream != 0
    assert any("all_gather_copy_in" in trace.kernels[number].operator for number in gathered.after)
    users = [kernel for kernel in trace.kernels if first in kernel.after]
    assert users
    assert all(kernel.stream == 0 for kernel in users)


def test_the_update_waits_for_the_last_bucket() -> None:
    trace = trace_of("ddp", 2)
    last = max(n for n, k in enumerate(trace.kernels) if k.operator == ALL_REDUCE and k.phase == "backward")
    assert any(last in kernel.after and kernel.phase in ("clip", "update") for kernel in trace.kernels)


def test_blocks_of_another_stream_come_from_pools_of_their_own() -> None:
    trace = trace_of("fsdp", 2)
    streams = set(trace.streams.values())
    assert len(streams) > 1
    assert {trace.blocks[index].kind for index in trace.streams} >= {Kind.COMMUNICATION}


def test_a_prediction_says_how_many_gpus_and_what_nccl_keeps() -> None:
    made = predict(JOB, "fsdp", gpu="h200", gpus=4)
    assert made.gpus == 4
    assert made.to_json()["gpus"] == 4
    assert made.footprint.communication_bytes == NCCL["first group"]
    assert made.footprint.nvml_bytes == (
        made.footprint.reserved_bytes + made.footprint.context_bytes + made.footprint.communication_bytes
    )
    assert not any("exchanges" in doubt for doubt in made.doubts)
    assert any("exchanges" in doubt for doubt in predict(JOB, "fsdp", gpu="a100-80gb", gpus=4).doubts)
    assert made.timing is not None
    assert made.timing.samples_per_second == pytest.approx(JOB.batch_size / made.timing.step_seconds)
    assert made.timing.communication_seconds > made.timing.exposed_communication_seconds >= 0
    assert footprint_of("fp32").communication_bytes == 0


def test_the_command_takes_gpus(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    arguments = ["predict", "bert-base-uncased", "--task", "sequence-classification", "--gpu", "h200"]
    assert run([*arguments, "--gpus", "2", "--recipe", "ddp", "--sequence-length", "64", "-v"]) == 0
    shown = capsys.readouterr().out
    assert "2 x H200" in shown
    assert "NCCL" in shown
    assert "scaling efficiency" in shown
    assert run([*arguments, "--gpus", "2"]) == 2
    assert "Add a technique of the slot 'sharding'" in capsys.readouterr().err


# ---- matrices that are cut ---------------------------------------------------------------------------------


def test_each_rank_of_a_group_holds_its_part_of_each_matrix() -> None:
    """The ranks of a group share the same samples. Several groups split a batch among them."""
    alone = footprint_of("fp32").kinds
    cut = footprint_of("tensor(2)", 2).kinds
    for kind in (Kind.WEIGHTS, Kind.OPTIMIZER_STATES):
        assert cut[kind] / alone[kind] == pytest.approx(0.5, abs=0.05)
    both = footprint_of("fsdp + tensor(2)", 4).kinds
    assert both[Kind.WEIGHTS] / alone[Kind.WEIGHTS] == pytest.approx(0.25, abs=0.05)


def test_a_layer_is_exchanged_as_its_plan_says() -> None:
    """The forward pass exchanges once for each matrix with a cut input, and for the embedding.

    The backward pass exchanges once for each matrix with a cut output. Each exchange waits for its input,
    and the next kernel waits for the exchange.
    """
    trace, layers = trace_of("tensor(2)", 2), JOB.model.layers
    summed = [kernel.phase for kernel in exchanges(trace, ALL_REDUCE)]
    assert summed.count("forward") == 2 * layers + 1
    assert summed.count("backward") == 5 * layers + 1
    assert [kernel.phase for kernel in exchanges(trace, ALL_GATHER)] == ["forward"]  # the logits
    first = next(n for n, kernel in enumerate(trace.kernels) if kernel.operator == ALL_REDUCE)
    assert trace.kernels[first].after
    assert any(first in kernel.after for kernel in trace.kernels)


def test_groups_of_a_mesh_are_those_of_the_rank() -> None:
    """The order of rehearsals does not matter, although torch caches a mesh and the next one equals it."""
    for rank in (3, 0):
        trace = trace_of("fsdp + tensor(2)", 4, rank)
        assert {kernel.peers for kernel in exchanges(trace, REDUCE_SCATTER)} == {(2, 2)}
        passes = ("forward", "backward")
        assert {k.peers for k in exchanges(trace, ALL_REDUCE) if k.phase in passes} == {(2, 1)}
    assert communication_bytes(trace, 4) == NCCL["first group"] + 2 * NCCL["further groups"]


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"no tensor-parallel plan for bert\. Take fsdp"):
        Recipe.parse("tensor(2)").check(small_job("bert", 2), installed=False)


def test_experts_are_spread_whole_over_ranks_that_share_layers() -> None:
    """Each rank holds an n-th of the experts, and computes the products of an n-th of the tokens."""
    job = replace(small_job("mixtral", 2), batch_size=8)
    with pytest.raises(RecipeError, match=r"moe_tp_experts, packed_colwise, .* Add expert\(2\)"):
        Recipe.parse("tensor(2)").check(job, installed=False)
    alone = rehearse(job, Recipe.parse("bf16").setup(), CudaPolicy())
    setup = on_gpus(Recipe.parse("bf16 + tensor(2) + expert(2)").setup(), 2)
    spread = rehearse(job, setup, CudaPolicy())
    flops = [sum(k.flops for k in trace.kernels if k.operator == "aten::mm") for trace in (alone, spread)]
    assert flops[1] / flops[0] == pytest.approx(0.5, abs=0.01)
    largest = [max(b.nbytes for b in trace.blocks if b.kind == Kind.GRADIENTS) for trace in (alone, spread)]
    assert largest[1] == largest[0] / 2


# ---- seconds -----------------------------------------------------------------------------------------------

LINK = Interconnect(link=100e9)


def exchange(
    operator: str, nbytes: int, peers: tuple[int, int], stream: int = 1, after: tuple[int, ...] = ()
):
    kernel = Kernel(operator, "", "backward", 0, nbytes, (), "", 1)
    return kernel._replace(peers=peers, stream=stream, after=after)


def compute(after: tuple[int, ...] = ()) -> Kernel:
    return Kernel("aten::mm", "", "backward", 0, 0, (), "", 1)._replace(after=after)


def test_seconds_of_exchanges_within_a_host() -> None:
    size = 10**9
    summed = LINK.seconds(exchange(ALL_REDUCE, size, (2, 1)))
    assert summed == pytest.approx(total("seconds", counts={"exchanges": 1}) + 2 * 0.5 * size / 72e9)
    gathered = LINK.seconds(exchange(ALL_GATHER, size, (4, 1)))
    assert gathered == pytest.approx(total("seconds", counts={"exchanges": 1}) + 0.75 * size / 74e9)
    assert LINK.seconds(exchange(ALL_REDUCE, size, (1, 0))) == 0


def test_between_hosts_as_many_adapters_work_as_gpus_of_the_group_are_in_one() -> None:
    size = 10**10
    slow = replace(LINK, network=10e9)
    whole = slow.seconds(exchange(ALL_GATHER, size, (16, 1)))
    across = slow.seconds(exchange(ALL_GATHER, size, (2, 8)))
    assert whole == pytest.approx(size * 15 / 16 / 68e9, rel=0.01)
    assert across == pytest.approx(size / 2 / 8.5e9, rel=0.01)


def test_a_gpu_without_a_link_of_its_own_exchanges_over_pcie() -> None:
    assert interconnect_of(find_gpu("l40s")).is_pcie
    assert interconnect_of(find_gpu("h200")).link == 450e9


def test_each_group_of_ranks_takes_memory_of_its_own() -> None:
    assert communication_bytes(trace_of("hsdp(2)", 4), 4) == NCCL["first group"] + 2 * NCCL["further groups"]
    assert communication_bytes(trace_of("fsdp", 4), 4) == NCCL["first group"]
    assert communication_bytes(rehearse(JOB, Setup(), CudaPolicy()), 1) == 0


def seconds_of(kernels: list[Kernel], device: list[float], launches: float = 0.0) -> float:
    host = packaged_rates(find_gpu("h200")).host.slower(0.0)
    return SimulatedStreams(kernels, device, [launches] * len(kernels), [], host).seconds


def test_what_nothing_waits_for_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "total", lambda *of: 1.0)
    beside = [exchange(ALL_GATHER, 1, (2, 1)), compute()]
    assert seconds_of(beside, [3.0, 4.0]) == pytest.approx(4.0)
    awaited = [exchange(ALL_GATHER, 1, (2, 1)), compute(after=(0,))]
    assert seconds_of(awaited, [3.0, 4.0]) == pytest.approx(7.0)
    in_one_stream = [exchange(ALL_GATHER, 1, (2, 1), stream=0), compute()]
    assert seconds_of(in_one_stream, [3.0, 4.0]) == pytest.approx(7.0)


def test_kernels_and_exchanges_slow_each_other_down_while_both_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "total", lambda quantity, of: {"exchange": 2.0, "kernel": 1.25}[of])
    beside = [exchange(ALL_GATHER, 1, (2, 1)), compute()]
    # Both run for 5 s. Then the kernel's 4 s and 2.5 s of the exchange's 3 s are done. The rest runs alone.
    assert seconds_of(beside, [3.0, 4.0]) == pytest.approx(5.5)


def test_the_host_may_be_what_a_step_waits_for() -> None:
    assert seconds_of([compute(), compute()], [1.0, 1.0], launches=5.0) == pytest.approx(10.0)


def test_all_exchanges_have_a_name() -> None:
    trace = trace_of("hsdp(2)", 4)
    assert {k.operator for k in trace.kernels if k.peers != (1, 0)} <= COLLECTIVES
