"""llama.cpp's memory at its start: the tensors of a GGUF file, a key-value cache, and a compute buffer.

Source: llama.cpp, MIT, `llama-model.cpp`, `llama-kv-cache*.cpp`, `llama-hparams.cpp` and `llama-context.cpp`
in `src`. All layers are on the GPU, and flash attention is on. The compute buffer holds the logits and one
hidden state of a micro-batch, in fp32. Published logs of builds before 6325 confirm it: 258.50 MiB for Llama
3 8B, with 512 tokens, a vocabulary of 128,256 and a width of 4,096. Other parts were not compared with
published starts.

Each slot (a sequence served in parallel) has a separate cache, as with `--parallel`. Without this option,
later builds share one cache among four slots (`kv_unified`), whose windows are longer. That is not predicted.
Builds of June 2026 and later reserve logits for the slots only (`n_outputs_max`, pull request 23861), so
their buffer is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snugfit.errors import ModelError, UsageError
from snugfit.features.serving.answer import ServingAnswer
from snugfit.features.serving.architecture import served_config
from snugfit.features.serving.blocks import largest
from snugfit.features.serving.gguf import GgufHeader
from snugfit.features.serving.request import CACHE_BYTES, ServingRequest
from snugfit.features.serving.sizes import LayerCache, read_sizes
from snugfit.features.serving.vllm import CONTEXT
from snugfit.features.serving.weights import weight_bytes
from snugfit.units import show_bytes

PADDING = 256
"""The cache's number of tokens is a multiple of this number (`llama_kv_cache::get_padding` with flash
attention, and in later builds the constructor of `llama_context`).
"""

MOST_SLOTS = 1 << 16
"""Largest number of concurrent sequences (slots) that is counted."""

MICRO_BATCH = 512
"""Default number of tokens in a micro-batch (`--ubatch-size`, `n_ubatch` of `common/common.h`)."""

STATES_CONTEXT = 1 << 20
"""Number of tokens in a sequence for a model without positions (`convert_hf_to_gguf.py`, `MambaModel`)."""

MOST_LAYERS = 512
"""Largest number of layers of a model (`LLAMA_MAX_LAYERS` of llama.cpp, `src/llama-hparams.h`)."""

WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4, "olmo2": 4, "exaone4": 4}
"""One of each such number of layers has no sliding window, by architecture. Used for files without
`attention.sliding_window_pattern` (`llama_hparams::set_swa_pattern`, called in `llama-model.cpp`, in later
builds in `models/*.cpp`). Other architectures have none, and their layers keep all tokens.
"""


class _ServedParts(NamedTuple):
    """Sizes of a model that determine llama.cpp's memory: weights, key-value caches, vocabulary and hidden
    size.
    """

    weights: int
    layout: str
    hidden: int
    vocabulary: int
    longest: int
    layers: Sequence[LayerCache]


def predict_llama_cpp(request: ServingRequest) -> ServingAnswer:
    """Return the memory of a llama.cpp server. Raises `UsageError` for several GPUs, over which llama.cpp
    would distribute layers.
    """
    _refuse_options(request)
    model = _from_header(request.model) if isinstance(request.model, GgufHeader) else _from_config(request)
    slots, batched = request.max_num_seqs or 1, request.max_batched_tokens or MICRO_BATCH
    length = request.max_model_len or model.longest
    number = CACHE_BYTES["llama.cpp"][request.cache_dtype if request.cache_dtype != "auto" else "f16"]
    total, tokens = request.gpu.memory_bytes or 0, request.tokens or length
    compute = batched * (model.vocabulary + model.hidden) * 4
    available = total - CONTEXT - model.weights - compute
    cache = _cache_bytes(model.layers, length, slots, batched, number)
    refusal = None
    if length > model.longest:
        refusal = f"The model has {model.longest:,} positions. Lower --ctx-size {length} to that."
    elif available <= 0:
        refusal = "No memory is left for the cache. Lower --ubatch-size, or keep layers on the host."
    elif cache > available:
        refusal = (
            f"A context of {length * slots:,} tokens needs {show_bytes(cache)} of cache, and "
            f"{show_bytes(available)} are left. Lower --ctx-size or --parallel, or keep layers on the host."
        )

    def fits(tokens: int, slots: int) -> bool:
        return _cache_bytes(model.layers, tokens, slots, batched, number) <= available

    longest = largest(model.longest, lambda tokens: fits(tokens, 1))
    most = slots * length if refusal is None else longest
    return ServingAnswer(
        model=request.model.name, gpu=request.gpu.name, engine="llama.cpp", version=request.known_version,
        tensor_parallel=1, starts=refusal is None, refusal=refusal, total_bytes=total,
        usable_bytes=total - CONTEXT, utilization=None, weights_bytes=model.weights,
        weights_layout=model.layout, activation_bytes=compute, non_torch_bytes=CONTEXT, graph_bytes=0,
        graphs_reduce_cache=False, cache_bytes=max(0, available),
        token_bytes=math.ceil(sum(layer.token_numbers for layer in model.layers) * number),
        cache_tokens=most, sequence_tokens=tokens,
        sequences=largest(MOST_SLOTS, lambda count: fits(tokens, count)),
        most_sequences=slots, longest=longest, max_model_len=length, block_size=PADDING,
        doubts=(
            "Only the graph's buffer was compared with published logs of llama.cpp. Compare with yours.",
            "Builds of June 2026 and later have a smaller buffer.",
            *_cut_file(request.model),
        ),
    )  # fmt: skip


def _cut_file(model: object) -> Iterator[str]:
    """Yield a warning about a GGUF file without all of its tensors."""
    if isinstance(model, GgufHeader) and model.missing_bytes:
        yield (
            f"{model.name} ends {show_bytes(model.missing_bytes)} before the end of its tensors. llama.cpp "
            "loads whole files only: download it again."
        )


def _refuse_options(request: ServingRequest) -> None:
    """Raise `UsageError` for an option that llama.cpp does not have."""
    types = "llama.cpp reads the types of a GGUF file. Name a .gguf file, and leave it out."
    ranks = request.tensor_parallel
    refused = (
        (ranks > 1, f"tensor_parallel is {ranks}", "llama.cpp divides a model by layers, which is not "
         "predicted. Allowed is 1. Leave it out."),
        (request.quantization, f"quantization is {request.quantization}", types),
        (request.dtype, f"dtype is {request.dtype}", types),
        (request.utilization, f"utilization is {request.utilization}", "llama.cpp may use all of the memory. "
         "Leave it out."),
        (request.block_size, f"block_size is {request.block_size}", "llama.cpp has no blocks. Leave it out."),
        (not request.cuda_graphs, "cuda_graphs is False", "no graphs of llama.cpp are counted. Leave "
         "--enforce-eager out."),
    )  # fmt: skip
    for applies, given, advice in refused:
        if applies:
            raise UsageError(f"{given}; {advice}")


def _from_config(request: ServingRequest) -> _ServedParts:
    """Return the sizes of a model from its config, as its converted GGUF file with 16-bit weights would have
    them.
    """
    assert not isinstance(request.model, GgufHeader)
    sizes = read_sizes(request.model, 1)
    weights, layout = weight_bytes(request.model, dtype="bfloat16", at_start=None, tensor_parallel=1)
    if layout is not None:
        raise ModelError(
            f"{request.model.name} is quantized by {layout.name}, which llama.cpp does not read. Name a "
            ".gguf file of the model."
        )
    # The embedding stays on the host. If it is tied to the head, the GPU gets a copy (`load_tensors`).
    tied = getattr(served_config(request.model).get_text_config(), "tie_word_embeddings", False)
    on_host = 0 if tied else sizes.vocabulary * sizes.hidden * 2
    longest = sizes.longest or STATES_CONTEXT
    return _ServedParts(weights - on_host, "16 bits", sizes.hidden, sizes.vocabulary, longest, sizes.layers)


def _from_header(header: GgufHeader) -> _ServedParts:
    """Return the sizes of a model from the header of its GGUF file."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{header.name}: it has no token_embd.weight, so it is not a model of text. Name another file."
        )
    total = sum(tensor.size for tensor in header.tensors)
    # The embedding stays on the host. A model without a head gets a copy on the GPU.
    weights = total - embedding.size if "output.weight" in tensors else total
    largest = max(header.tensors, key=lambda tensor: tensor.size if "blk." in tensor.name else 0)
    return _ServedParts(
        weights,
        f"mostly {largest.kind}",
        header.number("embedding_length"),
        embedding.shape[1],
        header.number("context_length"),
        _layers_of(header),
    )


