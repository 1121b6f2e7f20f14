"""The inference server to predict: model, engine, engine version and options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snugfit.errors import UsageError, did_you_mean
from snugfit.features.serving.weights import DTYPE_BYTES

if TYPE_CHECKING:
    from snugfit.features.serving.gguf import GgufHeader
    from snugfit.job.gpu import Gpu
    from snugfit.job.model import Model

ENGINES = ("vllm", "sglang", "llama.cpp")
"""Inference engines whose memory formulas are known."""

VERSIONS: Mapping[str, tuple[str, str, str]] = {
    "vllm": (r"0\.([0-9]{1,4})(\.[0-9]{1,4})?", "0.15 to 0.33", "0.33"),
    "sglang": (r"0\.5\.([0-9]{1,4})(\.post[0-9]{1,4})?", "0.5.4 to 0.5.9", "0.5.9"),
    "llama.cpp": (r"b?([0-9]{1,6})", "b6325 and later builds", "b6325"),
}
"""For each engine: regular expression of a version, the known versions in words, and the default."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "vllm": (15, 33),
    "sglang": (4, 9),
    "llama.cpp": (6325, math.inf),
}
"""First and last known version of each engine: minor versions of vLLM, patches of sglang 0.5, builds of
llama.cpp. From 0.5.10 on, sglang reserves memory for graphs of prompts, and 0.5.23 sizes its cache after
them. Build 6325 of llama.cpp is the first that chooses flash attention by itself (pull request 15434; the
build's number was not checked against the source).
"""

CACHE_BYTES: Mapping[str, Mapping[str, float]] = {
    "vllm": {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1},
    "sglang": {"bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp4_e2m1": 9 / 16},
    "llama.cpp": {
        "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
        "q4_0": 18 / 32, "iq4_nl": 18 / 32,
    },
}  # fmt: skip
"""Bytes of one element of the key/value cache, by engine and dtype (vllm 0.19, `CacheDType` of
`config/cache.py`). fp4 of sglang has a scale of one byte for 16 numbers (`get_cell_size_per_token`).
Quantized types of llama.cpp pack 32 numbers with a scale (`ggml-common.h`).
"""

MOST_RANKS, MOST_TOKENS = 1024, 1 << 24

VLLM_BLOCK = 16
"""Tokens of which a block of vLLM's cache is a multiple. Source: `get_kv_cache_shape` of its FlashAttention
backend, which refuses others."""


@dataclass(frozen=True, kw_only=True)
class ServingRequest:
    """An inference server to predict: a model, an engine with its options, and one or more GPUs of a kind. An
    option of None means the engine's default.
    """

    model: Model | GgufHeader
    """The model's architecture, or the header of a GGUF file for llama.cpp."""

    gpu: Gpu
    """The GPU, the same for each rank."""

    engine: str = "vllm"
    """Inference engine: `vllm`, `sglang` or `llama.cpp`."""

    version: str | None = None
    """Version of the engine; None for the newest known one."""

    utilization: float | None = None
    """Share of the GPU's memory that the engine may use: `gpu_memory_utilization`, `mem_fraction_static`."""

    max_model_len: int | None = None
    """Largest number of tokens of a sequence; None for the model's own."""

    block_size: int | None = None
    """Number of tokens in one block of the key/value cache; None for the engine's default."""

    max_num_seqs: int | None = None
    """Largest number of sequences that are computed at once; None for the engine's default."""

    max_batched_tokens: int | None = None
    """Largest number of tokens in one forward pass; None for the engine's default."""

    cache_dtype: str = "auto"
    """Dtype of the key/value cache. `auto` is the dtype of the weights, and f16 in llama.cpp."""

    dtype: str | None = None
    """Dtype of weights that are not quantized; None for that in the checkpoint."""

    quantization: str | None = None
    """Method by which the engine quantizes weights at its start; None for the checkpoint's own."""

    tensor_parallel: int = 1
    """Number of GPUs over which each layer is divided."""

    cuda_graphs: bool = True
    """True if the engine captures CUDA graphs; False if it runs eagerly."""

    tokens: int | None = None
    """Number of tokens in each counted sequence; None for `max_model_len`."""

    def __post_init__(self) -> None:
        from snugfit.features.serving.gguf import GgufHeader
        from snugfit.job.gpu import Gpu
        from snugfit.job.model import Model

        _instance("model", self.model, (Model, GgufHeader), "snugfit.Model.find('Llama-3.1-8B')")
        _instance("gpu", self.gpu, (Gpu,), "snugfit.find_gpu('h100')")
        _instance("cuda_graphs", self.cuda_graphs, (bool,), "True")
        _choose("engine", self.engine, ENGINES)
        _refuse_version(self.engine, self.version)
        share = self.utilization
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise UsageError(
                f"utilization is {share}; it must be a share of the GPU's memory above 0 and at most 1. "
                "Try 0.9."
            )
        for name in ("max_model_len", "block_size", "max_num_seqs", "max_batched_tokens", "tokens"):
            _in_range(name, getattr(self, name), MOST_TOKENS)
        if self.engine == "vllm" and (self.block_size or VLLM_BLOCK) % VLLM_BLOCK:
            raise UsageError(
                f"block_size is {self.block_size}; attention kernels of vLLM take multiples of {VLLM_BLOCK}. "
                f"Try {VLLM_BLOCK}."
            )
        _in_range("tensor_parallel", self.tensor_parallel, MOST_RANKS)
        if self.cache_dtype != "auto":
            _choose(f"cache_dtype of {self.engine}", self.cache_dtype, tuple(CACHE_BYTES[self.engine]))
        if self.dtype is not None:
            _choose("dtype", self.dtype, tuple(DTYPE_BYTES))

    @property
    def known_version(self) -> str:
        """The version of the engine; by default the newest one whose formulas are implemented."""
        return (self.version or VERSIONS[self.engine][2]).removeprefix("v")

    @property
    def minor(self) -> int:
        """The minor version of the engine, such as 33 for vLLM 0.33."""
        parts = re.fullmatch(VERSIONS[self.engine][0], self.known_version)
        return int(parts[1]) if parts and self.engine == "vllm" else 0


def _refuse_version(engine: str, version: str | None) -> None:
    """Raise `UsageError` for a version of the engine whose memory formulas are unknown."""
    pattern, known, default = VERSIONS[engine]
    if version is None:
        return
    parts = re.fullmatch(pattern, str(version).removeprefix("v"))
    first, last = BOUNDS[engine]
    if not isinstance(version, str) or not parts or not first <= int(parts[1]) <= last:
        raise UsageError(
            f"The formulas of {engine} {version!r} are unknown. Known are {known}. Try --engine-version "
            f"{default}, or leave it out."
        )


def _instance(name: str, value: object, kinds: tuple[type, ...], example: str) -> None:
    if not isinstance(value, kinds):
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise UsageError(f"{name} is {value!r}; it must be a {allowed}. Try {example}.")


def _choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        guess = did_you_mean(str(value), allowed)
        raise UsageError(f"{name} is {value!r}.{guess} Allowed are {', '.join(allowed)}. Choose one of them.")


def _in_range(name: str, value: object, largest: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and 1 <= value <= largest):  # type: ignore[operator]
        raise UsageError(
            f"{name} is {value!r}; allowed are whole numbers from 1 to {largest:,}. Leave it out for the "
            "engine's default."
        )
