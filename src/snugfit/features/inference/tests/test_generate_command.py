"""The phase `generate` on the command line: its settings, its mistakes, and its results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from generating_models import GENERATING, generating_job

from snugfit.cli.main import run
from snugfit.errors import JobError, UsageError
from snugfit.features.inference import speed
from snugfit.features.inference.phases import GENERATION
from snugfit.features.inference.settings import default_prompt, quantized_backend
from snugfit.features.inference.step import DECODE, LOOP_FUNCTIONS
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.largest import field_of, largest
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import rates_for
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.prediction import Prediction
from snugfit.results.step_seconds import LINK
from snugfit.techniques.recipe import Recipe
from snugfit.units import MIB


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return the folder of a small Llama."""
    facts = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **GENERATING["llama"][0]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    return str(tmp_path)


MISTAKES = [
    ("predict gpt2 --phase generate --new-tokens 0", "new tokens is 0; allowed are whole numbers from 1"),
    ("predict gpt2 --phase generate --beams 0", "beams is 0"),
    (
        "predict gpt2 --phase generate --prompt 1000 --new-tokens 100",
        "Try --new-tokens 25, or a shorter prompt",
    ),
    # The default prompt is shorter for a model with few positions.
    ("predict gpt2 --phase generate --new-tokens 1025", "a prompt of 1 with 1025 new tokens need 1025"),
    ("predict bert-large-uncased --task masked-lm --phase generate", "has the task masked-lm"),
    ("predict gpt2 --beams 3", "Try the phase generate"),
    ("predict gpt2 --phase generate --top-p 0.5", "Add --sample, or leave them out"),
    ("predict gpt2 --phase generate --sample --top-p 2", "top_p is 2.0; allowed are numbers above 0"),
    ("predict gpt2 --phase generate --sample --top-k -1", "top_k is -1; allowed are whole numbers from 0"),
    ("predict gpt2 --prompt 3", "Add --phase generate"),
    ("predict gpt2 --phase generate --prompt 3 --sequence-length 4", "contradict each other"),
    ("predict t5-small --phase generate --cache offloaded", "fails for a model with an encoder"),
    (
        "predict Mistral-7B-v0.1 --phase generate --cache offloaded_static",
        "fails if all layers have a window",
    ),
    ("predict t5-small --phase generate --cache quantized", "no quantized cache for a model with an encoder"),
    (
        "predict mamba-130m-hf --phase generate --cache quantized --prompt 8",
        "no quantized cache for a model with windows or states",
    ),
    (
        "predict whisper-tiny --task speech-to-text --phase generate --new-tokens 1000",
        "1000 new tokens need 1000 positions",
    ),
    ("predict gpt2 --phase generate --set cache=statik", "Did you mean 'static'?"),
    ("predict gpt2 --phase generate --recipe micro_batches(2)", "Leave micro_batches out"),
    ("predict gpt2 --phase generate --gpus 2", "for one GPU"),
    ("predict gpt2 --phase generate --recipe auto --gpu h200", "Leave 'auto' out"),
    ("predict gpt2 --phase generate --software published-2022", "installed software only"),
    ("predict gpt2 --phase generate --num-beams 0 --max-new-tokens 4", "beams is 0"),
    ("predict gpt2 --phase generate --temperature 0.5", "changes no bytes and no seconds"),
    ("predict gpt2 --generate", "Generation is a phase: --phase generate"),
    ("predict gpt2 --phase generate --largest width --gpu h200", "batch, sequence-length, context, beams"),
    ("plan gpt2 --phase generate --gpu h200 --gpus 2", "for one GPU"),
    (
        "plan gpt2 --phase generate --gpu h200 --largest context",
        "snugfit predict MODEL --recipe RECIPE --largest",
    ),
]


@pytest.mark.parametrize(("typed", "message"), MISTAKES)
def test_a_mistake_is_one_clear_error(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed.split()) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "Traceback" not in printed


def test_another_loop_is_refused() -> None:
    with pytest.raises(UsageError, match="no loop 'trainer'"):
        GENERATION.step_class("trainer")


def test_other_phases_have_no_settings() -> None:
    with pytest.raises(JobError, match="no setting new tokens and beams and cache"):
        replace(generating_job("gpt2"), phase="evaluate")  # type: ignore[arg-type]
    with pytest.raises(JobError, match="Did you mean 'beams'"):
        replace(generating_job("gpt2"), phase_settings={"beam": 2})


def test_a_job_is_stored_with_its_settings() -> None:
    job = generating_job("gpt2", beams=3, cache="static")
    document = json.loads(json.dumps(job.to_json()))
    assert Job.from_json(document) == job
    settings = {"new_tokens": 6, "beams": 3, "cache": "static", "sample": False, "top_k": 50, "top_p": 1.0}
    assert document["phase_settings"] == settings
    # A stored result of an earlier version has fewer settings.
    document["phase_settings"] = {"new_tokens": 6, "beams": 3, "cache": "static"}
    assert Job.from_json(document) == job


