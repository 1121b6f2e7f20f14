"""Handlers that apply the fields `fused`, `liger` and `logits` to a model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.kernels.fields import FUSED, LIGER
from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.features.kernels.fields import FusedWish, LigerWish
    from snugfit.step.wishes.handler import Context, LiveTraining, ScriptContext
    from snugfit.techniques.setup import LogitsWish


class KernelsHandler(Handler):
    """Base class of handlers that replace torch's kernels in a model's modules."""

    slot, stage = Slot.KERNELS, InstallStage.REPLACE
    change_words = "kernels are those of"


class FusedHandler(KernelsHandler):
    """Handler of the field `fused`: it replaces code by snugfit's kernels, which are plain torch on a CPU."""

    wish = FUSED.name
    refused: ClassVar[Mapping[str, str]] = {"script": "its kernels are snugfit's own code"}

    def import_code(self, value: FusedWish) -> None:
        """Import snugfit's kernels before a measurement or a simulation begins."""
        import snugfit.features.kernels.fused_model  # noqa: F401

    def wrap(self, value: FusedWish, model: Any) -> None:
        """Replace forward passes of the model's modules by snugfit's kernels."""
        from snugfit.features.kernels.fused_model import use_fused

        use_fused(model, value.recomputed_mlps, value.mlp_tokens)

    def undo(self, live: LiveTraining) -> None:
        """Remove snugfit's kernels from a model in training."""
        from snugfit.features.kernels.fused_model import remove_fused

        remove_fused(live.model)

    def around_rehearsal(self, value: FusedWish, *, on_gpu: bool) -> Context | None:
        """Return a context in which a simulation for a CPU runs plain torch in place of Triton kernels; None
        for a GPU.
        """
        from snugfit.features.kernels.operations.shapes_on_cpu import shapes_on_cpu

        # On a CPU the operations are plain torch, whose operators a simulation must record.
        return None if on_gpu else shapes_on_cpu


class LigerHandler(KernelsHandler):
    """Handler of the field `liger`: it replaces code by Liger's kernels, which run on GPUs only."""

    wish = LIGER.name

    def import_code(self, value: LigerWish) -> None:
        """Import Liger and Triton before a simulation or a measurement starts."""
        from snugfit.features.kernels.liger_model import import_code

        import_code()

    def set_process(self, value: LigerWish, device: torch.device) -> None:
        """Raise `RecipeError` for a device without a Triton compiler, before the model is built."""
        from snugfit.features.kernels.liger_model import refuse_without_triton

        refuse_without_triton(device)

    def wrap(self, value: LigerWish, model: Any) -> None:
        """Replace code of the model's modules by Liger's kernels."""
        from snugfit.features.kernels.liger_model import use_liger

        use_liger(model, **value.parts)

    def script(self, value: LigerWish, context: ScriptContext) -> dict[str, Any]:
        """Return the Python lines of an exported script that call Liger's function. The Trainer needs none,
        because an argument makes it call the function.
        """
        # The Trainer applies Liger by one of its own arguments.
        if context.trainer:
            return {}
        options = "".join(f", {name}={given}" for name, given in value.parts.items())
        return {
            "kernels": (
                "from liger_kernel.transformers import _apply_liger_kernel_to_instance",
                "",
                f"_apply_liger_kernel_to_instance(model=model{options})",
            )
        }


class LogitsHandler(Handler):
    """Handler of the field `logits`: logits are computed in chunks, and never all at once."""

    wish, slot, stage = "logits", Slot.HEAD, InstallStage.HEAD
    refused: ClassVar[Mapping[str, str]] = {
        "script": "snugfit does it with its own code, which a script without snugfit does not have"
    }
    change_words = "logits are those of"

    def wrap(self, value: LogitsWish, model: Any) -> None:
        """Make the model's head return deferred logits, which are computed in chunks with the loss."""
        from snugfit.features.kernels.head.deferred_logits import defer_logits

        defer_logits(model, value)

    def undo(self, live: LiveTraining) -> None:
        """Make the head of a model in training return plain logits."""
        from snugfit.features.kernels.head.deferred_logits import defer_logits

        defer_logits(live.model, None)
