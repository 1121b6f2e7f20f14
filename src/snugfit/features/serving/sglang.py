"""sglang's memory at its start: weights, then the cache in a fixed share of the free memory.

Source: sglang 0.5.4 to 0.5.9, Apache-2.0, `profile_max_num_token` of
`srt/model_executor/model_runner_kv_cache_mixin.py` (0.5.4: `model_runner.py`), and `srt/server_args.py`. The
cache takes: free memory after loading - free memory before x (1 - `mem_fraction_static`). No forward pass is
profiled. The rest must hold activations and CUDA graphs, or requests fail later. One published start was
compared: Qwen3-235B-A22B in fp8 on four H100s (vllm-project/vllm issue 21348).
"""

from __future__ import annotations

from snugfit.features.serving.answer import ServingAnswer
from snugfit.features.serving.architecture import served_config
from snugfit.features.serving.gguf import GgufHeader
from snugfit.features.serving.quantization import LinearLayout
from snugfit.features.serving.request import CACHE_BYTES, ServingRequest
from snugfit.features.serving.sizes import DEFAULT_LENGTH, ModelSizes
from snugfit.features.serving.vllm import CONTEXT, NON_TORCH, NON_TORCH_RANKS
from snugfit.features.serving.weights import DTYPE_BYTES
from snugfit.units import GIB, MIB

RANK_BUFFERS = int((NON_TORCH_RANKS - NON_TORCH) * GIB)
"""Bytes for communication on each of several ranks, as in vLLM."""

DEFAULTS = (
    (20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512), (None, 16384, 512, 512),
)  # fmt: skip
"""Limits of GPU memory in GiB, with sglang's defaults below each: tokens of a prompt's chunk, and largest
batch of CUDA graphs (`server_args.py`, `_handle_gpu_memory_settings`). The last number is that batch for four
ranks and more. The memory is that of nvidia-smi (`get_nvgpu_memory_capacity` of `srt/utils/common.py`).
"""

META_MIB, PER_TOKEN_MIB, PER_GRAPH_MIB, PER_RANK_MIB = 512, 1.5, 2, 128
"""MiB that sglang's default memory share leaves free (`_handle_gpu_memory_settings`). They are a constant,
per token of a chunk, per sequence of the largest CUDA graph, and per rank.
"""

LARGE_GIB, LEAST_FREE_MIB = 60, 10 * 1024
"""GiB from which sglang counts a GPU as large, and the least MiB that it leaves free on a large GPU."""

ENCODER, GROWTH, LEAST_FACTOR, MOST_FACTOR = 0.95, 0.1, 0.8, 1.05
"""Factor on the default memory share for a model with an image encoder of the size of ViT-L/14. A second
factor falls with each further such size, within bounds (`adjust_mem_fraction_for_vlm`).
"""

ENCODER_LAYERS, ENCODER_WIDTH = 24, 1024
"""Number of layers and width of ViT-L/14, used for a config without them."""

STATE_RATIO, STATES_PER_REQUEST = 0.9, 3
"""Ratio of the memory for states to that for tokens (`mamba_full_memory_ratio`). Then the states of a running
request in addition to the prefix cache (`MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`).
"""

WINDOW_RATIO = 0.8
"""Ratio of cached tokens in layers with a sliding window to those in other layers (`swa_full_tokens_ratio`).
"""

FEWEST_REQUESTS, MOST_REQUESTS, PER_CONTEXT = 2048, 4096, 512
"""Bounds of the number of running requests, and requests for each sequence of full length that the cache
holds (`model_runner_kv_cache_mixin.py`).
"""


