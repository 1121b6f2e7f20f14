"""AdamW of bitsandbytes: both moments in 8 bits, in blocks of 256 that share one scale.

State of a parameter of 4,096 elements or more: 2 bytes an element and 8 bytes a block, 2.03 in all against
AdamW's 8; smaller ones (biases, norms) keep two 32-bit moments. Two code books of 1 KiB are shared by all.
`embeddings=32` keeps the moments of embedding tables at 32 bits, because their gradients are sparse and
uneven and 8 bits make them unstable (Dettmers et al., section 2.3, who change the layer itself); the HF
Trainer does it for every `nn.Embedding`, and so does this technique unless told otherwise.

bitsandbytes holds such overrides in one global manager by the *position* of a parameter in its optimizer, and
never forgets them: an earlier model's would change a later one's states in the same process. So `prepare`
gives each run a manager of its own, and leaves the earlier one to the optimizers that hold it.

On shapes: bitsandbytes registers shape functions for both of its update kernels, and the rest of its step is
ordinary torch, so it runs on meta tensors unchanged and allocates the same tensors in the same order
(`tests/test_techniques.py` compares it with a real step). `shapes` only leaves the manager of the user's
process as it was, and waits for the device after each parameter: bitsandbytes itself does so on CUDA and XPU
only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.hub_kernels import no_hub_kernels
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Technique):
    """AdamW with both moments in 8 bits, block by block: a quarter of the state."""

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = ("bitsandbytes>=0.50",)
    extra: ClassVar = "bnb"
    source: ClassVar = "Dettmers et al., arXiv 2110.02861; bitsandbytes.optim.AdamW8bit"
    elsewhere: ClassVar = ("adamw_bnb_8bit", "adamw_bnb", "adam8bit", "adamw8bit", "adam_8bit")
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "adamw_bnb_8bit"}),
        Counterpart(arguments={"optim": "adamw_8bit"}),
    )

    embeddings: Literal[32, 8] = 32
    """Bits of the moments of embedding tables."""

    def install(self, setup: Setup) -> Setup:
        """Takes bitsandbytes' AdamW; the overrides for embeddings are set before it is made."""
        wish = OptimizerWish(
            factory=Call(path="bitsandbytes.optim:AdamW8bit"),
            prepare=Call(path=f"{__name__}:prepare", arguments={"embeddings": self.embeddings}),
            trainer_name="adamw_bnb_8bit" if self.embeddings == 32 else None,
            shapes=Call(path=f"{__name__}:shapes"),
        )
        return replace(setup, optimizer=wish)

    def code(self, job: Job) -> tuple[str, ...]:
        """bitsandbytes' override for each embedding table, as `prepare` asks for it."""
        if self.embeddings == 8:
            return ()
        return (
            "from bitsandbytes.optim import GlobalOptimManager",
            "",
            "manager = GlobalOptimManager.get_instance()",
            "for module in model.modules():",
            "    if isinstance(module, torch.nn.Embedding):",
            "        manager.register_module_override("
            f'module, "weight", {{"optim_bits": {self.embeddings}}})',
        )

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Embeddings in 32 bits, as the HF Trainer does it, and everything in 8 bits."""
        yield from (cls(), cls(embeddings=8))


def prepare(model: torch.nn.Module, *, embeddings: int) -> None:
    """Sets the width of the embedding tables' moments, for the optimizer that is made next."""
    import torch

    managers = _managers()
    managers._instance = None
    if embeddings == 8:
        return
    manager = managers.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": embeddings})


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