def _layers_of(header: GgufHeader) -> tuple[LayerCache, ...]:
    """Return the key-value cache or Mamba state of each layer, from the header.

    Raises `ModelError` for a header with more than `MOST_LAYERS` layers.
    """
    count, heads = header.number("block_count"), header.number("attention.head_count", 0)
    if count > MOST_LAYERS:
        raise ModelError(
            f"{header.name}: not a usable GGUF file: it has {count:,} layers, and llama.cpp has at most "
            f"{MOST_LAYERS}. Download the file again, or name another."
        )
    keys = header.metadata.get(f"{header.architecture}.attention.head_count_kv")
    per_layer = keys if isinstance(keys, list) else [header.number("attention.head_count_kv", heads)] * count
    width = header.number("embedding_length") // heads if heads else 0
    pair = header.number("attention.key_length", width) + header.number("attention.value_length", width)
    window = header.number("attention.sliding_window", 0)
    windows = _window_layers(header, count)
    inner, state = header.number("ssm.inner_size", 0), header.number("ssm.state_size", 0)
    groups = header.number("ssm.group_count", 0)
    convolution = (inner + 2 * groups * state) * max(0, header.number("ssm.conv_kernel", 1) - 1)
    layers = []
    for has_window, its_keys in zip(windows, per_layer, strict=False):
        layers.append(
            LayerCache(
                token_numbers=its_keys * pair,
                window=window if window and has_window else None,
                state_numbers=convolution + inner * state if not its_keys or not heads else 0,
            )
        )
    return tuple(layers)


def _window_layers(header: GgufHeader, count: int) -> list[bool]:
    """Return True for each layer with a sliding attention window, else False. With a `period` of 0, all
    layers have a window.

    Raises `ModelError` for a pattern that is neither a whole number nor a list of them.
    """
    key = "attention.sliding_window_pattern"
    pattern = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(pattern, list) and pattern:
        return [bool(pattern[layer % len(pattern)]) for layer in range(count)]
    period = header.number(key, WINDOW_PATTERNS.get(header.architecture, 1))
    return [not period or (layer + 1) % period != 0 for layer in range(count)]


def _cache_bytes(layers: Sequence[LayerCache], tokens: int, slots: int, batched: int, number: float) -> int:
    """Return the bytes of the key-value cache for `slots` sequences of `tokens` tokens. Mamba states are in
    fp32.

    Source: `llama-kv-cache-iswa.cpp` and `llama-memory-recurrent.cpp`.
    """
    whole = _pad(tokens)
    total = 0
    for layer in layers:
        cells = whole if layer.window is None else min(whole, _pad(layer.window + batched))
        total += slots * (math.ceil(cells * layer.token_numbers * number) + layer.state_numbers * 4)
    return total


def _pad(tokens: int) -> int:
    return math.ceil(tokens / PADDING) * PADDING
