"""The wish for DeepSpeed's engine: it runs the steps itself, so each front-end honours it whole or not."""

from __future__ import annotations

from typing import Any, ClassVar

from snugfit.step.wishes.handler import Handler, ScriptContext
from snugfit.techniques.setup import ShardingWish
from snugfit.techniques.technique import Slot

EXPORT = "--export hf writes a script that trains so"


class ShardingHandler(Handler):
    """Whose engine runs the steps. The plain loop opens another Step for it (`step/open_step.py`)."""

    wish, slot = "sharding", Slot.SHARDING
    read_by_loops = True
    refused: ClassVar = {
        "accelerate": "its bytes are predicted by the plain loop, which makes the engine as accelerate does",
        "trainer": "its bytes are predicted by the plain loop, which makes the engine as accelerate does",
        "fit": f"a live Trainer's engine is made from TrainingArguments(deepspeed=...); {EXPORT}",
        "custom_loop": f"an engine is made by accelerate's own launcher and plugin; {EXPORT}",
    }

    def import_code(self, value: ShardingWish | None) -> None:
        """DeepSpeed, before anything is watched."""
        if value is not None:
            import deepspeed
            import deepspeed.ops.adam  # noqa: F401

    def script(self, value: ShardingWish | None, context: ScriptContext) -> dict[str, Any]:
        """Nothing in the Trainer's script, whose arguments say it; a loop of one's own cannot."""
        if value is not None and not context.trainer:
            raise context.refusal(
                self.slot, "the script's own loop would be DeepSpeed's engine's. --export hf writes it"
            )
        return {}
