"""Newcomers' mistakes and unusual spellings in `snugfit serve`: each gives one clear error or a right
result.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from snugfit.cli.main import run
from snugfit.errors import GpuError, UsageError
from snugfit.features.serving.phase_words import as_serve
from snugfit.features.serving.predict import predict_serving
from snugfit.features.serving.request import ServingRequest
from snugfit.job.gpu import find_gpu
from snugfit.job.model import Model
from snugfit.units import GIB, MIB


def request_of(model: str = "Qwen3-0.6B", gpu: str = "h100", **options: Any) -> ServingRequest:
    return ServingRequest(model=Model.find(model, online=False), gpu=find_gpu(gpu), **options)


@pytest.mark.parametrize(
    ("typed", "served"),
    [
        ("predict M --phase serve --engine vllm --gpu h100", "serve M --engine vllm --gpu h100"),
        ("predict --phase=serve M --memory 24GiB", "serve M --memory 24GiB"),
        ("gpus --for M --engine sglang --phase serve", "serve M --all-gpus --engine sglang"),
        ("gpus --for=M --phase=serve --json", "serve M --all-gpus --json"),
        ("gpus l4 --for M --phase serve", "serve M --gpu l4"),
        ("serve M --gpu l4 --phase serve", "serve M --gpu l4"),
        ("serve M --gpu l4 --version 0.19", "serve M --gpu l4 --engine-version 0.19"),
        ("serve --version", "serve --version"),
        ("predict M --phase generate", "predict M --phase generate"),
        ("predict serve --phase train", "predict serve --phase train"),
    ],
)
def test_the_phase_is_rewritten_as_this_command(typed: str, served: str) -> None:
    assert list(as_serve(typed.split())) == served.split()


def test_the_phase_of_other_commands_answers_as_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "sglang", "--max-model-len", "4k", "--json"]
    for phase, direct in (
        (
            ["predict", "Qwen3-0.6B", "--phase", "serve", "--gpu", "l4"],
            ["serve", "Qwen3-0.6B", "--gpu", "l4"],
        ),
        (["gpus", "--for", "Qwen3-0.6B", "--phase", "serve"], ["serve", "Qwen3-0.6B", "--all-gpus"]),
    ):
        assert run([*phase, *options]) == 0
        shown = capsys.readouterr()
        assert "Same as: snugfit serve Qwen3-0.6B" in shown.err
        assert run([*direct, *options]) == 0
        assert shown.out == capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("plan gpt2 --phase serve", "not a phase of snugfit plan"),
        ("--phase serve gpt2", "--phase serve comes after a command. Try snugfit serve"),
        ("gpus l4 h100 --for gpt2 --phase serve", "Name one, or leave the names out"),
        ("serve gpt2", "--gpu NAME"),
        ("serve gpt2 --gpu l4 --memory 24GiB", "is predicted for one card, or for all GPUs. Give one of"),
        ("serve gpt2 --memory 1MiB", "Allowed is 1 GiB and more"),
        ("serve gpt2 --memory 24", "Try 24GiB"),
        ("serve gpt2 --gpu l4 --max-model-len 99999999999999", "from 1 to 16,777,216"),
        ("serve gpt2 --gpu l4 --max-model-len 512 --sequence-length 600", "at most 512. Lower --sequence-l"),
        ("serve gpt2 --gpu l4 --engine llama.cpp --utilization 0.5", "utilization is 0.5"),
        ("serve gpt2 --gpu l4 --engine llama.cpp --block-size 16", "has no blocks"),
        ("serve gpt2 --gpu l4 --engine llama.cpp --dtype half", "dtype is float16"),
        ("serve gpt2 --gpu l4 --engine llama.cpp --enforce-eager", "Leave --enforce-eager out"),
    ],
)
def test_a_mistake_is_one_clear_error(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed.split()) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "h100"}, "Try snugfit.find_gpu"),
        ({"model": "gpt2"}, "Try snugfit.Model.find"),
        ({"cuda_graphs": "no"}, "cuda_graphs is 'no'"),
        ({"version": 0.33}, "formulas of vllm 0.33 are unknown"),
        ({"version": "0." + "1" * 5000}, "are unknown"),
    ],
)
def test_another_type_in_python_is_one_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(request_of(), **options)
    with pytest.raises(UsageError, match="must be a ServingRequest"):
        predict_serving("gpt2")  # type: ignore[arg-type]


def test_a_gpu_by_its_memory_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "Qwen3-0.6B", "--memory", "8GiB", "--gpus", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["total_bytes"], document["tensor_parallel"]) == (8 * GIB, 2)
    with pytest.raises(GpuError, match="a CUDA context alone"):
        predict_serving(replace(request_of(), gpu=replace(find_gpu("l4"), memory_bytes=100 * MIB)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_seqs": 300, "max_batched_tokens": 256}, "Raise --max-batched-tokens"),
        ({"max_batched_tokens": 1 << 24}, "Lower --max-num-seqs and --max-batched-tokens"),
        ({"utilization": 1e-9}, "Raise --utilization, quantize"),
        ({"block_size": 1 << 20}, "lower --block-size"),
        ({"tensor_parallel": 3}, "cannot be divided"),
        ({"engine": "sglang", "max_model_len": 50_000}, "The model has 40960 positions"),
        ({"engine": "sglang", "block_size": 1 << 23}, "No memory is left for the cache"),
        ({"engine": "sglang", "utilization": 1}, "Lower --mem-fraction-static"),
        ({"engine": "llama.cpp", "max_batched_tokens": 1 << 24}, "Lower --ubatch-size"),
    ],
)
def test_a_server_without_room_does_not_start(options: dict[str, Any], reason: str) -> None:
    answer = predict_serving(request_of(**options))
    assert not answer.starts
    assert reason in (answer.refusal or "")
    assert answer.sequences == 0
    assert min(answer.cache_bytes, answer.activation_bytes, answer.cache_tokens, answer.longest) >= 0


def test_blocks_that_attention_kernels_do_not_take_are_refused() -> None:
    with pytest.raises(UsageError, match="block_size is 7; attention kernels of vLLM"):
        request_of(block_size=7)
    assert request_of(engine="sglang", block_size=1).block_size == 1


def test_defaults_do_not_exceed_the_other_options() -> None:
    one = predict_serving(request_of(max_num_seqs=1, max_model_len=256))
    assert (
        one.activation_bytes
        == predict_serving(request_of(max_num_seqs=1, max_batched_tokens=256)).activation_bytes
    )
    assert predict_serving(request_of(max_batched_tokens=64)).most_sequences == 64


@pytest.mark.parametrize(
    ("model", "engine", "length"),
    [
        ("mamba-130m-hf", "vllm", 2048), ("mamba-130m-hf", "sglang", 2048),
        ("mamba-130m-hf", "llama.cpp", 1 << 20), ("bloom-560m", "vllm", 2048),
    ],
)  # fmt: skip
def test_a_config_without_positions_has_the_default_of_the_engine(
    model: str, engine: str, length: int
) -> None:
    answer = predict_serving(request_of(model, engine=engine))
    assert (answer.max_model_len, answer.starts) == (length, True)
    assert answer.longest <= length


@pytest.mark.parametrize(
    ("model", "layers", "heads", "width"),
    [("gpt2", 12, 12, 64), ("Llama-3.1-8B", 32, 8, 128), ("falcon-7b", 32, 1, 64)],
)
def test_a_token_has_a_key_and_a_value_in_each_head(model: str, layers: int, heads: int, width: int) -> None:
    for engine in ("vllm", "sglang", "llama.cpp"):
        answer = predict_serving(request_of(model, engine=engine))
        assert answer.token_bytes == 2 * layers * heads * width * 2
