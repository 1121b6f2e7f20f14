"""Simulation of matrix products with bitsandbytes' 4-bit weights on the chosen GPU.

`bitsandbytes::gemm_4bit` is one operator, whose fake kernel allocates only the result. On a GPU it has two
paths (`backends/cuda/ops.py`). Inputs with few rows use a kernel that dequantizes while it multiplies. For
more rows, the scales and then the whole weight are dequantized, and cuBLAS multiplies. The simulation runs
the operators of the second path, which have fake kernels of their own, with the same memory.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.device.autocast import KEY, overriding
from snugfit.rehearsal.device.policy import CudaPolicy

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy

_CHOICE = "_gemm_4bit_use_custom_cuda"
_LEAST_ROWS, _MOST_ROWS = "_GEMM_4BIT_CUSTOM_FLOOR_M", "_gemm_4bit_custom_max_m"
_NESTED_BLOCK = 256
"""Number of scales that share a scale, if scales are quantized too."""


@contextlib.contextmanager
def four_bit_products(policy: Policy) -> Iterator[None]:
    """Context in which products with 4-bit weights run on `meta` tensors as on the simulated GPU.

    If bitsandbytes is not imported, the context has no effect. The products are registered as a kernel of
    torch's dispatcher. `torch.ops.bitsandbytes.gemm_4bit.default` must not be replaced. The dispatcher caches
    that object at the first call, without a reference to it (`getTorchApiFunction`, torch 2.13).
    """
    import torch

    if "bitsandbytes" not in sys.modules:
        yield
        return
    library = torch.library.Library("bitsandbytes", "IMPL")
    try:
        fused = torch.library.get_kernel("bitsandbytes::gemm_4bit", KEY).call_boxed
        with overriding():
            library.impl("gemm_4bit", _product(policy, fused), KEY, with_keyset=True, allow_override=True)
            # bitsandbytes' own function compares a list with a torch.Size, which are never equal.
            library.impl("dequantize_4bit.out", _write_nothing, "Meta", allow_override=True)
        yield
    finally:
        library._destroy()


def _write_nothing(*arguments: Any) -> None:
    """Do nothing, for an operator that writes a weight without data into its last argument."""


def _product(policy: Policy, fused: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    ops: Any = torch.ops.bitsandbytes
    gpu = policy if isinstance(policy, CudaPolicy) else None

    def gemm_4bit(
        keyset: Any,
        inputs: Any,  # (..., K)
        packed: Any,  # two weights in each byte
        shape: Any,  # (N, K)
        absmax: Any,
        blocksize: int,
        quant_type: str,
        bias: Any = None,
        absmax_8bit: Any = None,
        absmax_code: Any = None,
        absmax_offset: Any = None,
    ) -> Any:
        rows = inputs.numel() // inputs.shape[-1]
        # Few rows are multiplied by one kernel without a temporary.
        if gpu and _is_fused(gpu, inputs.dtype, rows, tuple(shape), blocksize):
            scales = (absmax_8bit, absmax_code, absmax_offset)
            return fused(keyset, inputs, packed, shape, absmax, blocksize, quant_type, bias, *scales)
        nested = None
        # Quantized scales are first converted to fp32.
        if absmax_8bit is not None:
            nested = ops.dequantize_blockwise.default(
                absmax_8bit, absmax, absmax_code, _NESTED_BLOCK, torch.float32
            )
            absmax = nested + absmax_offset
        if not gpu:
            nested = None  # freed here; on a GPU, the variable keeps it alive until the product exists
        weight = ops.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, inputs.dtype)
        with (
            torch.enable_grad()
        ):  # bitsandbytes' Function is without; so a recomputed product is known as one
            return torch.nn.functional.linear(
                inputs.detach(), weight, None if bias is None else bias.detach()
            )

    return gemm_4bit


def _is_fused(policy: CudaPolicy, dtype: Any, rows: int, shape: tuple[int, int], blocksize: int) -> bool:
    """Return True if one kernel both dequantizes the 4-bit weight and computes the product.

    Raises `PoliciesDiffer` where GPUs that are simulated together differ.
    """
    if shape[1] % blocksize:
        return False

    return policy.common_choice(
        lambda gpu_policy: fuses(gpu_policy.multiprocessors, *gpu_policy.capability, dtype, rows, *shape)
    )


@functools.cache
def fuses(
    multiprocessors: int, major: int, minor: int, dtype: Any, rows: int, columns: int, inner: int
) -> bool:
    """Return True if bitsandbytes dequantizes a 4-bit weight (columns, inner) and multiplies in one kernel.
    This depends on the number of input rows.
    """
    names = _bitsandbytes_choice()
    # The table depends on the GPU, so the simulated GPU's properties replace those of a device.
    names["_gpu_dispatch_props"] = lambda device_index: (multiprocessors, major, minor)
    return rows <= names[_MOST_ROWS] and bool(names[_CHOICE](0, dtype, rows, columns, inner))


@functools.cache
def _bitsandbytes_choice() -> dict[str, Any]:
    """Return the names in bitsandbytes' source that choose the kernel, with their values. A part of its
    source is executed.

    Raises `AttributeError` where the source has another form.
    """
    import torch

    spec = find_spec("bitsandbytes")
    assert spec is not None
    assert spec.origin is not None
    # The file cannot be imported if torch has no CUDA, so the function's source is executed alone.
    source = Path(spec.origin).parent.joinpath("backends", "cuda", "ops.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {"torch": torch, "functools": functools}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == _CHOICE:
            node.decorator_list = []  # its cache would return the first GPU's result for every GPU
            exec(compile(ast.Module([node], []), spec.origin, "exec"), names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target = ast.unparse(node.targets[0])
            if target in (_LEAST_ROWS, _MOST_ROWS):
                names.setdefault(target, node.value.value)  # the branch for CUDA precedes that for ROCm
    if missing := {_CHOICE, _LEAST_ROWS, _MOST_ROWS} - names.keys():
        raise AttributeError(f"bitsandbytes' {sorted(missing)}")
    return names
