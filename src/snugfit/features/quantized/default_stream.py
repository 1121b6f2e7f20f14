"""Context in which bitsandbytes quantizes in order with work on another CUDA stream.

Its kernels that quantize run on CUDA's default stream (`backends/cuda/ops.py` passes them no stream, unlike
those that dequantize). A run whose work is on a stream of its own would quantize numbers that are not written
yet. So the context waits for both streams around each of these kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from snugfit.rehearsal.device.autocast import overriding

OPERATORS = ("quantize_4bit", "quantize_blockwise")
"""Operators of bitsandbytes whose kernels run on the default stream, not on the current one."""


@contextlib.contextmanager
def quantize_in_order(key: str = "CUDA", drain: Callable[[], None] | None = None) -> Iterator[None]:
    """Context in which these operators, for tensors of the dispatch key, begin after all earlier work and end
    before later work.

    The function `drain` waits for the device. Its default does so on a GPU, if the current stream is not the
    default one.
    """
    import bitsandbytes  # noqa: F401  it defines the operators
    import torch

    library = torch.library.Library("bitsandbytes", "IMPL")
    try:
        for name in OPERATORS:
            own = torch.library.get_kernel(f"bitsandbytes::{name}", key).call_boxed
            kernel = _drain_around(own, drain or _drain)
            with overriding():
                library.impl(name, kernel, key, with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _drain_around(function: Callable[..., Any], drain: Callable[[], None]) -> Callable[..., Any]:
    def run(keyset: Any, *arguments: Any) -> Any:
        drain()
        result = function(keyset, *arguments)
        drain()
        return result

    return run


def _drain() -> None:
    import torch

    if torch.cuda.current_stream() != torch.cuda.default_stream():
        torch.cuda.synchronize()
