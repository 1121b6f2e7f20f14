"""Selection of a training loop by its name. The libraries of the loop are imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.errors import UsageError, did_you_mean
from snugfit.step.applier import engine_of, refuse_unsupported
from snugfit.step.step import LOOPS
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Step
    from snugfit.techniques.setup import Setup


def open_step(job: Job, setup: Setup, loop: str, device: torch.device, *, keep_losses: bool = False) -> Step:
    """Return the `Step` that will build the model and run steps in this training loop. Raises `UsageError`
    for an unknown loop, and for fields of the Setup that the loop cannot implement.
    """
    if loop in LOOPS:
        refuse_unsupported(loop, setup)
    if loop in LOOPS and (added := job.added_phase) is not None:
        step: Step = added.step_class(loop)(job, setup, device, keep_losses=keep_losses)
        return step
    if loop in LOOPS and (engine := engine_of(setup)) is not None:
        return engine.step_class(loop, ranks_of(setup))(job, setup, device, keep_losses=keep_losses)
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
