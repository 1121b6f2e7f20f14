"""Pipeline stages: laws 1 and 3 (equal allocations, equal training) against real gloo processes, errors, and
seconds of a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed import pipelining

import staged
from aligned import peak
from reported import foreseen
from small_models import FAMILIES, small_job
from snugfit.errors import RecipeError
from snugfit.features.distributed.apply.stages import layers_of
from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.price.communication import communication_bytes
from snugfit.features.distributed.price.evidence import evidence
from snugfit.features.distributed.price.exchanges import weights_of_stages
from snugfit.features.distributed.price.stages import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Pass,
    StageWork,
    orders_of,
    rank_of,
    simulate_stages,
    stages_to_rehearse,
    stand_in,
)
from snugfit.features.distributed.simulate import ranks as rank_patches
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.predict import predict, rehearse_again
from snugfit.prediction.rates import calibration_file, rates_for
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import ALL_REDUCE, RECEIVE, SEND, WEIGHTS_APART, Trace
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from tiers import few_of, slow_but

NCCL = {row["formula"]: row["value"] for row in evidence() if row["quantity"] == "nvml_bytes"}
"""GPU memory that NCCL takes, in bytes by NVML, by the formula that it is multiplied with."""

JOB = small_job("llama", 4, batch_size=16, clip=1.0)
"""A job with four layers, one for each of four pipeline stages."""

TIED = small_job("llama", 4, {"tie_word_embeddings": True}, batch_size=16, clip=1.0)
"""The same job, with its embedding as its output head."""

DEEP = replace(JOB, model=small_job("llama", 8).model)
DEEP_TIED = replace(TIED, model=small_job("llama", 8, {"tie_word_embeddings": True}).model)
"""A job with eight layers, in two stages on each of four ranks."""

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
    "pipeline(2) + fsdp + micro_batches(2) + bf16 + every_layer",
    "pipeline(2) + tensor(2) + micro_batches(4)",
)
TIED_TWO = (TWO[0], TWO[2])
TIED_FOUR = (FOUR[0], FOUR[2], FOUR[3], FOUR[5])
INTERLEAVED = (
    (2, JOB, "pipeline(2, schedule=interleaved) + micro_batches(4)"),
    (2, TIED, "pipeline(2, schedule=interleaved) + micro_batches(2) + every_layer + bf16"),
    (2, TIED, "pipeline(2, schedule=zero_bubble) + micro_batches(4)"),
    (2, JOB, "pipeline(2, schedule=zero_bubble, chunks=1) + micro_batches(4) + bf16"),
    (4, DEEP_TIED, "pipeline(4, schedule=interleaved) + micro_batches(8)"),
    (4, JOB, "pipeline(2, schedule=interleaved) + tensor(2) + micro_batches(4)"),
    (4, DEEP, "pipeline(4, schedule=zero_bubble) + micro_batches(4)"),
    (4, TIED, "pipeline(2, schedule=interleaved) + fsdp + micro_batches(2)"),
    (4, JOB, "pipeline(2, schedule=interleaved) + fsdp + micro_batches(4) + bf16 + every_layer"),
    (4, TIED, "pipeline(2, schedule=interleaved) + ddp + micro_batches(2)"),
    (4, JOB, "pipeline(2, schedule=zero_bubble) + ddp + micro_batches(4)"),
    (4, TIED, "pipeline(2, schedule=zero_bubble) + tensor(2) + micro_batches(2) + every_layer"),
)
EVERY: staged.Cases = (
    *((2, JOB, recipe) for recipe in few_of(TWO, TWO)),
    *((4, JOB, recipe) for recipe in few_of(FOUR, FOUR)),
    *((2, TIED, recipe) for recipe in few_of(TIED_TWO, TIED_TWO[:1])),
    *((4, TIED, recipe) for recipe in few_of(TIED_FOUR, TIED_FOUR)),
    *few_of(INTERLEAVED, [*INTERLEAVED[:2], *INTERLEAVED[3:]]),
)  # fmt: skip
"""Cases of schedules. `make test` runs 1F1B and zero-bubble, whose stages interleave, on two ranks. 
`test_train_stages.py` trains interleaved stages."""
NAMES = [f"{ranks}-{'tied-' * (job in (TIED, DEEP_TIED))}{recipe}" for ranks, job, recipe in EVERY]


def hold(ranks: int, recipe: str, rank: int, job: Job = JOB) -> None:
    staged.hold(EVERY, ranks, job, recipe, rank)


def rehearsed(ranks: int, recipe: str, rank: int, job: Job = JOB) -> Trace:
    return staged.rehearsed(ranks, recipe, rank, job)


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "job", "recipe"), EVERY, ids=NAMES)
def test_each_real_stage_allocates_what_its_trace_says(ranks: int, job: Job, recipe: str) -> None:
    for rank in range(ranks):
        hold(ranks, recipe, rank, job)


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "job", "recipe"), EVERY, ids=NAMES)
def test_stages_train_as_one_process_does(ranks: int, job: Job, recipe: str) -> None:
    """Law 3 (equal training): the losses of three steps, and each stage's weights after them, are equal."""
    staged.hold_training(EVERY, ranks, job, recipe)


