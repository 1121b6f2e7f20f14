"""Predict the memory of an inference server at its start."""

from __future__ import annotations

from dataclasses import replace

from snugfit.errors import GpuError, ModelError, UsageError
from snugfit.features.serving.answer import ServingAnswer
from snugfit.features.serving.gguf import GgufHeader
from snugfit.features.serving.llama_cpp import predict_llama_cpp
from snugfit.features.serving.request import ServingRequest
from snugfit.features.serving.sglang import predict_sglang
from snugfit.features.serving.sizes import read_sizes
from snugfit.features.serving.vllm import predict_vllm
from snugfit.features.serving.weights import weight_bytes
from snugfit.units import GIB, show_bytes

LEAST_MEMORY = GIB
"""Smallest GPU memory in bytes for which predictions are made."""


def predict_serving(request: ServingRequest) -> ServingAnswer:
    """Predict the memory of an inference server at its start, and the sequences that its cache holds.

    The result follows from formulas of the engine's source, with weights from the model's architecture.
    Raises `ModelError` for a model that the engine cannot serve, `UsageError` for options that contradict
    each other, and `GpuError` for a GPU of unknown memory.
    """
    if not isinstance(request, ServingRequest):
        raise UsageError(
            f"The request is {request!r}; it must be a ServingRequest. Try predict_serving(ServingRequest("
            "model=..., gpu=...))."
        )
    if not request.gpu.memory_bytes:
        raise GpuError(
            f"The memory of {request.gpu.name} is unknown. Name another GPU: snugfit gpus lists all."
        )
    if request.gpu.memory_bytes < LEAST_MEMORY:
        raise GpuError(
            f"The memory of {request.gpu.name} is {show_bytes(request.gpu.memory_bytes)}; a CUDA context "
            "alone takes half a GiB. Allowed is 1 GiB and more. Name a larger GPU."
        )
    answer = predict_llama_cpp(request) if request.engine == "llama.cpp" else _predict_paged(request)
    if answer.sequence_tokens > answer.max_model_len:
        raise UsageError(
            f"The sequences to count have {answer.sequence_tokens:,} tokens, and those of the server at most "
            f"{answer.max_model_len:,}. Lower --sequence-length, or raise --max-model-len."
        )
    return answer if answer.starts else replace(answer, sequences=0)


def _predict_paged(request: ServingRequest) -> ServingAnswer:
    """Predict the memory of a vLLM or sglang server, whose key-value cache is paged."""
    if isinstance(request.model, GgufHeader):
        raise ModelError(
            f"{request.model.name} is a GGUF file, which {request.engine} does not serve here. Allowed is "
            "--engine llama.cpp. For another engine, name the model with its config.json."
        )
    sizes = read_sizes(request.model, request.tensor_parallel)
    dtype = request.dtype or request.model.dtype or "float16"
    # Engines load fp32 checkpoints in 16 bits, unless the user sets a dtype.
    if dtype == "float32" and request.dtype is None:
        dtype = "float16"
    if dtype not in ("float32", "float16", "bfloat16"):
        dtype = "bfloat16"
    if request.quantization and dtype == "float32":
        raise UsageError(
            f"quantization is {request.quantization} and dtype float32. Engines quantize weights of 16 bits. "
            "Leave one of them out."
        )
    weights, layout = weight_bytes(
        request.model,
        dtype=dtype,
        at_start=request.quantization,
        tensor_parallel=request.tensor_parallel,
    )
    predict = predict_vllm if request.engine == "vllm" else predict_sglang
    return predict(request, sizes, weights, layout, dtype)
