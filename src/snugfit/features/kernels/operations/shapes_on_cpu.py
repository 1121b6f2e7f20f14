"""Context in which tensors without data are treated as tensors of a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ON_CPU: list[bool] = []


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Return True for a tensor on the CPU, and for one on `meta` within `shapes_on_cpu`."""
    return tensor.device.type == "cpu" or (tensor.is_meta and bool(_ON_CPU))


@contextlib.contextmanager
def shapes_on_cpu() -> Iterator[None]:
    """Context in which operators treat tensors on `meta` as on a CPU, and run plain torch."""
    _ON_CPU.append(True)
    try:
        yield
    finally:
        _ON_CPU.pop()
