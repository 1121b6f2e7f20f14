"""vLLM's memory at its start: weights, a profiling run, then the cache in the rest of its memory fraction.

Source: vllm 0.15 to 0.33, Apache-2.0, `v1/worker/gpu_worker.py` (`determine_available_memory`). The cache
takes: total memory x `gpu_memory_utilization` - weights - peak of the profiling run - non-torch memory. From
0.20 on, an estimate of CUDA graphs is also subtracted. The profiling run (`profile_run` of
`v1/worker/gpu_model_runner.py`) is a forward pass of `max_num_batched_tokens` tokens, then the sampler for
`max_num_seqs` sequences. Its peak is the larger of the two.

From 0.27 on, `memory_profiling` (`utils/mem_utils.py`) measures all consumed memory at once. Later versions
have a second runner, `v1/worker/gpu/model_runner.py`. Its sampler has as many copies of the logits.

Six constants, marked as fitted, come from the models for fitting in `published.py`. `lab/serving_starts.py`
compares the other models with their predictions. All published starts are of an H100. The terms of the peak
were chosen from all of them; their sizes are vLLM's own shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from snugfit.features.serving.answer import ServingAnswer
from snugfit.features.serving.blocks import PagedCache, paged_cache
from snugfit.features.serving.quantization import LinearLayout
from snugfit.features.serving.request import CACHE_BYTES, ServingRequest
from snugfit.features.serving.sizes import DEFAULT_LENGTH, ModelSizes
from snugfit.features.serving.weights import DTYPE_BYTES
from snugfit.job.gpu import Gpu
from snugfit.units import GIB, MIB, show_bytes

NEW_SAMPLER, NEW_NON_TORCH, NEW_BUDGET, FLASHINFER = 17, 18, 20, 21
HYBRID_PREFIXES, LARGER_DEFAULTS, SMALLER_GB10 = 26, 28, 33
"""Minor versions of vLLM in which its memory use changed. 0.17 has a sampler by Triton, and 0.18 published a
larger non-torch memory. 0.20 has a default share of 0.92 (`config/cache.py`), and its estimate of CUDA graphs
reduces the cache (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS` of `envs.py`). 0.21 samples by FlashInfer. 0.26
caches prefixes of models with states (`is_prefix_caching_supported` of `config/model.py`). 0.28 has larger
defaults on large GPUs, and 0.33 smaller ones on a GB10.
"""

SAMPLER_FLOATS = 3
"""Number of fp32 tensors of the logits' size at the sampler's peak: logits, probabilities and exponential
noise (`v1/sample/sampler.py`, and `random_sample` of `v1/sample/ops/topk_topp_sampler.py`). FlashInfer has
masked logits in the place of noise (`top_k_top_p_sampling_from_logits`). A fourth tensor has the logits in
the model's dtype.
"""

SORTED_BYTES = 38
"""Bytes per logit at the peak of the sampler before 0.17, which sorts. Fitted to the published peaks of
Qwen3-14B under 0.15 and 0.16."""

CUBLAS_WORKSPACE, OLDER_WORKSPACE = 32 * MIB, 8_519_680
"""Bytes of cuBLAS's workspace on Hopper and newer GPUs, and on older ones (torch,
`ATen/cuda/CublasHandlePool.cpp`).
"""

FORWARD_HIDDEN = 3.75
"""Number of hidden-state tensors of a batch that are live next to an MLP's two halves and their product.
Fitted to the peak of CodeLlama-7b, whose forward pass exceeds its sampler.
"""

NON_TORCH = 0.25
"""GiB outside of torch's allocator on a single GPU, for kernels and handles of libraries. Fitted."""

NON_TORCH_BEFORE = 0.13
"""GiB outside of torch's allocator on a single GPU before vLLM 0.18, as published for Qwen3-14B."""

NON_TORCH_RANKS = 2.1
"""GiB outside of torch's allocator on each of several ranks, for buffers of NCCL and the all-reduce. Fitted.
"""

FIRST_GRAPHS, NEXT_GRAPHS = 212 * MIB, int(13.6 * MIB)
"""Bytes of the first pair of CUDA graphs (full and piecewise), and of each further pair. Fitted to logged
estimates.
"""

CONTEXT = int(0.51 * GIB)
"""Bytes of a worker's CUDA context on an H100, from its first log line. They are outside of the engine's
share.
"""

LARGE_GPU, LARGEST_GPU = 70 * GIB, 160 * GIB
"""GPU memory in bytes from which the default batch is 8,192 tokens and 1,024 sequences, except on an A100.
From the second limit on it is 16,384 tokens (vllm 0.33, `get_batch_defaults` of `engine/arg_utils.py`).
"""

SMALL_CAPABILITY = (12, 1)
"""Compute capability of a GB10, which has smaller defaults from vLLM 0.33 on."""

LARGEST_GRAPH, DATACENTER_BLACKWELL = 512, 10
"""Largest batch size of CUDA graphs, and the major compute capability with twice as many from 0.28 on
(`_set_cudagraph_sizes` of `config/vllm.py`).
"""

VOCABULARY_PADDING = 64
"""The embedding's number of rows is a multiple of this number (`vocab_parallel_embedding.py`,
`DEFAULT_VOCAB_PADDING_SIZE`).
"""

NO_WORKSPACE = ("mxfp4",)
"""Weight layouts whose expert kernels do not need the usual workspaces."""


@dataclass(frozen=True)
class Options:
    """vLLM's options, with its defaults for this GPU in place of None."""

    share: float
    batched: int
    sequences: int
    length: int


def predict_vllm(
    request: ServingRequest, sizes: ModelSizes, weights: int, layout: LinearLayout | None, dtype: str
) -> ServingAnswer:
    """Predict the memory of a vLLM server. `weights` are the bytes of weights per rank."""
    options = _options(request, sizes)
    total = request.gpu.memory_bytes or 0
    number = DTYPE_BYTES[dtype]
    loaded_bytes = weights + (sizes.position_numbers + sizes.absorbed_numbers) * number
    activation = profile_peak(request, sizes, options, number, layout)
    non_torch = _non_torch(request)
    graphs = graph_bytes(_largest_graph(request, options)) if request.cuda_graphs else 0
    reduces = request.minor >= NEW_BUDGET
    usable = int(total * options.share)
    available = usable - loaded_bytes - activation - non_torch - (graphs if reduces else 0)
    cached = CACHE_BYTES["vllm"].get(request.cache_dtype, number)
    cache = paged_cache(
        sizes.layers, number_bytes=cached, state_bytes=number, block_size=request.block_size or 16,
        batched=options.batched, caches_prefixes=request.minor >= HYBRID_PREFIXES,
    )  # fmt: skip
    refusal = _refusal(request, sizes, options, cache, available, loaded_bytes)
    tokens = request.tokens or options.length
    doubts = list(_doubts(request, sizes, layout))
    if graphs and not reduces and graphs > total - CONTEXT - usable:
        doubts.append(
            "CUDA graphs are captured in the memory beyond the share. Lower --utilization if it fails."
        )
    return ServingAnswer(
        model=_name(request), gpu=request.gpu.name, engine="vllm", version=request.known_version,
        tensor_parallel=request.tensor_parallel, starts=refusal is None, refusal=refusal, total_bytes=total,
        usable_bytes=usable, utilization=options.share, weights_bytes=loaded_bytes,
        weights_layout=layout.name if layout else dtype, activation_bytes=activation,
        non_torch_bytes=non_torch, graph_bytes=graphs, graphs_reduce_cache=reduces,
        cache_bytes=max(0, available), token_bytes=cache.token_bytes,
        cache_tokens=cache.tokens_in(available), sequence_tokens=tokens,
        sequences=cache.blocks_in(available) // max(1, cache.blocks_of(tokens)),
        most_sequences=options.sequences, longest=cache.longest_in(available, sizes.longest or tokens),
        max_model_len=options.length, block_size=cache.block_size, doubts=tuple(doubts),
    )  # fmt: skip


def profile_peak(
    request: ServingRequest, sizes: ModelSizes, options: Options, number: int, layout: LinearLayout | None
) -> int:
    """Return the peak in bytes of vLLM's profiling run, the larger of forward pass and sampler.

    `number` is the bytes of one element of the hidden states.
    """
    ranks, batched = request.tensor_parallel, options.batched
    cublas = CUBLAS_WORKSPACE if _capability(request.gpu) >= (9, 0) else OLDER_WORKSPACE
    workspace = cublas + _expert_workspace(sizes, batched, number, ranks, layout)
    hidden = batched * sizes.hidden * number
    halves = 3 * batched * sizes.intermediate // ranks * number
    forward = halves + int(FORWARD_HIDDEN * hidden)
    rows = min(options.sequences, batched)
    logits = rows * sizes.vocabulary
    if request.minor >= NEW_SAMPLER:
        sampler = logits * (number + 4 * SAMPLER_FLOATS)
    else:
        sampler = logits * SORTED_BYTES
    if NEW_SAMPLER <= request.minor < FLASHINFER:
        # Each program of the kernel for top-k and top-p has a row in fp32, at most one for each
        # multiprocessor (`v1/sample/ops/topk_topp_triton.py`, `apply_top_k_top_p_triton`).
        programs = min(1 << (rows - 1).bit_length(), request.gpu.sm_count or 0)
        sampler += programs * sizes.vocabulary * 4
    # All hidden states of the forward pass stay alive. Each sequence's last one is copied, and
    # `_dummy_sampler_run` has random ones of this shape.
    sampler += hidden + 2 * rows * sizes.hidden * number
    # `profile_run` keeps the encoder's outputs for a batch (`v1/core/encoder_cache_manager.py`,
    # `compute_mm_encoder_budget`).
    encoder = hidden if sizes.multimodal else 0
    return max(forward, sampler) + workspace + encoder


def _expert_workspace(
    sizes: ModelSizes, batched: int, number: int, ranks: int, layout: LinearLayout | None
) -> int:
    """Return the bytes of the two workspaces of the fused expert kernels, which stay allocated.

    Source: vllm 0.19, `TritonExperts.workspace_shapes` of `model_executor/layers/fused_moe/fused_moe.py`.
    Both have a row for each token and expert. The first workspace is as wide as an expert's MLP, the second
    twice as wide, and both at least as the hidden size.
    """
    if not sizes.experts_per_token or (layout and layout.name in NO_WORKSPACE):
        return 0
    width = sizes.expert_width // ranks
    rows = batched * sizes.experts_per_token
    return rows * number * (max(width, sizes.hidden) + max(2 * width, sizes.hidden))


def graph_bytes(largest: int) -> int:
    """Return the bytes of vLLM's CUDA graphs for batches of up to `largest` tokens.

    vLLM captures batches of 1, 2 and 4, each multiple of 8 to 256, and each of 16 beyond (vllm 0.19,
    `_set_cudagraph_sizes` of `config/vllm.py`).
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    count = len([size for size in sizes if size <= largest])
    return FIRST_GRAPHS + NEXT_GRAPHS * (count - 1)


def _options(request: ServingRequest, sizes: ModelSizes) -> Options:
    large = _is_large(request)
    share = request.utilization or (0.92 if request.minor >= NEW_BUDGET else 0.9)
    largest = request.minor >= LARGER_DEFAULTS and (request.gpu.memory_bytes or 0) >= LARGEST_GPU
    length = request.max_model_len or sizes.longest or DEFAULT_LENGTH
    sequences = request.max_num_seqs or (1024 if large else 256)
    # The default number of tokens is at most that of all sequences, and the one of sequences at most that of
    # tokens.
    tokens = min(16384 if largest else 8192 if large else 2048, sequences * length)
    batched = request.max_batched_tokens or tokens
    return Options(share, batched, request.max_num_seqs or min(sequences, batched), length)


def _is_large(request: ServingRequest) -> bool:
    gpu = request.gpu
    small = request.minor >= SMALLER_GB10 and _capability(gpu) == SMALL_CAPABILITY
    excepted = gpu.model == "A100" or small
    return (gpu.memory_bytes or 0) >= LARGE_GPU and not excepted


def _largest_graph(request: ServingRequest, options: Options) -> int:
    """Return the tokens of vLLM's largest CUDA graph: twice the number of sequences, within limits."""
    doubled = request.minor >= LARGER_DEFAULTS and _capability(request.gpu)[0] == DATACENTER_BLACKWELL
    return min(2 * options.sequences, options.batched, LARGEST_GRAPH * (2 if doubled else 1))


def _capability(gpu: Gpu) -> tuple[int, int]:
    return gpu.compute_capability or (0, 0)


def _non_torch(request: ServingRequest) -> int:
    if request.tensor_parallel > 1:
        return int(NON_TORCH_RANKS * GIB)
    return int((NON_TORCH if request.minor >= NEW_NON_TORCH else NON_TORCH_BEFORE) * GIB)


def _refusal(
    request: ServingRequest, sizes: ModelSizes, options: Options, cache: PagedCache, available: int, held: int
) -> str | None:
    """Return the reason why vLLM would not start; None if it starts."""
    ranks, total = request.tensor_parallel, request.gpu.memory_bytes or 0
    reasons = {
        f"{sizes.heads} heads of attention cannot be divided over {ranks} GPUs. Use a divisor of it.": (
            sizes.heads % ranks
        ),
        f"{sizes.key_heads} heads of keys cannot be divided or repeated over {ranks} GPUs. Use a divisor of "
        "them, or a multiple.": sizes.key_heads and max(sizes.key_heads, ranks) % min(sizes.key_heads, ranks),
        f"A vocabulary of {sizes.vocabulary:,} cannot be divided over {ranks} GPUs. Use a divisor of it.": (
            math.ceil(sizes.vocabulary / VOCABULARY_PADDING) * VOCABULARY_PADDING % ranks
        ),
        f"The model has {sizes.longest} positions. Lower --max-model-len {options.length} to that.": (
            sizes.longest and options.length > sizes.longest
        ),
        f"A forward pass of {options.batched:,} tokens is too small for {options.sequences:,} sequences. "
        "Raise --max-batched-tokens, or lower --max-num-seqs.": options.batched < options.sequences,
        "No memory is left for the cache. Raise --utilization, quantize, or use more GPUs.": (
            available <= 0 and held >= total * options.share
        ),
        "No memory is left for the cache. Lower --max-num-seqs and --max-batched-tokens, or raise "
        "--utilization.": available <= 0,
        f"The share {options.share} exceeds the free memory. Lower --utilization to {_most_share(total)}.": (
            total * options.share > total - CONTEXT
        ),
    }
    if reason := next((text for text, applies in reasons.items() if applies), None):
        return reason
    needed = cache.blocks_of(options.length) * cache.block_bytes
    if needed <= available:
        return None
    longest = cache.longest_in(available, options.length)
    return (
        f"One sequence of {options.length:,} tokens needs {show_bytes(needed)} of cache, and "
        f"{show_bytes(available)} are left. "
        + (
            f"Lower --max-model-len to {longest}."
            if longest
            else "Raise --utilization, or lower --block-size."
        )
    )


def _most_share(total: int) -> float:
    """Return the largest `gpu_memory_utilization`, in hundredths, for which enough memory is free."""
    return int((1 - CONTEXT / total) * 100) / 100


def _doubts(request: ServingRequest, sizes: ModelSizes, layout: LinearLayout | None) -> tuple[str, ...]:
    """Return warnings about options and GPUs for which no published start of vLLM exists to compare with."""
    doubts = []
    if request.gpu.key != "H100-SXM":
        doubts.append(
            "Non-torch memory and the sizes of CUDA graphs are those of an H100. Leave some memory free."
        )
    if request.minor > 19:
        doubts.append(
            "Formulas are compared with vLLM 0.19. Later versions may use more or less: see its log."
        )
    if layout and layout.name in NO_WORKSPACE:
        doubts.append(
            "Kernels for mxfp4 pad the experts, so weights may be 5 to 10 % larger. Leave that much free."
        )
    if any(layer.state_numbers for layer in sizes.layers):
        doubts.append("Caches with states were not compared with a published start: see its log.")
    return tuple(doubts)


def _name(request: ServingRequest) -> str:
    return request.model.name
