"""Memory of vLLM at its start: published starts that fitted no constant, refusals, and pages of the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.serving.answer import ServingComparison
from snugfit.features.serving.blocks import paged_cache
from snugfit.features.serving.command import parse_tokens
from snugfit.features.serving.feature import ServingFeature
from snugfit.features.serving.predict import predict_serving
from snugfit.features.serving.published import cache_error, published_starts
from snugfit.features.serving.report import render
from snugfit.features.serving.request import ServingRequest
from snugfit.features.serving.sizes import LayerCache
from snugfit.features.serving.vllm import graph_bytes
from snugfit.job.gpu import find_gpu
from snugfit.job.model import Model
from snugfit.report.text.terminal import as_text
from snugfit.units import GIB, MIB
from test_reference import hold_to_schema


def request_of(model: str = "Llama-3.1-8B", gpu: str = "h100", **options: Any) -> ServingRequest:
    return ServingRequest(model=Model.find(model, online=False), gpu=find_gpu(gpu), **options)


def test_caches_of_published_starts_are_within_two_percent() -> None:
    starts = [start for start in published_starts() if not start.fits]
    errors = [cache_error(start, start.predict()) for start in starts]
    assert len({start.row["model"] for start in starts}) >= 15
    assert sum(abs(error) <= 0.02 for error in errors) >= 0.9 * len(errors), errors


def test_logged_parts_are_met_too() -> None:
    logged = [start for start in published_starts() if start.row["source"] == "log"]
    for start in logged:
        answer, row = start.predict(), start.row
        assert answer.starts
        assert answer.weights_bytes / GIB == pytest.approx(row["weights_gib"], abs=0.08), row
        assert answer.activation_bytes / GIB == pytest.approx(row["activation_gib"], abs=0.18), row
        assert answer.cache_tokens == pytest.approx(row["cache_tokens"], rel=0.013), row


def test_what_vllm_refused_is_refused() -> None:
    refused = published_starts("refused")
    assert [start.predict().starts for start in refused] == [False] * len(refused)


@pytest.mark.parametrize(
    ("model", "ranks", "starts"),
    [("Qwen2.5-7B", 4, True), ("Qwen2.5-7B", 7, False), ("Llama-3.1-8B", 16, True), ("gpt2", 2, True)],
)
def test_heads_and_the_padded_vocabulary_are_divided(model: str, ranks: int, starts: bool) -> None:
    # Qwen2.5 has 28 heads and 4 of keys; GPT-2's vocabulary of 50,257 is padded to 50,304.
    answer = predict_serving(request_of(model, tensor_parallel=ranks, max_model_len=512))
    assert answer.starts == starts, answer.refusal


def test_a_context_that_does_not_fit_names_one_that_does() -> None:
    answer = predict_serving(request_of(gpu="l4"))
    assert not answer.starts
    assert answer.refusal
    assert f"--max-model-len to {answer.longest}" in answer.refusal
    assert predict_serving(request_of(gpu="l4", max_model_len=answer.longest)).starts
    assert not predict_serving(request_of(gpu="l4", max_model_len=answer.longest + 16)).starts


def test_options_change_their_own_part() -> None:
    plain = predict_serving(request_of(version="0.33"))
    eager = predict_serving(request_of(version="0.33", cuda_graphs=False))
    assert eager.cache_bytes - plain.cache_bytes == plain.graph_bytes
    older, newer = (predict_serving(request_of(version=version)) for version in ("0.19", "0.20"))
    assert (older.utilization, newer.utilization) == (0.9, 0.92)
    share = newer.usable_bytes - older.usable_bytes
    assert newer.cache_bytes == older.cache_bytes + share - newer.graph_bytes
    fp8 = predict_serving(request_of(cache_dtype="fp8"))
    assert fp8.token_bytes * 2 == plain.token_bytes
    few = predict_serving(request_of(max_num_seqs=16))
    assert few.activation_bytes < 0.6 * plain.activation_bytes
    assert few.graph_bytes < plain.graph_bytes
    assert predict_serving(request_of(max_num_seqs=16, max_batched_tokens=16)).graph_bytes < few.graph_bytes


def test_the_sampler_by_triton_has_a_row_for_each_program() -> None:
    # An H100 has 132 multiprocessors. FlashInfer of 0.21 has no such rows.
    for sequences, rows in ((1024, 132), (80, 128), (8, 8)):
        options = {"max_num_seqs": sequences, "max_batched_tokens": sequences}
        triton, flashinfer = (
            predict_serving(request_of(version=version, **options)).activation_bytes
            for version in ("0.20", "0.21")
        )
        assert triton - flashinfer == rows * 128_256 * 4


@pytest.mark.parametrize(
    ("gpu", "version", "peak", "graph", "sequences"),
    [
        ("b200", "0.27", 8192, 512, 1024), ("b200", "0.28", 16384, 1024, 1024),
        ("gb10", "0.32", 8192, 512, 1024), ("gb10", "0.33", 2048, 512, 256), ("a100", "0.33", 2048, 512, 256),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_gpu_and_the_version(
    gpu: str, version: str, peak: int, graph: int, sequences: int
) -> None:
    answer = predict_serving(request_of(gpu=gpu, version=version))
    assert answer.most_sequences == sequences
    assert answer.graph_bytes == graph_bytes(graph)
    given = predict_serving(request_of(gpu=gpu, version=version, max_batched_tokens=peak))
    assert answer.activation_bytes == given.activation_bytes


def test_the_workspace_of_cublas_is_larger_from_hopper_on() -> None:
    older, hopper = (
        predict_serving(request_of(gpu=gpu, max_num_seqs=256, max_batched_tokens=2048)).activation_bytes
        for gpu in ("a100", "b200")
    )
    assert hopper - older == 32 * MIB - 8_519_680


def test_sliding_layers_share_pages_as_a_log_of_gemma_3_27b_has_them() -> None:
    # 62 layers, of which 10 have no window: seven groups of ten layers, eight of them padding.
    layers = [LayerCache(token_numbers=2 * 16 * 128, window=None if n % 6 == 5 else 1024) for n in range(62)]
    cache = paged_cache(layers, number_bytes=2, state_bytes=2, block_size=16, batched=8192)
    assert len(cache.groups) == 7
    assert cache.block_bytes == 10 * 131072
    assert cache.tokens_in(15_999 * cache.block_bytes) == 36_560
    assert round(15_999 / cache.blocks_of(8192), 2) == 4.46


def test_a_state_enlarges_the_blocks_and_takes_one_of_each_group() -> None:
    attention, state = LayerCache(token_numbers=1024), LayerCache(state_numbers=500_000)
    cache = paged_cache(
        [attention, state, state, state], number_bytes=2, state_bytes=2, block_size=16, batched=8192
    )
    assert cache.block_size == 496
    assert cache.block_bytes == 496 * 2048
    assert cache.blocks_of(10 * 496) == 10 + 3
    for layers, blocks in (([attention, state], 10 + 2), ([state], 1)):
        cached = paged_cache(
            layers, number_bytes=2, state_bytes=2, block_size=16, batched=8192, caches_prefixes=True
        )
        assert cached.blocks_of(10 * 496) == blocks


def test_graphs_grow_with_the_batches_that_are_captured() -> None:
    # 1, 2, 4, 8, ..., 248 and from there 256, 272, ..., 512: 35 and 16 batches.
    assert graph_bytes(512) - graph_bytes(256) == 16 * (graph_bytes(16) - graph_bytes(8)) > 0
    assert graph_bytes(23) == graph_bytes(16)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"utilization": 0}, "utilization is 0"),
        ({"utilization": 1.5}, "utilization is 1.5"),
        ({"utilization": float("nan")}, "utilization is nan"),
        ({"version": "0.99.0"}, "'0.99.0' are unknown. Known are 0.15 to 0.33"),
        ({"version": "latest"}, "'latest' are unknown"),
        ({"engine": "vlm"}, "Did you mean 'vllm'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"cache_dtype": "q8_0"}, "cache_dtype of vllm is 'q8_0'"),
        ({"cache_dtype": "float32"}, "cache_dtype of vllm is 'float32'"),
        ({"engine": "sglang", "version": "0.5.23"}, "Known are 0.5.4 to 0.5.9"),
        ({"quantization": "int3"}, "--quantization is 'int3'"),
    ],
)
def test_an_impossible_option_is_one_error(options: dict[str, Any], given: str) -> None:
    with pytest.raises(UsageError) as error:
        predict_serving(request_of("Qwen3-0.6B", **options))
    assert given in str(error.value)


def test_the_share_must_leave_the_context_free() -> None:
    answer = predict_serving(request_of("Qwen3-0.6B", utilization=1.0))
    assert not answer.starts
    assert "Lower --utilization to 0.99" in str(answer.refusal)


def test_encoders_have_no_server() -> None:
    with pytest.raises(UsageError, match="is not a decoder of text"):
        predict_serving(request_of("bert-base-uncased"))


def test_the_command_prints_one_screen_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "Qwen3-0.6B", "--gpu", "h100", "--gpu-memory-utilization", "0.5", "-tp", "2"]
    options = ["--max-model-len", "4K", "--kv-cache-dtype", "fp8", "--dtype", "half", "--enforce-eager"]
    assert run([*words, *options]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 15
    assert "vllm 0.33, 2 x NVIDIA H100 80GB HBM3: starts (formula, not measured)" in shown
    assert run([*words, "--max-model-len", "90000", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["basis"] == "formula"
    assert "40960 positions" in document["refusal"]


def test_all_gpus_are_compared_by_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "Llama-2-13b-hf", "--all-gpus", "--max-model-len", "512"]
    assert run([*words, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    sizes = [answer["total_bytes"] for answer in answers]
    assert sizes == sorted(sizes)
    assert {answer["starts"] for answer in answers} == {True, False}
    assert run(words) == 0
    assert "NVIDIA L4" in capsys.readouterr().out


def test_the_answer_meets_its_schema_and_the_screen() -> None:
    answer = predict_serving(request_of(gpu="l4", tokens=512))
    printed = [("serve --json", answer), ("serve --all-gpus --json", ServingComparison((answer,)))]
    hold_to_schema(ServingFeature().documents(), printed)
    longest = replace(answer, doubts=("one", "two", "three"), tensor_parallel=8)
    assert len(as_text(render(longest)).splitlines()) <= 15


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600)])
def test_tokens_have_the_notation_of_vllm(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "8x", "-1", "1e3", "0.5", "1" * 40])
def test_other_text_is_not_a_number_of_tokens(text: str) -> None:
    with pytest.raises(UsageError, match="Try 8192 or 8K"):
        parse_tokens(text)