def test_the_quantized_cache_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers before 5.2x has no backend of its own."""
    import importlib.util

    from transformers import cache_utils

    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="optimum-quanto or hqq"):
        quantized_backend()


def test_the_answer_as_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [
        "predict", config, "--phase", "generate", "--prompt", "8", "--new-tokens", "5", "--gpu", "h200",
    ]  # fmt: skip
    assert run([*typed, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    results = document["phase_results"]
    prefill, decode = results["passes"]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    whole = document["timing"]["step_seconds"]
    assert prefill["seconds"] + decode["seconds"] == pytest.approx(whole)
    assert results["seconds_per_token"] == pytest.approx(decode["seconds"] / 4)
    assert decode["tokens_per_second"] == pytest.approx(4 * 4 / decode["seconds"])
    # A few layers of 64 are bound by the host on any GPU.
    assert {prefill["bound"], decode["bound"]} == {"host"}
    # The tokens of a step are the generated ones.
    assert document["timing"]["tokens_per_second"] == pytest.approx(4 * 5 / whole)
    assert sum(document["footprint"]["kinds"].values()) == document["footprint"]["requested_bytes"]
    assert Prediction.from_json(document).phase_results == speed.GenerationResult.of(
        Prediction.from_json(document)
    )
    assert run(typed) == 0
    short = capsys.readouterr().out
    assert "a token" in short
    assert "prefill 6 to 9 % off" in " ".join(short.split())
    assert "from disk" in short
    assert "Loading seconds are a formula" in " ".join(short.split())
    assert len(short.splitlines()) <= 15
    assert run([*typed, "--details"]) == 0
    assert "key-value cache" in capsys.readouterr().out


def test_bounds_of_a_wide_model() -> None:
    """A long prompt is bound by arithmetic, and few sequences decode at the speed of the memory."""
    wide = {"hidden_size": 8192, "intermediate_size": 1 << 20, "num_attention_heads": 64}
    job = generating_job("llama", prompt=4096, batch_size=1, new_tokens=4, facts=wide)
    results = predict(replace(job, dtype="bfloat16"), gpu="h200").phase_results
    assert [one.bound for one in results.passes] == [speed.ARITHMETIC, speed.BANDWIDTH]


def test_the_link_bounds_an_offloaded_cache() -> None:
    wide = {"head_dim": 128, "num_key_value_heads": 4}
    job = generating_job("llama", prompt=2048, batch_size=64, new_tokens=4, cache="offloaded", facts=wide)
    prediction = predict(job, gpu="h200")
    results = prediction.phase_results
    assert results.passes[1].bound == LINK
    assert results.host_cache_bytes == prediction.footprint.pinned_bytes
    # Keys and values of two layers are copied back three times, and those of the first layer once more
    # unnecessarily.
    of_pass = 2 * 2 * 4 * 128 * 4 * 64 * 2048
    assert results.copied_bytes == pytest.approx(3.5 * of_pass, rel=0.01)
    assert "page-locked for the cache" in results.lines()["on the host"]


def test_the_loop_between_passes_takes_time() -> None:
    job = generating_job("llama", prompt=64, new_tokens=4, beams=2)
    kernels = [one for one in rehearse(job, Recipe().setup(), CudaPolicy()).kernels if one.phase == DECODE]
    assert sum(one.functions for one in kernels) == 3 * LOOP_FUNCTIONS
    # A beam search's copies of the cache are slower than other copies in memory.
    copy = max((one for one in kernels if one.operator == "aten::index_select"), key=lambda one: one.nbytes)
    rates = rates_for(find_gpu("h200"))
    numbers, seconds = copy.nbytes / 8, KernelClock(rates).seconds(copy)
    assert numbers / (seconds - rates.patterns["aten::index_select of beams"][1]) == pytest.approx(127.5e9)


def test_one_new_token_needs_no_decoding() -> None:
    results = predict(generating_job("gpt2", new_tokens=1), gpu="h200").phase_results
    assert [one.phase for one in results.passes] == ["prefill"]
    assert results.seconds_per_token is None


@pytest.mark.whole
@pytest.mark.slow
def test_the_largest_number_of_beams_fits() -> None:
    job = generating_job("gpt2", prompt=4, new_tokens=2)
    limit = 760 * MIB
    size, prediction = largest(job, memory_bytes=limit, of="beams")
    assert prediction.fits
    assert prediction.job.phase_settings["beams"] == size
    more = replace(job, phase_settings={**job.phase_settings, "beams": size + 1})
    assert not predict(more, memory_bytes=limit).fits


def test_the_context_is_the_length_of_the_prompt() -> None:
    job = generating_job("gpt2")
    assert field_of(job, "context")[0] == "sequence_length"
    # 512 positions are the prompt and all new tokens but the last.
    assert default_prompt(job.model, job.task, {}) == 512 - 127
    assert default_prompt(job.model, job.task, {"new_tokens": 1}) is None
    assert default_prompt(job.model, "seq2seq-lm", {}) is None
    assert default_prompt(generating_job("llama").model, "causal-lm", {}) is None