@pytest.mark.whole
def test_what_is_sent_and_not_held_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    has_nothing = rank_patches._Handle()
    monkeypatch.setattr(rank_patches, "_Handle", lambda *tensors: has_nothing)
    staged.rehearsed.cache_clear()
    with pytest.raises(AssertionError):
        hold(2, INTERLEAVED[2][2], 0, TIED)
    staged.rehearsed.cache_clear()


@pytest.mark.whole
def test_nccl_keeps_what_is_sent_alone_while_there_is_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13, torch starts a stage's exchanges together, and the handle that NCCL returns for them
    references no tensors.
    """
    if Version(torch.__version__) < Version("2.13"):
        pytest.skip(f"torch {torch.__version__} begins a stage's exchanges together by itself")
    setup = on_gpus(Recipe.parse("pipeline(2, schedule=interleaved) + micro_batches(4)").setup(), 2)
    policy = CudaPolicy()
    alone = rehearse(job_of_rank(JOB, setup), setup, policy, rank=1)
    monkeypatch.setattr(
        pipelining.schedules,
        "_batch_p2p",
        lambda ops, desc=None: torch.distributed.batch_isend_irecv(ops) if ops else [],
    )
    together = rehearse(job_of_rank(JOB, setup), setup, policy, rank=1)
    assert sent(together) == sent(alone)
    assert peak(foreseen(together)) < peak(foreseen(alone))


@pytest.mark.whole
def test_gradients_of_weights_apart_take_the_host_time() -> None:
    """Zero-bubble schedules compute gradients of weights separately; this host time counts each chunk of each
    micro-batch. The last stage adds its norm and head. The first stage needs no gradient of its input, so it
    computes all gradients at once.
    """

    def counted(schedule: str, rank: int) -> list[int]:
        trace = rehearsed(2, f"pipeline(2, schedule={schedule}) + micro_batches(4)", rank, TIED)
        return [kernel.tensors for kernel in trace.kernels if kernel.operator == WEIGHTS_APART]

    assert counted("interleaved", 1) == []
    assert sorted(counted("zero_bubble", 1)) == [9] * 4 + [11] * 4
    assert counted("zero_bubble", 0) == [9] * 4


OF_FOUR = "pipeline(4) + micro_batches(4)"


def test_stages_send_each_micro_batch_once_each_way() -> None:
    first, middle, last = (rehearsed(4, OF_FOUR, rank) for rank in (0, 1, 3))
    assert sent(first) == {(SEND, 1): 4, (RECEIVE, 1): 4}
    assert sent(middle) == {(SEND, 1): 4, (RECEIVE, 1): 4, (SEND, -1): 4, (RECEIVE, -1): 4}
    assert sent(last) == {(SEND, -1): 4, (RECEIVE, -1): 4}


def sent(trace: Trace) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for kernel in trace.kernels:
        if kernel.operator in (SEND, RECEIVE):
            key = (kernel.operator, kernel.peers[1])
            counts[key] = counts.get(key, 0) + 1
    return counts


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("pipeline(2)", "2 stages need at least 2 micro-batches, and there are 1: with fewer a GPU waits"),
        ("pipeline(4) + micro_batches(2)", "waits for others 60% of a step. Add micro_batches\\(8\\)"),
        ("pipeline(2, schedule=gpipe)", "with one micro-batch only one GPU works at a time"),
        ("pipeline(5) + micro_batches(8)", "llama has 4 layers. Take at most so many stages"),
        (
            "pipeline(2, schedule=interleaved, chunks=4) + micro_batches(4)",
            "llama has 4 layers. Take at most so many stages, and these are 2 of 4 parts each",
        ),
        ("pipeline(2, schedule=interleaved) + micro_batches(5)", "in 2 rounds.* Take micro_batches\\(4\\)"),
        ("pipeline(2, schedule=zero_bubble)", "2 stages need at least 2 micro-batches"),
        (
            "pipeline(2, schedule=zero_bubble) + fsdp + micro_batches(2)",
            "where torch's FSDP2 does not see them .* cannot be combined with fsdp here. Try "
            "schedule=interleaved",
        ),
        (
            "pipeline(2, schedule=zero_bubble) + ddp + tensor(2) + micro_batches(2)",
            "where torch's FSDP2 does not see them .* cannot be combined with ddp here",
        ),
        ("pipeline(2, chunks=4) + micro_batches(2)", "schedule=1f1b has one part of the layers on each GPU"),
        (
            "pipeline(2, schedule=interleaved, chunks=1) + micro_batches(2)",
            "one part of the layers on each GPU is schedule=1f1b",
        ),
        (
            "pipeline(2, schedule=interleaved) + micro_batches(2) + segments",
            "recomputes layers together that other GPUs' layers lie between. Try 'every_layer'",
        ),
        ("pipeline(2) + micro_batches(2) + fp16", "is not simulated together with fp16. Try 'bf16'"),
        ("pipeline(2) + micro_batches(2) + lora(r=2)", "is not simulated together with lora"),
        ("pipeline(2) + micro_batches(2) + zero1", "is not simulated together with zero1. Try 'fsdp' or"),
        ("pipeline(2) + micro_batches(2) + zero3", "is not simulated together with zero3. Try 'fsdp' or"),
    ],
)
def test_what_does_not_go_together(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(JOB, installed=False)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (small_job("bert"), "only decoders that train as causal-lm are cut into stages"),
        (small_job("t5"), "only decoders that train as causal-lm are cut into stages"),
    ],
)
def test_models_that_are_not_cut(job: Job, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse("pipeline(2) + micro_batches(2)").check(job, installed=False)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            FAMILIES["gpt2"][0] | {"model_type": "gpt2", "n_layer": 4},
            "GPT2LMHeadModel .*: only decoders are that have",
        ),
        (
            FAMILIES["llama"][0] | {"model_type": "granite", "num_hidden_layers": 4},
            "GraniteForCausalLM .*: it changes the embedded tokens before its first",
        ),
    ],
)
def test_a_model_of_another_build_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    model = Model.from_config(config, name="other")
    job = Job(model=model, task=Task.CAUSAL_LM, batch_size=16, sequence_length=16)
    with pytest.raises(RecipeError, match=why):
        predict(job, "pipeline(2) + micro_batches(4)", gpu="h200", gpus=2)


def test_a_word_of_other_libraries_is_understood() -> None:
    assert Recipe.parse("pp(4)") == Recipe.parse("pipeline(4)")


# ---- the cost of a step ----------------------------------------------------------------------------------


@pytest.mark.stored_rehearsals
def test_ranks_differ_and_the_one_that_needs_the_most_is_shown() -> None:
    predicted = predict(JOB, "pipeline(4) + micro_batches(4)", gpu="h200", gpus=4)
    assert [(one.rank, one.stage, one.layers) for one in predicted.ranks] == [(0, 0, 1), (1, 1, 1), (3, 3, 1)]
    worst = max(predicted.ranks, key=lambda one: one.nvml_bytes or 0)
    assert predicted.rank == worst.rank
    assert predicted.footprint.requested_bytes == worst.requested_bytes
    assert predicted.needed_bytes == worst.nvml_bytes
    document = json.loads(json.dumps(predicted.to_json()))
    assert [one["rank"] for one in document["ranks"]] == [0, 1, 3]
    shown = rehearse_again(predicted)
    assert shown.peak().nbytes == worst.requested_bytes
    assert not predict(JOB, "fsdp", gpu="h200", gpus=4).ranks


def test_gpipe_keeps_every_micro_batch_and_1f1b_as_many_as_there_are_stages() -> None:
    traces = [
        rehearsed(2, f"pipeline(2{schedule}) + micro_batches(4)", 0) for schedule in ("", ", schedule=gpipe")
    ]
    one, all_of_them = (
        sum(
            trace.blocks[block].nbytes
            for block in trace.alive_at(trace.peak().position)
            if trace.blocks[block].kind == Kind.ACTIVATIONS
        )
        for trace in traces
    )
    assert all_of_them == pytest.approx(2 * one, rel=0.2)


def test_layers_are_cut_as_evenly_as_may_be() -> None:
    assert [[*layers_of(stage, 3, 8)] for stage in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    wish = ParallelWish(weights="alone", stages=5, ranks=5, schedule="1F1B")
    assert stages_to_rehearse(wish, 12) == (0, 1, 2, 4)  # the second has more layers, the third fewer
    assert [stand_in(stage, wish, 12) for stage in range(5)] == [0, 1, 2, 2, 4]
    assert rank_of(3, replace(wish, ranks=20)) == 12


def passes(*each: tuple[str, int, float]) -> StageWork:
    return StageWork(passes={(kind, number): seconds for kind, number, seconds in each})


EVEN = passes((FORWARD, 0, 1.0), (BACKWARD, 0, 2.0))


def orders(ranks: int, micro_batches: int, schedule: str, chunks: int = 1) -> Sequence[Sequence[Pass]]:
    wish = ParallelWish(weights="alone", ranks=ranks, stages=ranks, schedule=schedule, chunks=chunks)
    return orders_of(wish, micro_batches)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_bubble_of_even_stages_is_the_known_one(schedule: str) -> None:
    """The idle share is (n - 1) / (m + n - 1) (Narayanan et al., arXiv 2104.04473, section
    2.2.1)."""
    step = simulate_stages([EVEN] * 4, orders(4, 8, schedule), transfer=0.0, clips=True)
    assert step.step_seconds == pytest.approx(3.0 * (8 + 3))
    assert step.bubble == pytest.approx(3 / 11)


def test_stages_wait_for_the_slowest_and_for_what_is_sent() -> None:
    slow = passes((FORWARD, 0, 2.0), (BACKWARD, 0, 4.0))
    step = simulate_stages([EVEN, slow], orders(2, 8, "1F1B"), transfer=0.0, clips=True)
    assert step.step_seconds == pytest.approx(8 * 6.0 + 3.0)
    assert step.idle == pytest.approx([27.0, 3.0])
    far = simulate_stages([EVEN] * 2, orders(2, 2, "GPipe"), transfer=0.5, clips=True)
    assert far.step_seconds == pytest.approx(3.0 * 3 + 2 * 0.5)


def test_the_bubble_of_interleaved_stages_is_as_much_smaller_as_they_are_more() -> None:
    """The idle time is 1 / chunks of the usual one, for the same work (Narayanan et al., section 2.2.2)."""
    work = passes(*((kind, number, s / 2) for kind, s in ((FORWARD, 1), (BACKWARD, 2)) for number in (0, 1)))
    step = simulate_stages([work] * 4, orders(4, 8, "Interleaved1F1B", 2), transfer=0.0, clips=True)
    assert step.step_seconds == pytest.approx(3.0 * (8 + 3 / 2))
    assert step.idle == pytest.approx([4.5] * 4)


def test_gradients_of_weights_fill_the_bubble() -> None:
    kinds = (FORWARD, INPUTS, WEIGHTS)
    work = passes(*((kind, number, 0.5) for kind in kinds for number in (0, 1)))
    step = simulate_stages([work] * 4, orders(4, 8, "InterleavedZeroBubble", 2), transfer=0.0, clips=True)
    assert 24 <= step.step_seconds < 3.0 * (8 + 3 / 2)


@pytest.mark.parametrize("name", slow_but(["1f1b", "zero_bubble", "gpipe", "interleaved"], 1))
def test_torch_runs_the_passes_in_the_order_that_is_simulated(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ran: list[Pass] = []

    def logged(kind: str, plain: Any) -> Any:
        def run(self: Any, chunk: int, *given: Any, **more: Any) -> Any:
            split = kind == BACKWARD and not more.get("full_backward", True)
            ran.append(Pass(INPUTS if split else kind, self.stage_index, chunk))
            return plain(self, chunk, *given, **more)

        return run

    stage = pipelining.PipelineStage
    methods = {
        FORWARD: "forward_one_chunk", BACKWARD: "backward_one_chunk", WEIGHTS: "backward_weight_one_chunk",
    }  # fmt: skip
    for kind, method in methods.items():
        monkeypatch.setattr(stage, method, logged(kind, getattr(stage, method)))
    setup = on_gpus(Recipe.parse(f"pipeline(4, schedule={name}) + micro_batches(8)").setup(), 4)
    assert setup.parallel is not None
    job, steps = (JOB, 2) if name == "1f1b" else (DEEP, 1)
    for rank in (0, 1, 3):  # the third is like the second
        ran.clear()
        trace = rehearse(job, setup, CpuPolicy(), steps=steps, rank=rank)
        order = orders_of(setup.parallel, 8)[rank]
        assert ran == steps * list(order), rank
        assert len(trace.passes) == 1 + len(order), "the loop marks its beginning"


@pytest.mark.slow
@pytest.mark.stored_rehearsals
def test_a_step_is_as_long_as_its_stages_take() -> None:
    few, many = (predict(JOB, f"pipeline(2) + micro_batches({n})", gpu="h200", gpus=2).timing for n in (2, 4))
    assert few is not None
    assert many is not None
    assert few.bubble > many.bubble > 0
    assert 0 < few.idle_seconds < few.step_seconds
    assert few.communication_seconds > 0


@pytest.mark.stored_rehearsals
def test_all_seconds_are_those_of_the_calibration_of_so_many_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step lasts at least as long as its GPU's own host needs. In this test that host launches slowly
    while two GPUs work."""
    monkeypatch.setenv("SNUGFIT_RATES", str(tmp_path))
    gpu = find_gpu("h200")
    slow = replace(rates_for(gpu), host=rates_for(gpu).host.slower(20.0))
    calibration_file(gpu, 2).write_text(json.dumps({"rates": slow.to_json()}))
    timing = predict(JOB, "pipeline(2) + micro_batches(2)", gpu="h200", gpus=2).timing
    assert timing is not None
    assert timing.step_seconds > timing.host_seconds > 10 * timing.device_seconds


