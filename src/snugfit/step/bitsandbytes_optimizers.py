"""What the optimizers of bitsandbytes share: states in 8 bits, embedding tables apart, and a step on shapes.

State in 8 bits: a byte an element and 4 bytes a block of 256, for each moment; parameters of fewer than 4,096
elements (biases, norms) keep 32 bits. One code book of 1 KiB for each moment is shared by all. Embedding
tables may keep 32 bits, because their gradients are sparse and uneven and 8 bits make them unstable (Dettmers
et al., section 2.3, who change the layer itself); the HF Trainer does it for every `nn.Embedding`.

bitsandbytes holds such overrides in one global manager by the *position* of a parameter in its optimizer, and
never forgets them: an earlier model's would change a later one's states in the same process. So
`keep_embeddings` gives each run a manager of its own, and leaves the earlier one to the optimizers that hold
it.

On shapes: bitsandbytes registers shape functions for both of its update kernels, and the rest of its step is
ordinary torch, so it runs on meta tensors unchanged and allocates the same tensors in the same order
(`tests/test_techniques.py` compares it with a real step). `shapes` only leaves the manager of the user's
process as it was, and waits for the device after each parameter: bitsandbytes itself does so on CUDA and XPU
only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.techniques.hub_kernels import no_hub_kernels

if TYPE_CHECKING:
    import torch


def keep_embeddings(model: torch.nn.Module, *, bits: int) -> None:
    """Sets the width of the embedding tables' moments, for the optimizer that is made next."""
    import torch

    managers = _managers()
    managers._instance = None
    if bits == 8:
        return
    manager = managers.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": bits})


def embeddings_code(bits: int) -> tuple[str, ...]:
    """What `keep_embeddings` does, as lines for a script without snugfit; none for 8 bits."""
    if bits == 8:
        return ()
    return (
        "from bitsandbytes.optim import GlobalOptimManager",
        "",
        "manager = GlobalOptimManager.get_instance()",
        "for module in model.modules():",
        "    if isinstance(module, torch.nn.Embedding):",
        f'        manager.register_module_override(module, "weight", {{"optim_bits": {bits}}})',
    )


@contextlib.contextmanager
def shapes() -> Iterator[None]:
    """Within it, bitsandbytes has a manager of its own and its step waits for a `meta` device as for a
    GPU."""
    from unittest.mock import patch

    managers = _managers()
    from bitsandbytes.optim import optimizer

    with patch.object(managers, "_instance", None), patch.object(optimizer, "sync_gpu", _wait):
        yield


def _wait(tensor: torch.Tensor) -> None:
    """Waits for a tensor's device by reading one of its numbers, which is a wait that a trace counts."""
    tensor.detach().as_strided((), ()).item()


def _managers() -> Any:
    """bitsandbytes' manager class, which keeps its only object in `_instance`."""
    with no_hub_kernels():
        from bitsandbytes.optim import GlobalOptimManager

    assert hasattr(GlobalOptimManager, "_instance"), (
        "this version of bitsandbytes keeps its manager elsewhere"
    )
    return GlobalOptimManager
