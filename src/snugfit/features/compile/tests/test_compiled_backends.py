"""Modes and backends of `compiled`. Two runs on an H100 check `reduce-overhead`. The rest run, and their
predictions are marked as uncertain.

`data/compile-modes-h100.json` holds the runs: torch 2.11, transformers 5.17, and a bare loop over a model
that is compiled whole.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from compiled_on_cpu import idle_kernels, no_vectors  # noqa: F401
from test_compiled import LOSS_OUTSIDE, of_llama
from test_compiled_model import measured_job
from torch._dynamo.utils import counters

from aligned import peak
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import RecipeError, RehearsalError, UsageError
from snugfit.planning.keep import kept_of
from snugfit.prediction.allocator import Allocator, replay
from snugfit.prediction.predict import predict, rehearse_again
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy, Policy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import rehearse_passes
from snugfit.rehearsal.trace.trace import GRAPH_STREAM, Memory, Trace
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe
from snugfit.units import MIB
from tiers import slow_but

pytestmark = pytest.mark.whole


def rehearsed(family: str, recipe: str, policy: Policy | None = None, layers: int = 2, **facts: Any) -> Trace:
    job = small_job(family, layers, facts or None)
    return rehearse(job, Recipe.parse(recipe).setup(), policy or CpuPolicy())


@functools.cache
def of_gpt2_recorded() -> Trace:
    """Return the trace of two compiled layers in bfloat16 that a GPU records as CUDA graphs; the tests share
    it.
    """
    return rehearsed("gpt2", "bf16 + compiled(mode=reduce-overhead)", CudaPolicy(), hidden_size=256)


NEAREST = {
    "backend=eager": "uncompiled",
    "backend=aot_eager": "uncompiled",
    "backend=cudagraphs": "uncompiled",
    "mode=max-autotune-no-cudagraphs": "compiled",
    "mode=max-autotune": "compiled(mode=reduce-overhead)",
}
"""The simulated recipe whose prediction is used for another mode or backend."""


@pytest.mark.parametrize("setting", slow_but(list(NEAREST), 2))
def test_another_mode_or_backend_is_predicted_as_the_nearest_and_says_so(setting: str) -> None:
    trace, nearest = (rehearsed("llama", recipe) for recipe in (f"compiled({setting})", NEAREST[setting]))
    told = f"Bytes and seconds are uncertain: {setting} of 'compiled' is not simulated"
    assert [sentence for sentence in trace.doubts if sentence.startswith(told)]
    assert not [sentence for sentence in nearest.doubts if "not simulated" in sentence]
    last = [max([*one.live()][trace_end(one) :]) for one in (trace, nearest)]
    assert last[0] == pytest.approx(last[1], rel=1e-3)


@pytest.mark.usefixtures("idle_kernels")
@pytest.mark.parametrize("setting", slow_but(list(NEAREST), 1))
def test_another_mode_or_backend_runs(setting: str) -> None:
    torch._dynamo.reset()
    before = sum(counters["stats"].values())
    events = reports(small_job("llama", 2), Recipe.parse(f"compiled({setting})").setup())
    assert max(event.step for event in events) == 2
    assert sum(counters["stats"].values()) > before, "Dynamo traced its layers"


@pytest.mark.whole
@pytest.mark.slow
def test_on_a_cpu_a_mode_with_graphs_records_none() -> None:
    graphs, plain = rehearsed("llama", "compiled(mode=reduce-overhead)", layers=3), of_llama()
    assert not graphs.of_graphs
    assert peak(foreseen(graphs)) - peak(foreseen(plain)) <= LOSS_OUTSIDE


@pytest.mark.parametrize("what", slow_but(["layers", "model"], 1))
def test_the_third_step_plays_graphs_back_and_allocates_nothing_for_them(what: str) -> None:
    """The graphs' memory pool stays reserved. Kernels are launched as one graph, except the copies
    of inputs.
    """
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    recipe = f"compiled(what={what}, mode=reduce-overhead)"
    whole = what == "model"
    trace = rehearsed("llama", recipe, CudaPolicy(), hidden_size=256) if whole else of_gpt2_recorded()
    steps = {trace.blocks[index].step for index in trace.of_graphs}
    assert steps == {0, 1}
    assert not {index for index in trace.of_graphs if index + 1 in set(trace.events[trace_end(trace) :])}
    assert any(kernel.played for kernel in trace.kernels)
    inside = [kernel for kernel in trace.kernels if kernel.played]
    assert sum(kernel.programs for kernel in inside) == (2 if whole else 4)
    kept = replay(trace).reserved[-1]
    assert kept > sum(trace.blocks[index].nbytes for index in trace.alive_at(len(trace.events) - 1))


def trace_end(trace: Trace) -> int:
    """Return the index of the first event of the last step."""
    last = max(mark.step for mark in trace.marks)
    return next(mark.event for mark in trace.marks if mark.step == last)


@pytest.mark.slow
def test_a_classifier_is_compiled_once_more_and_plays_a_step_later() -> None:
    """A classifier of transformers sets its `problem_type` in the first step, so torch recompiles it in the
    second.
    """
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    trace = rehearsed("bert", "compiled(what=model, mode=reduce-overhead)", CudaPolicy(), 1, hidden_size=256)
    assert max(mark.step for mark in trace.marks) == 4
    assert {trace.blocks[index].step for index in trace.of_graphs} == {0, 1, 2}
    assert any(kernel.played for kernel in trace.kernels)


def test_the_pool_of_graphs_gives_nothing_back_and_lends_nothing() -> None:
    allocator = Allocator()
    graphs, own = allocator.allocate(30 * MIB, Memory.GRAPHS), allocator.allocate(30 * MIB)
    allocator.release(graphs)
    allocator.release(own)
    allocator.allocate(25 * MIB)
    assert allocator.reserved == 60 * MIB, "neither pool uses memory of the other"
    allocator.release(allocator.allocate(25 * MIB, Memory.GRAPHS))
    assert allocator.reserved == 60 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB, "one block of the other pool is in use"


@pytest.mark.slow
def test_the_stream_that_graphs_are_recorded_on_has_pools_of_its_own() -> None:
    """Two numbers of a generator take a segment there (2 MiB for gpt2 and a Llama on an H100). The segment is
    freed with them; the graphs' own segments are not."""
    allocator = Allocator()
    own = allocator.allocate(8)
    beside = allocator.allocate(8, stream=GRAPH_STREAM)
    allocator.allocate(8, Memory.GRAPHS)
    assert allocator.reserved == 6 * MIB
    allocator.release(own)
    allocator.release(beside)
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    trace = of_gpt2_recorded()
    assert [(trace.blocks[index].nbytes, stream) for index, stream in trace.streams.items()] == [
        (8, GRAPH_STREAM)
    ] * 2


