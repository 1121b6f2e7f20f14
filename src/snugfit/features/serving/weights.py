"""Bytes of a served model's weights on one rank, from its architecture on `meta`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import ModelError, one_line
from snugfit.features.serving.architecture import build_without_data
from snugfit.features.serving.quantization import LinearLayout, read_layout
from snugfit.job.model import Model

if TYPE_CHECKING:
    from torch import nn

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by dtype."""

WHOLE = re.compile(
    r"(^|\.)(router|gate|shared_expert_gate|kv_a_proj_with_mqa|q_a_proj)(\.|$)|norm", re.IGNORECASE
)
"""Names of modules that are not divided over ranks: routers, norms, and MLA's projections to the latent
vector. Source: `ReplicatedLinear` of vLLM 0.19, in `deepseek_v2.py`, `qwen2_moe.py` and `mixtral.py` of
`model_executor/models`.
"""

KEYS = re.compile(r"(^|\.)(k_proj|v_proj)(\.|$)")
"""Names of projections to keys and values. Each rank has at least one of their heads."""

EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""Names of modules that hold the weights of experts."""


def check_headers(folder: Path) -> None:
    """Raise `ModelError` for a file of safetensors in a folder that no engine could load.

    Its header is cut or not JSON, or its tensors do not fill the file. A path that is no folder has no such
    files.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file}: not a usable safetensors file: {one_line(error, 200)}. Download the file again, "
                "with git lfs pull if git has left a pointer."
            ) from None


@dataclass(frozen=True)
class Matrix:
    """One weight of the served model: its module's name, its shape, and True if quantization packs it."""

    module: str
    """Name of the module that holds the matrix."""

    shape: tuple[int, ...]
    """Shape of the matrix in transformers."""

    linear: bool
    """True for a matrix of a linear layer or of experts, which quantization packs."""


def weight_bytes(
    model: Model, *, dtype: str, at_start: str | None, tensor_parallel: int
) -> tuple[int, LinearLayout | None]:
    """Return the bytes of the weights on one rank, and the storage format of the quantized ones.

    Raises `ModelError` for a model that transformers cannot build and for an unknown quantization.
    """
    layout = read_layout(model.config, at_start, name=model.name)
    size = DTYPE_BYTES[dtype]
    keys = model.config.get("text_config", model.config).get("num_key_value_heads") or tensor_parallel
    total = 0
    for matrix in _matrices(model):
        total += _bytes_of(matrix, layout, size) // _ranks(matrix, tensor_parallel, keys)
    return total, layout


def _bytes_of(matrix: Matrix, layout: LinearLayout | None, size: int) -> int:
    numbers = 1
    for length in matrix.shape:
        numbers *= length
    if layout is None or not matrix.linear or layout.excludes(matrix.module):
        return numbers * size
    experts = bool(EXPERTS.search(matrix.module))
    if layout.experts_only and not experts:
        return numbers * size
    *copies, outputs, inputs = matrix.shape
    many = 1
    for length in copies:
        many *= length
    return many * layout.bytes_of(outputs, inputs)


def _ranks(matrix: Matrix, tensor_parallel: int, keys: int) -> int:
    """Return the number of tensor-parallel ranks over which vLLM shards a weight."""
    if len(matrix.shape) < 2 or WHOLE.search(matrix.module):
        return 1
    return min(tensor_parallel, keys) if KEYS.search(matrix.module) else tensor_parallel


@lru_cache(maxsize=32)
def _matrices(model: Model) -> tuple[Matrix, ...]:
    """Return all weights of a model. A weight that several modules share occurs once."""
    return tuple(_weights_of(build_without_data(model)))


def _weights_of(built: nn.Module) -> Iterator[Matrix]:
    import torch

    visited: set[int] = set()
    for name, module in built.named_modules():
        for weight in module.parameters(recurse=False):
            if id(weight) in visited:
                continue
            visited.add(id(weight))
            linear = isinstance(module, torch.nn.Linear) or bool(EXPERTS.search(name))
            yield Matrix(name, tuple(weight.shape), linear and weight.ndim > 1)
