"""Handler of the field `sharding`. DeepSpeed's engine runs the steps itself, so each training loop supports
all of it or none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import UsageError
from snugfit.features.distributed.engine.config import (
    BUILT_WITHIN,
    PROCESS_GROUP,
    engine_config,
    swap_folder,
    width_of,
)
from snugfit.features.distributed.fields import SHARDING, ShardingWish
from snugfit.features.distributed.techniques.deepspeed_zero import (
    AUTO,
    DISK,
    FROM_ARGUMENTS,
    PACKED_ELSEWHERE,
    refuse_training,
    zero_section,
)
from snugfit.features.distributed.techniques.several_gpus import is_quantized
from snugfit.step.wishes.handler import Handler, ScriptContext
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.several_gpus import job_of_rank
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Step, StepEngine
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup

EXPORT = "--export hf writes a script that trains so"


class ShardingHandler(Handler):
    """Handler of the field `sharding`: DeepSpeed's engine runs the steps. Each loop has its own Step for it
    (`step/open_step.py`)."""

    wish, slot, stage = SHARDING.name, Slot.SHARDING, InstallStage.STEP
    read_by_loops = True
    refused: ClassVar = {
        "fit": f"a live Trainer's engine is made from TrainingArguments(deepspeed=...); {EXPORT}",
        "custom_loop": f"an engine is made by accelerate's own launcher and plugin; {EXPORT}",
    }

    def import_code(self, value: ShardingWish) -> None:
        """Import DeepSpeed before a measurement starts. The import's output goes to stderr, since stdout is
        for results.
        """
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed
            import deepspeed.ops.adam  # noqa: F401

    def engine(self, value: ShardingWish) -> StepEngine:
        """Return the object through which the core calls DeepSpeed's engine."""
        return DeepSpeed(value)

    def refuse_training(self, value: ShardingWish, recipe: Recipe) -> None:
        """Raise `UsageError` for states on a disk, and for a version of DeepSpeed whose partitions no
        checkpoint supports."""
        refuse_training(value)

    def training_arguments(self, value: ShardingWish, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the Trainer's arguments with DeepSpeed's configuration, `auto` for the values that the
        Trainer computes."""
        bf16 = value.dtype == "bfloat16"
        config = {
            "zero_optimization": zero_section(value, dict.fromkeys(AUTO, "auto"), swap_folder(value)),
            "bf16": {"enabled": bf16},
            **dict.fromkeys(FROM_ARGUMENTS, "auto"),
        }
        return {"deepspeed": config, "bf16": bf16}

    def script(self, value: ShardingWish, context: ScriptContext) -> dict[str, Any]:
        """Return DeepSpeed's configuration for an exported script of its engine; the Trainer's arguments have
        it already. Raises `RecipeError` for other loops.
        """
        if is_quantized(context.recipe[Slot.ADAPTERS]):
            raise context.refusal(self.slot, PACKED_ELSEWHERE)
        if context.trainer:
            return {}
        if context.target != "deepspeed":
            raise context.refusal(
                self.slot, "the loop would be that of DeepSpeed's engine. --export hf or deepspeed writes it"
            )
        job = job_of_rank(context.job, context.setup)
        width = width_of(context.job.config_to_read())
        config = engine_config(
            context.setup, batch_size=job.batch_size, clip=job.clip, width=width, folder=DISK
        )
        return {"config": config}


class DeepSpeed:
    """Interface to DeepSpeed's engine, as the core calls it (`StepEngine`)."""

    def __init__(self, wish: ShardingWish) -> None:
        self._wish = wish

    def group_bytes(self, loop: str) -> int:
        """Return the GPU memory, in bytes by NVML, of the process group that DeepSpeed creates for one GPU; 0
        for several GPUs.
        """
        if self._wish.ranks > 1:
            return 0  # `Exchanges` predicts it
        within = self._wish.stage == 3 and loop != "plain"
        return BUILT_WITHIN if within else PROCESS_GROUP[self._wish.stage]

    @property
    def training_step(self) -> type[Any]:
        """Return the class of training steps with the engine."""
        from snugfit.features.distributed.engine.training_step import EngineTrainingStep

        return EngineTrainingStep

    def step_class(self, loop: str, ranks: int) -> type[Step]:
        """Return the class that runs steps with the engine in this training loop. Raises `UsageError` for the
        Trainer or accelerate on several GPUs.
        """
        if loop == "plain":
            from snugfit.features.distributed.engine.loop import EngineStep

            return EngineStep
        if ranks > 1:
            raise UsageError(
                f"The {loop} loop cannot do this: DeepSpeed's engine on several GPUs is predicted and "
                "measured in snugfit's own loop. Take --loop plain."
            )
        from snugfit.features.distributed.engine.frontends import EngineAccelerateStep, EngineTrainerStep

        return EngineTrainerStep if loop == "trainer" else EngineAccelerateStep

    def context(
        self, device: torch.device, tell: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context around a run with DeepSpeed's engine, in which a process group exists."""
        from snugfit.features.distributed.engine.loop import in_process_group

        return in_process_group(device, tell)

    def start(
        self, job: Job, setup: Setup, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Any, torch.optim.Optimizer]:
        """Return DeepSpeed's engine around model and optimizer, and an `EngineOptimizer` for it. `job` has
        the batch of one process.
        """
        from snugfit.features.distributed.engine.optimizer import start_engine

        return start_engine(job, setup, model, optimizer)

    def stop(self, runs: Any) -> None:
        """Remove the hooks of DeepSpeed's engine from the model."""
        runs.destroy()
