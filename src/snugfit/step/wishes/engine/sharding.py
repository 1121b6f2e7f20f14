"""The wish for DeepSpeed's engine: it runs the steps itself, so each front-end honours it whole or not."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.step.wishes.engine.config import swap_folder
from snugfit.step.wishes.handler import Handler, ScriptContext
from snugfit.techniques.deepspeed_zero import AUTO, FROM_ARGUMENTS, zero_section
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.setup import ShardingWish
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

EXPORT = "--export hf writes a script that trains so"


class ShardingHandler(Handler):
    """DeepSpeed's engine for the steps. Each loop has another Step for it (`step/open_step.py`)."""

    wish, slot, stage = "sharding", Slot.SHARDING, InstallStage.STEP
    read_by_loops = True
    refused: ClassVar = {
        "fit": f"a live Trainer's engine is made from TrainingArguments(deepspeed=...); {EXPORT}",
        "custom_loop": f"an engine is made by accelerate's own launcher and plugin; {EXPORT}",
    }

    def import_code(self, value: ShardingWish | None) -> None:
        """Import DeepSpeed before any measurement. Its output goes to stderr, since stdout is for results."""
        if value is not None:
            with contextlib.redirect_stdout(sys.stderr):
                import deepspeed
                import deepspeed.ops.adam  # noqa: F401

    def training_arguments(
        self, value: ShardingWish | None, job: Job, device: torch.device
    ) -> dict[str, Any]:
        """Return the configuration, with `auto` for the values that the Trainer computes; `bf16` is equal in
        both.
        """
        if value is None:
            return {}
        bf16 = value.dtype == "bfloat16"
        config = {
            "zero_optimization": zero_section(value, dict.fromkeys(AUTO, "auto"), swap_folder(value)),
            "bf16": {"enabled": bf16},
            **dict.fromkeys(FROM_ARGUMENTS, "auto"),
        }
        return {"deepspeed": config, "bf16": bf16}

    def script(self, value: ShardingWish | None, context: ScriptContext) -> dict[str, Any]:
        """Return no fields for the Trainer's script, whose arguments have the engine, nor for the engine's
        own script. Raises `RecipeError` for other loops.
        """
        if value is None and context.target == "deepspeed":
            raise context.refusal(self.slot, "its steps are not those of DeepSpeed's engine")
        if value is not None and not context.trainer and context.target != "deepspeed":
            raise context.refusal(
                self.slot, "the loop would be that of DeepSpeed's engine. --export hf or deepspeed writes it"
            )
        return {}
