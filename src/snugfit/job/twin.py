"""A second module like the first, on the ambient device, for modules that come from Python.

On `meta` no weight may be copied: every parameter and buffer is given a twin without data before
`copy.deepcopy` starts, through its memo. Deepcopy then carries over everything else: ties (one tensor, one
twin), the modules' hooks, `requires_grad`, and plain attributes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def twin(module: nn.Module) -> nn.Module:
    """A copy of `module` on the ambient `torch.device`; the original is left as it is."""
    import torch

    device = torch.get_default_device()
    if device.type != "meta":
        return copy.deepcopy(module).to(device)
    with torch.no_grad():
        memo: dict[int, object] = {id(tensor): _meta_twin(tensor) for tensor in _tensors(module)}
    return copy.deepcopy(module, memo)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    import torch
    from torch import nn

    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
