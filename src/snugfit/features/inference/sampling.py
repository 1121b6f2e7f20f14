"""Simulation of drawing random tokens, by the operators that torch runs on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def draw(probabilities: torch.Tensor, num_samples: int, *arguments: Any, **named: Any) -> torch.Tensor:
    """Return the result of `torch.multinomial` without replacement on `meta` tensors.

    On `meta`, the operator allocates its result alone. A device checks the probabilities, and divides them by
    random numbers in a tensor of their size. The source is `native/Distributions.cpp` (torch 2.13).
    """
    import torch

    rows = probabilities.shape[:-1]
    result = torch.empty((*rows, num_samples), dtype=torch.int64, device=probabilities.device)
    low, high = torch.aminmax(probabilities)
    torch._assert_async((low >= 0) & (high < float("inf")))
    torch._assert_async(~(probabilities.sum(-1) == 0).any())
    noise = torch.empty_like(probabilities).exponential_(1)
    torch.div(probabilities, noise, out=noise)
    if num_samples == 1:
        return torch.argmax(noise, -1, keepdim=True, out=result)
    values = torch.empty(result.shape, dtype=noise.dtype, device=noise.device)
    torch.topk(noise, num_samples, out=(values, result))
    return result
