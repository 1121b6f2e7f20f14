"""Map a loop's name to its Step, and import each loop's libraries on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.errors import UsageError, did_you_mean
from snugfit.step.applier import refuse_unsupported
from snugfit.step.step import LOOPS

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Step
    from snugfit.techniques.setup import Setup


def open_step(job: Job, setup: Setup, loop: str, device: torch.device, *, keep_losses: bool = False) -> Step:
    """Return the Step of this loop, not yet built. Raises `UsageError` for an unknown loop, and for wishes
    that the loop cannot implement.
    """
    if loop in LOOPS:
        refuse_unsupported(loop, setup)
    if loop in LOOPS and setup.sharding is not None:
        return _engine_step(loop, setup.sharding.ranks)(job, setup, device, keep_losses=keep_losses)
    if loop == "plain":
        from snugfit.step.plain_loop import PlainStep

        return PlainStep(job, setup, device, keep_losses=keep_losses)
    if loop == "accelerate":
        from snugfit.step.accelerate_loop import AccelerateStep

        return AccelerateStep(job, setup, device, keep_losses=keep_losses)
    if loop == "trainer":
        from snugfit.step.trainer_loop import TrainerStep

        return TrainerStep(job, setup, device, keep_losses=keep_losses)
    raise UsageError(f"Unknown loop {loop!r}.{did_you_mean(loop, LOOPS)} Loops: {', '.join(LOOPS)}.")


def _engine_step(loop: str, ranks: int) -> type[Step]:
    """Return the loop's Step whose engine is DeepSpeed's."""
    if loop != "plain" and ranks > 1:
        raise UsageError(
            f"The {loop} loop cannot do this: DeepSpeed's engine on several GPUs is predicted and "
            "measured in snugfit's own loop. Leave --loop out."
        )
    if loop == "plain":
        from snugfit.step.wishes.engine.loop import EngineStep

        return EngineStep
    from snugfit.step.wishes.engine.frontends import EngineAccelerateStep, EngineTrainerStep

    return EngineTrainerStep if loop == "trainer" else EngineAccelerateStep
