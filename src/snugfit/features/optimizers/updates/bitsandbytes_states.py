"""Shared parts of bitsandbytes' optimizers: states in 8 bits, paged states, and a simulated step on meta
tensors.

State in 8 bits: a byte an element and 4 bytes a block of 256, for each moment. Parameters of fewer than 4,096
elements (biases, norms) keep 32 bits. One code book of 1 KiB for each moment is shared by all.

Paged states are in memory that the driver moves between host and GPU (`cudaMallocManaged`), a page at a time.
A page stays on the GPU while there is room, and moves to the host when torch's allocator needs that room. To
torch it is a tensor of the host. Parameters of fewer than 100,000 elements have ordinary states.

bitsandbytes registers shape functions for both of its update kernels, and the rest of its step is ordinary
torch. So it runs on meta tensors unchanged and allocates the same tensors in the same order.
`tests/test_bitsandbytes.py` compares it with a real step.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.hub_kernels import no_hub_kernels
from snugfit.step.host_link import MetaLink

if TYPE_CHECKING:
    import torch


def paged_bytes() -> int:
    """Return the bytes of paged states that this process has created since the last call of
    `keep_embeddings`.
    """
    # Without bitsandbytes there are no paged states, and its import takes seconds.
    if "bitsandbytes" not in sys.modules:
        return 0
    return sum(page.nbytes for page in _page_managers().get_instance().paged_tensors)


def keep_embeddings(model: torch.nn.Module, *, bits: int) -> None:
    """Set the number of bits of the embedding tables' moments, for the optimizer that is created next."""
    import torch

    managers, pages = _managers(), _page_managers()
    for kind in (managers, pages):
        # The global manager finds parameters by position. Overrides of an earlier model would apply to this
        # one.
        kind._instance = None
        # The manager refers to embedding tables, whose memory must be freed with the model.
        weakref.finalize(model, _release, kind, kind.get_instance()).atexit = False
    if bits == 8:
        return
    manager = managers.get_instance()
    for module in model.modules():
        # Gradients of embeddings are sparse and uneven, and 8 bits make them unstable (Dettmers et al.,
        # section 2.3).
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": bits})


def place_in_pages(optimizer: Any, weight: torch.Tensor) -> None:
    """Move the restored moments of a weight into managed memory if they were there when saved.

    torch restores them as ordinary host tensors, which a kernel cannot read.
    """
    import torch

    if not getattr(optimizer, "is_paged", False) or weight.device.type != "cuda":
        return
    state = optimizer.state[weight]
    pages = {
        name: optimizer.get_state_buffer(weight, dtype=value.dtype)
        for name, value in state.items()
        # Scales and counters have other shapes, and stay on the device.
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.shape == weight.shape
    }
    torch.cuda.synchronize(weight.device)  # a kernel fills the pages with zeros
    for name, page in pages.items():
        page.copy_(state[name])
    state.update(pages)


def paging_warning(optimizer: Any) -> str:
    """Return a warning about states that the driver moves between host and GPU; empty if the optimizer has
    none.
    """
    states = optimizer.state.values() if optimizer is not None else ()
    # Only paged tensors have this attribute.
    if not any(hasattr(value, "is_paged") for state in states for value in state.values()):
        return ""
    # Without the number of weights, which differs between a deep model and its simulation with few layers.
    return (
        "Optimizer states are in managed memory, which torch does not count. They stay on the GPU while "
        "there is room, and otherwise go to the host. So the verdict leaves them out. The seconds of moving "
        "them are not predicted."
    )


def _release(kind: Any, instance: Any) -> None:
    if kind._instance is instance:
        kind._instance = None


@contextlib.contextmanager
def shapes(*, on_gpu: bool = True) -> Iterator[None]:
    """Context in which tensors on `meta` are treated as on a GPU, or without `on_gpu` as on a CPU."""
    from unittest.mock import patch

    managers = _managers()
    from bitsandbytes import functional
    from bitsandbytes.optim import optimizer

    pages: dict[str, Any] = {
        "get_paged": _page if on_gpu else _on_the_device,
        "fill": lambda tensor, value: None,
        "prefetch_tensor": _prefetch,
    }
    with (
        patch.object(managers, "_instance", None),
        patch.object(functional.GlobalPageManager, "_instance", None),
        # bitsandbytes waits after each parameter on CUDA and XPU only.
        patch.object(optimizer, "sync_gpu", _wait),
        patch.multiple(functional, **pages),
    ):
        yield


def _page(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Create a paged tensor (CUDA managed memory) in a simulation. Dispatch modes do not record it, because
    it is outside of torch's allocator.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    # Paged states are outside of torch's allocator.
    with _disable_current_modes():
        page = torch.empty(shape, dtype=dtype, device=device)
    page.is_paged = True  # type: ignore[attr-defined]
    return page


def _prefetch(page: torch.Tensor) -> None:
    """Report the prefetch of a paged tensor to a simulation's observer of copies; nothing is copied."""
    MetaLink.observer.prefetch(page.nbytes)


def _on_the_device(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the ordinary tensor of zeros that bitsandbytes creates without a GPU."""
    import torch

    return torch.zeros(shape, dtype=dtype, device=device)


def _wait(tensor: torch.Tensor) -> None:
    """Wait for a tensor's device by reading one of its numbers, so that a trace counts a wait."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # a real wait creates no views
        element = tensor.detach().as_strided((), ())
    element.item()


def _page_managers() -> Any:
    """Return bitsandbytes' class that lists all paged tensors of a process."""
    with no_hub_kernels():
        # bitsandbytes may download kernels from the hub at import.
        from bitsandbytes.functional import GlobalPageManager

    return GlobalPageManager


def _managers() -> Any:
    """Return bitsandbytes' class `GlobalOptimManager`, whose only instance is in `_instance`."""
    with no_hub_kernels():
        from bitsandbytes.optim import GlobalOptimManager

    assert hasattr(GlobalOptimManager, "_instance"), (
        "this version of bitsandbytes keeps its manager elsewhere"
    )
    return GlobalOptimManager