def predict_sglang(
    request: ServingRequest, sizes: ModelSizes, weights: int, layout: LinearLayout | None, dtype: str
) -> ServingAnswer:
    """Predict the memory of a sglang server. `weights` are the bytes of weights per rank."""
    total, number = request.gpu.memory_bytes or 0, DTYPE_BYTES[dtype]
    capacity = request.gpu.nvml_total_bytes or total
    chunk, graphs = _defaults(request, capacity)
    share = request.utilization or _default_share(request, capacity, chunk, graphs)
    loaded_bytes = weights + (sizes.position_numbers + sizes.absorbed_numbers) * number
    # Communication buffers are allocated before the free memory is read.
    outside = CONTEXT + (RANK_BUFFERS if request.tensor_parallel > 1 else 0)
    free = total - outside
    available = int(free * share) - loaded_bytes
    cached = CACHE_BYTES["sglang"].get(request.cache_dtype, number)
    length = request.max_model_len or sizes.longest or DEFAULT_LENGTH
    tokens = request.tokens or length
    token, state = _token_bytes(sizes, cached), _state_bytes(sizes, number)
    page = request.block_size or 1
    # Memory for states is divided first (`handle_max_mamba_cache`, with the prefix cache, the default).
    states = int(max(0, available) * STATE_RATIO / (1 + STATE_RATIO)) // state if state else 0
    free_bytes = max(0, available - states * state)
    requests = states // STATES_PER_REQUEST
    held_tokens = int(free_bytes / token) // page * page if token else tokens * requests
    limit = request.max_num_seqs
    running = limit or min(max(held_tokens * PER_CONTEXT // length, FEWEST_REQUESTS), MOST_REQUESTS)
    running = min(running, requests) if state else running
    per_sequence = -(-tokens // page) * page
    graph_bytes = graphs * PER_GRAPH_MIB * MIB if request.cuda_graphs else 0
    spare = free - int(free * share) - graph_bytes
    refusal = _refusal(request, sizes, length, held_tokens, spare)
    doubts = [
        "sglang profiles no forward pass: a long prompt may still run out of memory. "
        "Then lower --mem-fraction-static."
    ]
    doubts.append(
        "The formulas of sglang were compared with one published start only. Compare with your log."
    )
    return ServingAnswer(
        model=request.model.name, gpu=request.gpu.name, engine="sglang", version=request.known_version,
        tensor_parallel=request.tensor_parallel, starts=refusal is None, refusal=refusal, total_bytes=total,
        usable_bytes=int(free * share), utilization=share, weights_bytes=loaded_bytes,
        weights_layout=layout.name if layout else dtype,
        activation_bytes=max(0, min(int(chunk * PER_TOKEN_MIB * MIB), spare)), non_torch_bytes=outside,
        graph_bytes=graph_bytes,
        graphs_reduce_cache=False, cache_bytes=free_bytes, token_bytes=int(token), cache_tokens=held_tokens,
        sequence_tokens=tokens,
        sequences=min(held_tokens // per_sequence, requests if state else held_tokens),
        most_sequences=running, longest=min(held_tokens, sizes.longest or length),
        max_model_len=length, block_size=page, doubts=tuple(doubts),
    )  # fmt: skip


def _refusal(
    request: ServingRequest, sizes: ModelSizes, length: int, held_tokens: int, spare: int
) -> str | None:
    """Return the reason why sglang would not start; None if it starts.

    A context longer than the model's must be allowed explicitly (`ModelConfig._derive_context_length`).
    """
    if sizes.heads % request.tensor_parallel:
        return f"{sizes.heads} heads cannot be divided over {request.tensor_parallel} GPUs. Use a divisor."
    if sizes.longest and length > sizes.longest:
        return f"The model has {sizes.longest} positions. Lower --context-length {length} to that."
    if held_tokens <= 0:
        return "No memory is left for the cache. Raise --mem-fraction-static, quantize, or use more GPUs."
    if spare < 0:
        return "No memory is left for CUDA graphs. Lower --mem-fraction-static, or --disable-cuda-graph."
    return None


def _defaults(request: ServingRequest, capacity: int) -> tuple[int, int]:
    """Return sglang's default number of tokens in a prompt's chunk, and its largest batch of CUDA graphs."""
    chunk, few, many = next(row[1:] for row in DEFAULTS if row[0] is None or capacity < row[0] * GIB)
    return request.max_batched_tokens or chunk, few if request.tensor_parallel < 4 else many


def _default_share(request: ServingRequest, capacity: int, chunk: int, graphs: int) -> float:
    """Return sglang's default `mem_fraction_static` for a GPU with this memory."""
    memory = capacity / MIB
    free = META_MIB + max(chunk, 2048) * PER_TOKEN_MIB + graphs * PER_GRAPH_MIB
    free += request.tensor_parallel * PER_RANK_MIB
    if memory > LARGE_GIB * 1024:
        free = max(free, LEAST_FREE_MIB)
    share = round(max(0.0, memory - free) / memory, 3)
    return share * _encoder_factor(request)


def _encoder_factor(request: ServingRequest) -> float:
    """Return the factor by which an image encoder changes the default `mem_fraction_static`; 1 without
    one.
    """
    assert not isinstance(request.model, GgufHeader)
    vision = getattr(served_config(request.model), "vision_config", None)
    if vision is None:
        return 1.0
    layers = getattr(vision, "num_hidden_layers", ENCODER_LAYERS)
    width = getattr(vision, "hidden_size", ENCODER_WIDTH)
    further = layers * width**2 / (ENCODER_LAYERS * ENCODER_WIDTH**2) - 1
    return ENCODER * max(LEAST_FACTOR, min(MOST_FACTOR, 1 - GROWTH * further))


def _token_bytes(sizes: ModelSizes, number: float) -> float:
    """Return the bytes of cache for one token in all layers. Sliding-window layers hold fewer tokens.

    Their ratio applies only to a model that has layers of both kinds.
    """
    full = sum(layer.token_numbers for layer in sizes.layers if layer.window is None)
    limited = sum(layer.token_numbers for layer in sizes.layers if layer.window is not None)
    return number * (full + limited * (WINDOW_RATIO if full else 1.0))


def _state_bytes(sizes: ModelSizes, number: int) -> int:
    return number * sum(layer.state_numbers for layer in sizes.layers)
