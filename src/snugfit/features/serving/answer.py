"""The predicted memory of an inference server at its start: weights, key-value cache, and the sequences that
fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from snugfit.documents import encode_fields

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """The predicted memory of one rank of an inference server. All numbers come from formulas; none was
    measured.
    """

    model: str
    """Name of the model."""

    gpu: str
    """Name of the GPU."""

    engine: str
    """Inference engine: `vllm`, `sglang` or `llama.cpp`."""

    version: str
    """Version of the engine whose memory formulas were used."""

    tensor_parallel: int
    """Number of GPUs over which each layer is divided."""

    starts: bool
    """True if the engine starts with these options."""

    refusal: str | None
    """Reason why it does not start, with a remedy; None if it starts."""

    total_bytes: int
    """Bytes of the GPU's memory that processes can use."""

    usable_bytes: int
    """Bytes that the engine may use for weights, cache and everything else."""

    utilization: float | None
    """Share of the GPU's memory that the engine may use; None for llama.cpp, which has no such option."""

    weights_bytes: int
    """Bytes of the weights, and of the tables of rotary positions."""

    weights_layout: str
    """Dtype or quantization of the weights."""

    activation_bytes: int
    """Bytes of activations in the largest forward pass. vLLM measures them by a profiling run at its start.
    """

    non_torch_bytes: int
    """Bytes outside of torch's allocator: libraries and communication."""

    graph_bytes: int
    """Bytes of captured CUDA graphs."""

    graphs_reduce_cache: bool
    """True if the engine reserves memory for CUDA graphs before it sizes the cache. False if graphs use
    memory outside of its share.
    """

    cache_bytes: int
    """Bytes left for the key/value cache; 0 if none are left."""

    token_bytes: int
    """Bytes of the key/value cache for one more token at the beginning of a sequence."""

    cache_tokens: int
    """Number of tokens that the whole key/value cache holds, as the engine reports it."""

    sequence_tokens: int
    """Number of tokens in each of the `sequences`."""

    sequences: int
    """Number of sequences of `sequence_tokens` tokens that the cache holds; 0 if the engine does not
    start.
    """

    most_sequences: int
    """Largest number of sequences that the engine computes at once, by its own setting."""

    longest: int
    """Number of tokens in the longest sequence that the cache holds; 0 if none fits."""

    max_model_len: int
    """Largest number of tokens of a sequence with which the engine starts."""

    block_size: int
    """Number of tokens in one block of the key/value cache."""

    doubts: tuple[str, ...] = ()
    """Warnings about the accuracy of the answer."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "schema": (Literal[1], "Version of the document."),
        "what": (Literal["serving"], "Name of the document."),
        "basis": (Literal["formula"], "Figures are an engine's published formulas, not measurements."),
    }
    """JSON keys that `to_json` adds (`features/schema/json_schema.py`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document that `snugfit serve --json` prints."""
        return {"schema": SCHEMA, "what": "serving", "basis": "formula", **encode_fields(self)}


@dataclass(frozen=True)
class ServingComparison:
    """The predicted memory of the same inference server on several GPUs."""

    answers: tuple[ServingAnswer, ...]
    """Answers for several GPUs, one for each."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "schema": (Literal[1], "Version of the document."),
        "what": (Literal["servings"], "Name of the document."),
    }
    """JSON keys that `to_json` adds (`features/schema/json_schema.py`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document that `snugfit serve --all-gpus --json` prints."""
        return {"schema": SCHEMA, "what": "servings", **encode_fields(self)}
