"""Timing of the steps of a Trainer under `fit`, and of their waits for data.

A step starts when the Trainer requests its micro-batches, and ends before the Trainer logs, evaluates and
saves. Most micro-batches are loaded during the previous step (`loader.py`). A step has waited for data if the
device was idle when the next micro-batches were loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

from snugfit.features.loops.trainer.setup import brings_optimizer
from snugfit.frontends.predicted import run_predictor
from snugfit.job.batch import token_count
from snugfit.job.batch_layout import BatchDims
from snugfit.training.predicted import RunAnswer, predict_nothing
from snugfit.training.rng import preserve_rng
from snugfit.training.run.items import samples_in
from snugfit.training.step_logger import StepLogger

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.journal import Journal


def logger_for(trainer: Any, journal: Journal) -> StepLogger:
    """Return the `StepLogger` of one `train()` call. It has no predicted step time for DDP or FSDP2 with a
    user's own model.
    """
    device = trainer.args.device
    unknown = brings_optimizer(trainer) or trainer.args.world_size > 1
    predict = predict_nothing if unknown else run_predictor(device)

    def predict_run(job: Job, recipe: Recipe) -> RunAnswer | Future[RunAnswer]:
        # Starting a prediction must not advance the random generators of the training.
        with preserve_rng(device):
            return predict(job, recipe)

    every = round(trainer.args.logging_steps)  # a value below 1 is a share of all steps
    logger = StepLogger(journal, device, every=max(1, every), predict=predict_run)
    logger.restart(trainer.snugfit.job, trainer.snugfit.recipe)
    logger.watch_retries()
    return logger


@final
class StepTimer:
    """Measures the seconds of each training step."""

    def __init__(self, device: torch.device, processes: int = 1) -> None:
        import torch

        self._launched = torch.cuda.Event() if device.type == "cuda" else None
        self._began = self._stalled = 0.0
        self._samples, self._processes = 0, processes
        self.tokens: torch.Tensor | int = 0
        """Number of tokens in the step, as a scalar on the batch's device. The host reads it together with
        the loss (`boundary.py`).
        """
        self._unwritten = False

    def begin(self) -> None:
        """Start the clock of a step, when the Trainer requests its micro-batches."""
        self._began, self._stalled = time.perf_counter(), 0.0

    def record_launched(self) -> None:
        """Record the time at which all of a step's kernels before its update are launched."""
        if self._launched is not None:
            self._launched.record()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Context whose duration counts as time for loading micro-batches."""
        began = time.perf_counter()
        yield
        # Fetching a batch delays nothing while the device is still computing.
        if self._launched is None or self._launched.query():
            self._stalled += time.perf_counter() - began

    def count(self, batches: list[Any], dims: BatchDims | None) -> None:
        """Count the samples and tokens of the step's micro-batches. `dims` names the dimensions of their
        samples.
        """
        self._samples = self._processes * sum(samples_in(batch, dims) for batch in batches)
        self.tokens = sum(token_count(batch) for batch in batches)
        self._unwritten = bool(batches)

    def write(self, trainer: Any, logger: StepLogger, step: StepState, learning_rate: float | None) -> bool:
        """Write the finished step to the training log. Return False if there is nothing to write."""
        if not self._unwritten or step.figures is None or step.pending_micro_batches:
            return False
        self._unwritten = False
        logger.note(
            step=trainer.state.global_step,
            epoch=trainer.state.epoch,
            loss=step.figures.loss,
            learning_rate=learning_rate,
            updated=not trainer.accelerator.optimizer_step_was_skipped,
            seconds=time.perf_counter() - self._began,
            stall_seconds=self._stalled,
            samples=self._samples,
            tokens=step.figures.tokens,
        )
        logger.write(step.figures.norm)
        return True


# ---- state of a step --------------------------------------------------------------------------------------


class StepFigures(NamedTuple):
    """Loss, gradient norm and number of tokens of one step, read from the device before its update."""

    loss: float
    norm: float
    tokens: int


@dataclass(kw_only=True)
class StepState:
    """The state of one optimizer step: its micro-batches, losses and gradient norm."""

    batches: list[Any] = field(default_factory=list)
    """The step's micro-batches, as the loader yields them."""

    micro_batch_index: int = 0
    """Number of micro-batches of this step that have started."""

    item_counts: list[int] = field(default_factory=list)
    """Number of items in each micro-batch, once counted."""

    shares: torch.Tensor | None = None
    """Weight of each micro-batch in the loss, (n,) on the device, if several processes share one batch."""

    share: float | torch.Tensor | None = None
    """Weight of the current micro-batch's loss in the step's loss; None in an evaluation."""

    loss_sum: torch.Tensor | None = None
    """Sum of the weighted losses of the micro-batches so far, a scalar on the device."""

    pending_micro_batches: int = 0
    """Number of micro-batches that have started since the last update; 0 between steps."""

    rng_at_step_start: tuple[torch.Tensor, ...] = ()
    """States of the random generators that forward passes use, at the start of the step."""

    logged_loss_at_start: torch.Tensor | None = None
    """Sum of the Trainer's losses since its last log, at the start of the step, a scalar on the device."""

    figures: StepFigures | None = None
    """Loss, gradient norm and number of tokens of the step; None before the end of its last micro-batch."""

    def following(self, batches: list[Any]) -> StepState:
        """Return the state for the next step, which trains on the given micro-batches."""
        return StepState(
            batches=batches,
            pending_micro_batches=self.pending_micro_batches,
            logged_loss_at_start=self.logged_loss_at_start,
        )
