"""Decode steps as CUDA graphs: equal tokens, one cache for all calls, and predictions of their replays.

A GPU compares them with eager decoding: `lab/measure_generation.py --captured`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from run_again import captured_on_cpu

from snugfit.errors import RecipeError, UsageError
from snugfit.features.inference import long_runs
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.measurement.child import results_of
from snugfit.prediction.device import graphs_bytes
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.results.footprint import Kind
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 32}
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2,
    "vocab_size": 96, "decoder_start_token_id": 0,
}  # fmt: skip
CAPTURED = "captured"
CALLS, NEW_TOKENS = 2, 6


def job_of(config: dict[str, Any], *, new_tokens: int = NEW_TOKENS, **more: Any) -> Job:
    settings = {"new_tokens": new_tokens, **more.pop("settings", {})}
    model = Model.from_config(config, name=config["model_type"])
    sizes = {"task": "causal-lm", "batch_size": 2, "sequence_length": 12, "phase": "generate", **more}
    return Job(model=model, phase_settings=settings, **sizes)


def rehearsed(recipe: str, **more: Any) -> Trace:
    return rehearse(job_of(LLAMA, **more), Recipe.parse(recipe).setup(), CudaPolicy())


# ---- the same tokens -------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    ("config", "more"), [(LLAMA, {"padding": 0.5}), (MISTRAL, {}), (LLAMA, {"settings": {"sample": True}})]
)
def test_replayed_decode_steps_choose_the_tokens_of_eager_ones(
    config: dict[str, Any], more: dict[str, Any]
) -> None:
    job = job_of(config, **more)
    with captured_on_cpu() as graphs:
        torch.manual_seed(0)
        step: Any = open_step(job, Recipe.parse(CAPTURED).setup(), "plain", torch.device("cpu"))
        step.run(CALLS, Observer())
        replays = CALLS * (NEW_TOKENS - 1) - 1
        assert (graphs[0].recorded, graphs[0].played) == (1, replays)
        results = results_of(step, 0)
    # The comparison makes a call too, with the same cache and graph.
    assert (graphs[0].recorded, graphs[0].played) == (1, replays + NEW_TOKENS - 1)
    assert results["ids_equal"]
    assert results["largest_error"] < 1e-5


@pytest.mark.whole
def test_a_decode_step_that_cannot_be_recorded_runs_without_a_graph() -> None:
    with captured_on_cpu(1) as graphs:
        torch.manual_seed(0)
        step: Any = open_step(job_of(MISTRAL), Recipe.parse(CAPTURED).setup(), "plain", torch.device("cpu"))
        step.run(1, Observer())
        results = results_of(step, 0)
    assert not graphs[0].played
    assert results["ids_equal"]
    assert results["note"] == "Decode steps run without CUDA graphs: it waits."


# ---- its prediction --------------------------------------------------------------------------------------


def test_a_replay_has_the_kernels_of_a_decode_step_and_one_launch() -> None:
    eager, played = rehearsed("plain"), rehearsed(CAPTURED)
    in_graphs = [kernel for kernel in played.kernels if kernel.played]
    assert sum(kernel.programs for kernel in in_graphs) == NEW_TOKENS - 1
    assert {kernel.phase for kernel in in_graphs} == {"decode"}
    products = [one.operator for one in eager.kernels if one.operator == "aten::mm"]
    assert [one.operator for one in played.kernels if one.operator == "aten::mm"] == products
    # The choice of the token stays outside, with copies of the inputs.
    outside = [one for one in played.kernels if not one.played and one.phase == "decode"]
    assert "aten::argmax" in {one.operator for one in outside}
    assert sum(one.operator == "aten::copy_" for one in outside) >= NEW_TOKENS - 1
    assert graphs_bytes(played.kernels)
    assert not played.doubts


def test_the_graph_has_memory_of_its_own_and_the_cache_lasts() -> None:
    trace = rehearsed(CAPTURED)
    assert {trace.blocks[index].step for index in trace.of_graphs} == {0}
    caches = [block for block in trace.blocks if block.kind == Kind.KEY_VALUES and block.nbytes > 8]
    # Keys and values of two layers, in fp32.
    assert [block.nbytes for block in caches] == [2 * 1 * (12 + NEW_TOKENS - 1) * 16 * 4] * 4
    assert {block.step for block in caches} == {0}


def test_all_replays_are_simulated_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens take one simulated pass alone."""
    monkeypatch.delattr(long_runs.CallWindows, "trace")
    played = [kernel for kernel in rehearsed(CAPTURED, new_tokens=40).kernels if kernel.played]
    assert sum(kernel.programs for kernel in played) == 39


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (LLAMA, {"phase": "evaluate"}, "only training steps and decode steps are recorded"),
        (LLAMA, {"settings": {"cache": "quantized"}}, r"the job a quantized one\. Leave --cache out\."),
        (LLAMA, {"settings": {"beams": 2}}, r"Leave --beams out\."),
        (T5, {"task": "seq2seq-lm"}, "the task is seq2seq-lm"),
        (MISTRAL, {"new_tokens": 30}, r"its 41 tokens fill a sliding window of 32\. Leave it out\."),
    ],
)
def test_a_generation_that_cannot_be_recorded_is_one_error(
    config: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    if more.get("phase") == "evaluate":
        job = Job(model=Model.from_config(config, name="llama"), task="causal-lm", phase="evaluate")
    else:
        job = job_of(config, **more)
    with pytest.raises(RecipeError, match=message):
        Recipe.parse(CAPTURED).check(job)


@pytest.mark.parametrize("recipe", ["bf16", "eager", "kv_cache(static)"])
def test_techniques_that_were_not_recorded_are_one_error(recipe: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(recipe)):
        Recipe.parse(f"{recipe} + captured").check(job_of(LLAMA))


def test_a_cpu_is_refused() -> None:
    step = open_step(job_of(LLAMA), Recipe.parse(CAPTURED).setup(), "plain", torch.device("cpu"))
    with pytest.raises(UsageError, match=r"a CPU has none\. Leave it out, or run it on a GPU"):
        step.run(1, Observer())