def test_what_recording_gave_back_is_taken_again_when_graphs_are_first_played() -> None:
    """The first replayed step allocates workspaces outside of graphs, forward and backward. The next step
    already equals all later ones. So gpt2 reserves 394 MiB more on an H100 in a fourth step."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    trace = of_gpt2_recorded()
    taken = [
        (block.step, block.phase)
        for index, block in enumerate(trace.blocks)
        if block.operator == "cuBLAS workspace" and trace.memory_of(index) is Memory.OWN
    ]
    assert taken[-2:] == [(2, "forward"), (2, "backward")]
    assert max(mark.step for mark in trace.marks) == 3


def test_what_a_graph_reads_and_gives_back_is_its_own_copy() -> None:
    """The first layer's input is saved for the backward pass. The recording step saves the copy that the
    graph was recorded with. The original is freed after its copy, before the recording of the next layer."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    trace = of_gpt2_recorded()
    inputs, layer = (
        [
            index
            for index, one in enumerate(trace.blocks)
            if (one.step, one.module) == (1, f"transformer.{name}")
        ]
        for name in ("drop", "h.1")
    )
    original = max(inputs, key=lambda index: trace.blocks[index].nbytes)
    assert trace.events.index(-(original + 1)) < trace.events.index(layer[0] + 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compiled(mode=reduce-overhead) + micro_batches(2)", "would not add up"),
        ("compiled(backend=cudagraphs) + every_layer", "runs programs again"),
        ("compiled(mode=max-autotune) + chunked_loss", "not tested with CUDA graphs"),
        ("compiled(backend=aot_eager) + budget(0.5)", "cuts the programs of Inductor"),
    ],
)
def test_what_a_mode_or_backend_does_not_go_with_is_said(words: str, told: str) -> None:
    with pytest.raises(RecipeError, match=f"{told}.*Try 'compiled"):
        Recipe.parse(words).check(small_job("llama"), installed=False)


