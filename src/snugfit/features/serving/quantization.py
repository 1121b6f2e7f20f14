"""Storage formats of quantized linear layers, from a model config's `quantization_config`."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snugfit.errors import ModelError, did_you_mean

METHODS = ("fp8", "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "bitsandbytes")
"""Values of `quant_method` in configs whose weight layouts are in this file."""

AT_START = ("fp8",)
"""Methods by which vLLM and sglang quantize 16-bit weights while loading them."""

MOST_BITS, LONGEST_PATTERN = 16, 300
"""Largest accepted number of bits of a weight, and of characters of a regular expression."""

WRAPPERS = frozenset({"model", "language_model"})
"""Parts of module names that checkpoints of one architecture have at different positions."""


@dataclass(frozen=True, kw_only=True)
class LinearLayout:
    """The storage format of a linear layer's weight: bits, scales and zero points."""

    name: str
    """Name of the layout in reports, such as `fp8` or `awq 4 bits`."""

    bits: int
    """Number of bits of a weight."""

    scale_bytes: int
    """Bytes of one scale."""

    group: int = 0
    """Number of inputs that share a scale; 0 for one scale per output, or per matrix if `per_matrix`."""

    rows: int = 1
    """Number of outputs that share a scale: 128 for blocks of 128 by 128, otherwise 1."""

    per_matrix: bool = False
    """True if a whole matrix has one scale."""

    zero_bits: int = 0
    """Bits of each group's zero point; 0 for symmetric quantization."""

    excluded: tuple[str, ...] = ()
    """Names of modules that stay in 16 bits. A name after `re:` is a regular expression, and `*` matches any
    text.
    """

    experts_only: bool = False
    """True if only the matrices of experts are quantized."""

    def __post_init__(self) -> None:
        # Sizes come from a file, and `read_layout` reports an error.
        if not 1 <= self.bits <= MOST_BITS or self.rows < 1 or self.group < 0:
            raise ValueError(f"{self.bits} bits in groups of {self.group}")

    def bytes_of(self, outputs: int, inputs: int) -> int:
        """Return the bytes of one weight matrix with its scales and zero points."""
        groups = math.ceil(inputs / self.group) if self.group else 1
        scales = 1 if self.per_matrix else math.ceil(outputs / self.rows) * groups
        zeros = scales * self.zero_bits / 8
        return math.ceil(outputs * inputs * self.bits / 8 + scales * self.scale_bytes + zeros)

    def excludes(self, module: str) -> bool:
        """Return True if the module of this name stays in 16 bits."""
        bare = _bare(module)
        for pattern in self.excluded:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], module) or re.match(pattern[3:], bare):
                    return True
            elif _within(_bare(pattern), bare):
                return True
        return False


def read_layout(config: Mapping[str, Any], at_start: str | None, *, name: str) -> LinearLayout | None:
    """Return the storage format of a model's linear layers; None for unquantized weights.

    `at_start` is a method by which the engine itself quantizes. Raises `ModelError` for an unknown method and
    for a `quantization_config` that cannot be used.
    """
    stored = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not stored:
        return _layout_at_start(at_start, name)
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if method == "modelopt_fp4":
        method = "modelopt"
    if method not in METHODS:
        raise ModelError(
            f'{name}: "quant_method" is {method!r}.{did_you_mean(str(method), METHODS)} Allowed are '
            f"{', '.join(METHODS)}. Remove quantization_config for weights of 16 bits."
        )
    if at_start and at_start != method:
        raise ModelError(
            f"{name}: its weights are quantized by {method}, and --quantization is {at_start}. Engines "
            "quantize weights of 16 bits only. Leave --quantization out."
        )
    try:
        return _READERS[method](stored)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        key = (
            f"the key {error} is missing"
            if isinstance(error, KeyError)
            else f"a key has a wrong value ({error})"
        )
        raise ModelError(
            f'{name}: the "quantization_config" of {method} cannot be used: {key}. Correct it in the '
            "config.json, or remove quantization_config for weights of 16 bits."
        ) from None


def _layout_at_start(method: str | None, name: str) -> LinearLayout | None:
    if method is None:
        return None
    if method not in AT_START:
        raise ModelError(
            f"{name}: its weights are not quantized, and --quantization is {method!r}. Engines quantize "
            f"at their start by: {', '.join(AT_START)}. Name a quantized checkpoint, or leave it out."
        )
    return LinearLayout(name="fp8 at start", bits=8, scale_bytes=4, per_matrix=True, excluded=("lm_head",))


def _fp8(stored: Mapping[str, Any]) -> LinearLayout:
    """Return the storage format of 8-bit floats: one scale per matrix, or per block (DeepSeek-V3)."""
    excluded = _names(stored.get("modules_to_not_convert") or stored.get("ignored_layers"))
    if block := stored.get("weight_block_size"):
        rows, columns = (int(size) for size in block)
        return LinearLayout(
            name="fp8 in blocks", bits=8, scale_bytes=4, group=columns, rows=rows, excluded=excluded
        )
    return LinearLayout(name="fp8", bits=8, scale_bytes=4, per_matrix=True, excluded=excluded)


