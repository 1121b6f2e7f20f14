"""The command `snugfit serve`: memory of an inference server at its start, and the sequences that its cache
holds.

The exit code is 3 when the server does not start, for use in scripts. Options are spelled as in each engine.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.features.serving.gguf import GgufHeader
    from snugfit.features.serving.request import ServingRequest
    from snugfit.job.gpu import Gpu
    from snugfit.job.model import Model

SUFFIXES = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
"""Factors of a number of tokens, by the suffix of the option's value."""

SERVER = "The server"


def parse_tokens(text: str) -> int:
    """Return a number of tokens from vLLM's notation: `8192`, `8k` for 8,000, `8K` for 8,192.

    Raises `UsageError` for other text. Source: vllm 0.19, `human_readable_int` of `engine/arg_utils.py`, from
    0.20 on of `utils/argparse_utils.py`. vLLM also accepts g and t, and refuses decimals before K and M.
    """
    parts = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)([kKmM]?)", str(text).strip())
    number = float(parts[1]) * SUFFIXES[parts[2]] if parts else 0.0
    if not parts or not number.is_integer():
        raise UsageError(
            f"{text!r} is not a number of tokens. Allowed are whole numbers, with k for thousands or K for "
            "1,024. Try 8192 or 8K."
        )
    return int(number)


Name = Annotated[
    str,
    typer.Argument(help="A preset, a folder, a config.json, a .gguf file, or a name on the hub."),
]
Engine = Annotated[str, given.option(SERVER, "vllm, sglang or llama.cpp.", "--engine")]
Version = Annotated[
    str | None,
    given.option(SERVER, "Version of the engine. \\[the newest known one]", "--engine-version"),
]
Share = Annotated[
    float | None,
    given.option(
        SERVER,
        "Share of the GPU's memory that the engine may use, above 0 up to 1. \\[the engine's]",
        "--utilization",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
    ),
]
Length = Annotated[
    int | None,
    given.option(
        SERVER,
        "Largest number of tokens of a sequence. \\[the model's]",
        "--max-model-len",
        "--context-length",
        "--ctx-size",
        parser=parse_tokens,
        metavar="TOKENS",
    ),
]
Block = Annotated[
    int | None,
    given.option(SERVER, "Tokens of a block of the cache. \\[the engine's]", "--block-size", "--page-size"),
]
Sequences = Annotated[
    int | None,
    given.option(
        SERVER,
        "Largest number of sequences at once. \\[the engine's]",
        "--max-num-seqs",
        "--max-running-requests",
        "--parallel",
    ),
]
Batched = Annotated[
    int | None,
    given.option(
        SERVER,
        "Largest number of tokens of one forward pass. \\[the engine's]",
        "--max-batched-tokens",
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        "--ubatch-size",
        parser=parse_tokens,
        metavar="TOKENS",
    ),
]
CacheDtype = Annotated[
    str,
    given.option(
        SERVER,
        "Dtype of the cache: auto, fp8, q8_0, ...",
        "--cache-dtype",
        "--kv-cache-dtype",
        "--cache-type-k",
    ),
]
Quantization = Annotated[
    str | None,
    given.option(
        SERVER, "Quantize weights of 16 bits at the start: fp8. \\[the checkpoint's]", "--quantization"
    ),
]
Dtype = Annotated[
    str | None,
    given.option(SERVER, "Dtype of the weights: bfloat16, float16, float32. \\[the checkpoint's]", "--dtype"),
]
Ranks = Annotated[
    int,
    given.option(
        SERVER,
        "Number of GPUs over which each layer is divided.",
        "--gpus",
        "--tensor-parallel-size",
        "--tensor-parallel",
        "--tp-size",
        "--tp",
        "-tp",
    ),
]
Eager = Annotated[
    bool,
    given.option(SERVER, "Capture no CUDA graphs.", "--enforce-eager", "--disable-cuda-graph"),
]
Tokens = Annotated[
    int | None,
    given.option(
        given.JOB,
        "Tokens of the sequences to count. \\[--max-model-len]",
        "--sequence-length",
        parser=parse_tokens,
        metavar="TOKENS",
    ),
]
AllGpus = Annotated[
    bool, given.option(given.WHERE, "Compare all NVIDIA GPUs of the table, smallest first.", "--all-gpus")
]


