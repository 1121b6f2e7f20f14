"""Models that user code builds on the host and moves to a simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

DRAWS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
    "kaiming_normal_", "orthogonal_",
)  # fmt: skip
"""Functions of `torch.nn.init` that draw random numbers."""


@contextlib.contextmanager
def models_without_data() -> Iterator[None]:
    """Context in which initial weights on the host are not drawn, and `Module.to` keeps its parameters.

    No byte of the device depends on initial weights. A large model then needs no host memory, because pages
    that nothing writes take none. From the host to `meta`, torch would create new parameters. An existing
    optimizer or a tied weight would keep the old ones. CUDA keeps the parameters and replaces their data, as
    `swap_tensors` does here.
    """
    import torch

    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    with contextlib.ExitStack() as undo:
        for name in DRAWS:
            undo.enter_context(
                patch.object(torch.nn.init, name, _on_device_only(getattr(torch.nn.init, name)))
            )
        future.set_swap_module_params_on_conversion(True)
        undo.callback(future.set_swap_module_params_on_conversion, before)
        yield


def _on_device_only(draw: Callable[..., Any]) -> Callable[..., Any]:
    def run(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return tensor if tensor.device.type == "cpu" else draw(tensor, *arguments, **keywords)

    return run