def _awq(stored: Mapping[str, Any]) -> LinearLayout:
    """Return AWQ's storage format: scales in 16 bits and packed zero points per group (arXiv:2306.00978)."""
    bits = int(stored.get("bits") or stored["w_bit"])
    group = int(stored.get("group_size") or stored["q_group_size"])
    zero = bits if stored.get("zero_point", True) else 0
    return LinearLayout(
        name=f"awq {bits} bits", bits=bits, scale_bytes=2, group=max(group, 0), zero_bits=zero,
        excluded=_names(stored.get("modules_to_not_convert")),
    )  # fmt: skip


def _gptq(stored: Mapping[str, Any]) -> LinearLayout:
    """Return GPTQ's storage format: scales in 16 bits and packed zero points per group (arXiv:2210.17323)."""
    bits, group = int(stored["bits"]), int(stored["group_size"])
    head = () if stored.get("lm_head") else ("lm_head",)
    return LinearLayout(
        name=f"gptq {bits} bits", bits=bits, scale_bytes=2, group=max(group, 0), zero_bits=bits,
        excluded=head,
    )  # fmt: skip


def _compressed_tensors(stored: Mapping[str, Any]) -> LinearLayout:
    """Return the storage format of the library compressed-tensors, from the first group of weights in the
    config.

    Scales of 8-bit weights are in fp32, and those of packed weights in 16 bits (vllm 0.19,
    `model_executor/layers/quantization/compressed_tensors/schemes`). NVFP4 has an 8-bit scale for every 16
    weights.
    """
    first, *_ = stored["config_groups"].values()
    weights = first["weights"]
    bits, strategy = int(weights["num_bits"]), str(weights.get("strategy") or "tensor")
    group = int(weights.get("group_size") or 0)
    zero = 0 if weights.get("symmetric", True) else bits
    excluded = _names(stored.get("ignore"))
    name = f"{weights.get('type', 'int')}{bits} by compressed-tensors"
    if strategy == "tensor":
        return LinearLayout(name=name, bits=bits, scale_bytes=4, per_matrix=True, excluded=excluded)
    if weights.get("type") == "float" and bits == 4:
        return LinearLayout(name="nvfp4", bits=4, scale_bytes=1, group=16, excluded=excluded)
    if strategy == "block":
        rows, columns = (int(size) for size in weights["block_structure"])
        return LinearLayout(name=name, bits=8, scale_bytes=4, group=columns, rows=rows, excluded=excluded)
    size = 4 if bits == 8 and strategy == "channel" else 2
    return LinearLayout(
        name=name, bits=bits, scale_bytes=size, group=max(group, 0), zero_bits=zero, excluded=excluded
    )


def _modelopt(stored: Mapping[str, Any]) -> LinearLayout:
    """Return ModelOpt's storage format: NVFP4 with an 8-bit scale for every 16 weights, or fp8 with one scale
    per matrix.
    """
    inner = stored.get("quantization") or stored
    excluded = _names(inner.get("exclude_modules") or inner.get("ignore"))
    algorithm = str(inner.get("quant_algo") or "").upper()
    if algorithm == "NVFP4":
        return LinearLayout(name="nvfp4", bits=4, scale_bytes=1, group=16, excluded=excluded)
    if algorithm == "FP8":
        return LinearLayout(name="fp8 by modelopt", bits=8, scale_bytes=4, per_matrix=True, excluded=excluded)
    raise ValueError(algorithm)


def _mxfp4(stored: Mapping[str, Any]) -> LinearLayout:
    """Return MXFP4's storage format: experts with an 8-bit scale for every 32 weights (OCP MX 1.0, table
    1).
    """
    excluded = _names(stored.get("modules_to_not_convert"))
    return LinearLayout(name="mxfp4", bits=4, scale_bytes=1, group=32, excluded=excluded, experts_only=True)


def _bitsandbytes(stored: Mapping[str, Any]) -> LinearLayout:
    """Return the storage format of bitsandbytes: 4 bits with a scale for every 64 weights, or 8 bits with one
    per output.

    Double quantization stores scales in 8 bits (QLoRA, arXiv:2305.14314, section 3).
    """
    excluded = _names(stored.get("llm_int8_skip_modules")) or ("lm_head",)
    if stored.get("load_in_8bit"):
        return LinearLayout(name="bitsandbytes 8 bits", bits=8, scale_bytes=4, excluded=excluded)
    size = 1 if stored.get("bnb_4bit_use_double_quant") else 4
    return LinearLayout(name="bitsandbytes 4 bits", bits=4, scale_bytes=size, group=64, excluded=excluded)


_READERS = {
    "fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
    "mxfp4": _mxfp4, "bitsandbytes": _bitsandbytes,
}  # fmt: skip


def _names(value: Sequence[str] | None) -> tuple[str, ...]:
    """Return patterns for the modules that a config leaves unquantized, which always include the head. Raises
    `ValueError` for an invalid regular expression.
    """
    names = [str(name) for name in value or ()]
    for name in names:
        if name.startswith("re:"):
            if len(name) > LONGEST_PATTERN:
                raise ValueError(name)
            try:
                re.compile(name[3:])
            except re.error as fault:
                raise ValueError(name) from fault
    return (*names, "lm_head")


def _bare(name: str) -> str:
    """Return a module's name without the prefixes and other parts that differ between checkpoints."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _within(pattern: str, name: str) -> bool:
    """Return True if the pattern matches whole parts (between dots) of a module's name."""
    return fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")