def serve(
    model: Name,
    *,
    engine: Engine = "vllm",
    engine_version: Version = None,
    gpu: given.GpuName = None,
    memory: given.Memory = None,
    all_gpus: AllGpus = False,
    utilization: Share = None,
    max_model_len: Length = None,
    block_size: Block = None,
    max_num_seqs: Sequences = None,
    max_batched_tokens: Batched = None,
    cache_dtype: CacheDtype = "auto",
    dtype: Dtype = None,
    quantization: Quantization = None,
    tensor_parallel: Ranks = 1,
    enforce_eager: Eager = False,
    sequence_length: Tokens = None,
    offline: given.Offline = False,
    as_json: given.AsJson = False,
) -> int:
    """Predict an inference server's memory at its start, and the number of sequences that its cache holds."""
    from snugfit.features.serving.request import ServingRequest
    from snugfit.job.dtype import dtype_name

    if (count := [bool(gpu), bool(memory), all_gpus].count(True)) != 1:
        reason = "needs the memory of its GPU" if not count else "is predicted for one card, or for all GPUs"
        raise UsageError(
            f"A server {reason}. Give one of --gpu NAME, such as h100, --memory 24GiB, or --all-gpus."
        )
    request = ServingRequest(
        model=_find(model, online=not offline),
        gpu=_card(gpu, memory),
        engine=engine,
        version=engine_version,
        utilization=utilization,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        cache_dtype=cache_dtype,
        dtype=None if dtype in (None, "auto") else dtype_name(dtype),
        quantization=quantization,
        tensor_parallel=tensor_parallel,
        cuda_graphs=not enforce_eager,
        tokens=sequence_length,
    )
    return _print_all(request, as_json=as_json) if all_gpus else _print(request, as_json=as_json)


def _print(request: ServingRequest, *, as_json: bool) -> int:
    from snugfit.features.serving.predict import predict_serving
    from snugfit.features.serving.report import render
    from snugfit.report.text.terminal import show, show_json

    answer = predict_serving(request)
    if as_json:
        show_json(answer.to_json())
    else:
        show(render(answer))
    return 0 if answer.starts else NothingFits.exit_code


def _print_all(request: ServingRequest, *, as_json: bool) -> int:
    """Print the server's predicted memory on each NVIDIA GPU of known memory size, the smallest first."""
    from snugfit.features.serving.answer import ServingComparison
    from snugfit.features.serving.predict import predict_serving
    from snugfit.features.serving.report import render_all
    from snugfit.job.gpu import all_gpus
    from snugfit.report.text.terminal import show, show_json

    cards = sorted(
        (gpu for gpu in all_gpus() if gpu.memory_bytes and gpu.platform == "cuda"),
        key=lambda gpu: gpu.memory_bytes or 0,
    )
    answers = ServingComparison(tuple(predict_serving(replace(request, gpu=card)) for card in cards))
    if as_json:
        show_json(answers.to_json())
    else:
        show(render_all(answers))
    return 0 if any(answer.starts for answer in answers.answers) else NothingFits.exit_code


def _card(name: str | None, memory: str | None) -> Gpu:
    """Return the GPU of this name, or an unnamed GPU with this memory. If the name is ambiguous, print the
    chosen GPU.

    The returned GPU is not used for a comparison of all GPUs.
    """
    from snugfit.job.gpu import choice_of, find_gpu
    from snugfit.units import parse_bytes, show_bytes

    if name and (chosen := choice_of(name)):
        typer.echo(chosen, err=True)
    card = find_gpu(name or "h100")
    if not memory:
        return card
    size = parse_bytes(memory)
    names, unknown = (f"a GPU of {show_bytes(size)}",), dict.fromkeys(("compute_capability", "sm_count"))
    kind: dict[str, Any] = {"key": "", "model": "", "names": names, **unknown}
    return replace(card, memory_bytes=size, nvml_total_bytes=size, **kind)


def _find(name: str, *, online: bool) -> Model | GgufHeader:
    """Return the model of this name, or the header of a GGUF file."""
    from snugfit.user_files import user_path

    if name.lower().endswith(".gguf"):
        from snugfit.features.serving.gguf import read_gguf

        return read_gguf(user_path(name))
    from snugfit.features.serving.weights import check_headers
    from snugfit.job.model import Model

    model = Model.find(name, online=online, tell=lambda sentence: typer.echo(sentence, err=True))
    check_headers(user_path(name))
    return model