def test_plans_do_not_search_steps_that_play_graphs() -> None:
    """Steps with CUDA graphs are not joined from simulated parts either. Other modes may be fixed with
    `keep`.
    """
    kept_of(small_job("llama"), "compiled(backend=aot_eager)").refuse()
    with pytest.raises(UsageError, match=r"do not search with compiled\(mode=reduce-overhead\).*Predict one"):
        kept_of(small_job("llama"), "compiled(mode=reduce-overhead)").refuse()
    with pytest.raises(UsageError, match=r"start: plans do not look at.*Start from 'compiled'"):
        kept_of(small_job("llama"), start=Recipe.parse("bf16 + compiled(backend=cudagraphs)")).refuse()
    with pytest.raises(RehearsalError, match="not put together from parts"):
        rehearse_passes(
            small_job("llama"), Recipe.parse("compiled(mode=reduce-overhead)").setup(), CudaPolicy()
        )


@pytest.mark.parametrize("recipe", slow_but(["bf16_pure + eager + compiled", "bf16_pure + compiled"], 1))
def test_attention_that_a_program_runs_is_told_in_every_rehearsal(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention kernel is reported even if Inductor inserts it, or a graph is reused. NVML shows 16 MiB
    for cuDNN's.
    """
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    job = small_job("bert", 2, facts={"hidden_size": 128, "num_attention_heads": 2})
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    setup = Recipe.parse(recipe).setup()
    assert [rehearse(job, setup, CudaPolicy()).attention for _ in range(2)] == [("cudnn",), ("cudnn",)]


TRUTH = json.loads((Path(__file__).parent / "data" / "compile-modes-h100.json").read_text())
RUNS = {value: run for run in TRUTH["runs"] if run["name"] == "llama4" for value in run["compile"].values()}


MOST = ("requested", "allocated", "reserved")


def measured_and_predicted(how: str) -> tuple[dict[str, Any], Prediction]:
    """Return the measured run of a Llama of four layers, and its prediction."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    seen = RUNS[how]
    recipe = Recipe.parse(f"bf16 + adamw_fused + compiled(what=model, {next(iter(seen['compile']))}={how})")
    return seen, predict(measured_job("llama4_whole"), recipe, gpu="h100-sxm")


@pytest.mark.slow
def test_the_bytes_of_measured_steps_with_graphs_are_met() -> None:
    """The predicted bytes equal the measured ones, except zeros in place of the gradient of logits. torch
    2.11 keeps them until the end of the backward pass, and 2.13 drops them after their copy.
    `test_compiled_truth.py` checks measured bytes of compiled layers in `make test`.
    """
    seen, found = measured_and_predicted("reduce-overhead")
    most = {key: max(step[key] for step in seen["steps"]) for key in MOST}
    zeros = 0 if boxed_gradients_are_kept() else ZEROS
    assert found.footprint.requested_bytes + zeros == pytest.approx(most["requested"], rel=1e-4)
    assert found.footprint.allocated_bytes + zeros == pytest.approx(most["allocated"], rel=2e-4)
    assert found.footprint.reserved_bytes == pytest.approx(most["reserved"], rel=0.01)
    trace = rehearse_again(found)
    steady = max(list(trace.live())[trace_end(trace) :])
    assert steady == pytest.approx(seen["steps"][2]["requested"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["aot_eager", "cudagraphs"])
def test_measured_steps_of_another_backend_are_predicted_as_uncertain(how: str) -> None:
    """The predicted bytes are within 7 % of the measured ones, by chance."""
    seen, found = measured_and_predicted(how)
    assert any(f"backend={how} of 'compiled' is not simulated" in sentence for sentence in found.doubts)
    allocated = max(step["allocated"] for step in seen["steps"])
    assert found.footprint.allocated_bytes == pytest.approx(allocated, rel=0.07)


ZEROS = 2 * 2048 * 32000 * 2
"""Bytes of logits of 2 x 2048 tokens in bfloat16."""


def boxed_gradients_are_kept() -> bool:
    """Return true if this torch keeps the inputs of a compiled backward pass until its end."""
    return not hasattr(torch.autograd.Function, "boxed_grads_call")