def test_a_head_that_is_the_embedding_is_in_two_stages_and_on_the_host_once() -> None:
    traces = [rehearsed(2, TWO[0], rank, TIED) for rank in (0, 1)]
    embedding = 4 * 96 * 64
    for trace in traces:
        sums = [kernel for kernel in trace.kernels if kernel.operator == ALL_REDUCE]
        assert [one.nbytes for one in sums if one.phase == "update"] == [embedding]
    setup = on_gpus(Recipe.parse(TWO[0]).setup(), 2)
    whole = rehearse(TIED, Recipe.parse("plain").setup(), CpuPolicy())
    weights = sum(block.nbytes for block in whole.blocks if block.kind == Kind.WEIGHTS)
    rotary = 2 * 8 * 4  # bytes of buffers in every stage
    assert weights_of_stages(TIED, setup.parallel, traces) == weights + rotary
    assert weights_of_stages(JOB, setup.parallel, traces) == weights + rotary + embedding


def test_nccl_has_memory_for_each_neighbour() -> None:
    first, middle = (communication_bytes(rehearsed(4, OF_FOUR, rank), 4) for rank in (0, 1))
    assert (first, middle) == (
        NCCL["first group"] + NCCL["first peer"],
        NCCL["first group"] + NCCL["first peer"] + NCCL["further peers"],
    )
    around = rehearsed(4, "pipeline(4, schedule=interleaved) + micro_batches(4)", 0, DEEP)
    assert (
        communication_bytes(around, 4) == NCCL["first group"] + NCCL["first peer"] + NCCL["further peers"]
    )  # the last one is its neighbour
    assert (
        communication_bytes(rehearsed(4, "pipeline(2) + ddp + micro_batches(2)", 0), 4)
        == NCCL["first group"] + 2 * NCCL["further groups"] + NCCL["first peer"]
    )
