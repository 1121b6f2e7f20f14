"""A run under one recipe: its model, optimizer and steps.

A change of recipe builds the run again, in the state after the last finished step. No tensor of a recipe
outlives its `ActiveRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import SnugfitError
from snugfit.step.applier import engine_of, loader_arguments
from snugfit.training.checkpoint.adapters import is_adapted
from snugfit.training.checkpoint.parts import state_parts
from snugfit.training.checkpoint.state import RunProgress, TrainState, snapshot
from snugfit.training.recovery import Exhausted
from snugfit.training.rng import all_rng_states, preserve_rng, rng_states, set_rng_states
from snugfit.training.run.loader import collate_for, feed
from snugfit.training.run.loop import StepRejected, StepResult, TrainingStep
from snugfit.training.run.opening import open_run

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.training.checkpoint.manager import CheckpointManager, Writable
    from snugfit.training.checkpoint.manifest import Checkpoint
    from snugfit.training.checkpoint.staging import Staging
    from snugfit.training.journal import Journal
    from snugfit.training.run.exchange import StepExchange
    from snugfit.training.run.run import Run
    from snugfit.training.run.spikes import Spikes
    from snugfit.training.step_logger import StepLogger


COMPARED = 16
"""Largest number of samples for which the gradients of micro-batches and whole batch are compared."""


@final
class ActiveRun:
    """The model, optimizer and steps of a run under one recipe, in the state of `checkpoint` or new.

    Up to the step `sync_to`, each update waits for a check of the gradients.
    """

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        checkpoint: Checkpoint | None,
        *,
        checkpoints: CheckpointManager,
        journal: Journal,
        logger: StepLogger,
        spikes: Spikes,
        exchange: StepExchange,
        sync_to: int,
    ) -> None:
        self._run, self._checkpoints, self._journal, self._spikes = run, checkpoints, journal, spikes
        self._logger, self._sync_to = logger, sync_to
        self.setup = run.setup(recipe)
        self.order = run.order(recipe.pieces)
        self.steps = run.steps(self.order)
        """Number of optimizer steps of the whole run."""
        self._engine = engine_of(self.setup)
        kind = TrainingStep if self._engine is None else self._engine.training_step
        self.step = kind(run.job, self.setup, run.device, exchange)
        self.step.rejects = lambda loss: spikes.reject(loss, self.progress)
        self._rng_at_step_start: tuple[torch.Tensor, ...] = ()
        self.state: TrainState = open_run(
            run, self.setup, self.steps, checkpoint, lambda text: journal.tell("note", text=text)
        )
        self.step.start_passes(self.state.model, self.state.runs or self.state.model)
        self.step.start_runner()
        self._is_sharded = state_parts().is_spread(self.state)
        self._is_ended = self._has_stepped = self._is_told = False
        checkpoints.is_update_checked = self._is_sharded  # only torch's AdamW and SGD are sharded
        checkpoints.about = run.about(recipe)
        checkpoints.saved_step = checkpoint.step if checkpoint else None
        if run.options.save_strategy != "no" and (run.ranks.is_first or self._is_sharded):
            checkpoints.prepare(self.state)

    def close(self) -> None:
        """Remove the hooks of DeepSpeed's engine and of the `StepRunner` from the model, and free the
        runner's memory.

        No step follows.
        """
        runner, self.step.runner = self.step.runner, None
        if runner is not None:
            runner.close()
        if self._engine is not None:
            self._engine.stop(self.state.runs)

    @property
    def progress(self) -> RunProgress:
        """The run's counts, such as finished steps, and its best metric."""
        return self.state.progress

    def first_samples(self) -> dict[str, torch.Tensor]:
        """Return a host batch (B, ...) of the first samples, without changing a random generator."""
        data = self._run.data
        with preserve_rng(self._run.device):
            samples = [data.samples[index] for index in range(min(COMPARED, len(data.samples)))]
            return collate_for(self._run.job, self.setup, data.collate)(samples)

    def batches(self) -> Generator[list[dict[str, torch.Tensor]]]:
        """Return the host micro-batches (B, ...) of each remaining step."""
        data = self._run.data
        loading = loader_arguments(self.setup, self._run.device)
        return feed(
            data.samples,
            self.order,
            collate_for(self._run.job, self.setup, data.collate),
            start_step=self.progress.step,
            stop_step=self.steps,
            workers=loading["num_workers"],
            pinned=loading["pin_memory"],
        )

    def take_step(
        self, micro_batches: list[dict[str, Any]], meanwhile: Callable[[], None]
    ) -> StepResult | Exhausted:
        """Take one training step. If the step is rejected, stop the run or skip the step, as the options
        require.
        """
        self._rng_at_step_start = rng_states(self._run.device)
        self.step.sync_before_update |= self.progress.step < self._sync_to
        if self._run.ranks.are_many:
            self.step.idle = [not indices for indices in self.order.step(self.progress.step)]
        try:
            result = self.step.attempt(self.state, micro_batches, meanwhile)
        except StepRejected as fault:
            # The previous step's line must come first in the journal.
            self._logger.write(self.step.norm)
            self._stop_or_skip(fault)
            self.step.norm = fault.norm
            self._count(False)
            return StepResult(loss=fault.loss, updated=False)
        self._has_stepped = True
        self._warn_of_runner()
        if isinstance(result, StepResult):
            self._count(result.updated)
            self._spikes.add_loss(result.loss, self.progress)
            self._checkpoints.check_first_update(lambda: self.state)
        return result

    def _warn_of_runner(self) -> None:
        """Write one warning with the reason if the `StepRunner` cannot replay the steps."""
        runner = self.step.runner
        if runner is not None and runner.why_not and not self._is_told:
            self._is_told = True
            self._journal.tell(
                "warning",
                text=(f"Steps run without CUDA graphs: {runner.why_not}. To record them, remove the cause."),
            )

    def _count(self, updated: bool) -> None:
        """Count a step, as skipped unless it `updated` the weights. Raises `SnugfitError` after too many
        steps in a row without an update.
        """
        try:
            self.progress.count(updated, most_skipped=self._run.options.most_skipped_in_a_row)
        except SnugfitError as fault:
            raise self._run.ranks.common_error(fault) from None

    def _stop_or_skip(self, fault: StepRejected) -> None:
        """Write the samples of a rejected step to a file. Raises `SnugfitError` unless the step may be
        skipped."""
        step = self.progress.step
        file = self._checkpoints.store.root
        if self._run.ranks.is_first:
            file = fault.write(file, step + 1, self.order.step_of_all(step))
        if getattr(self._run.options, fault.option) == "skip":
            self._journal.tell("warning", text=f"Step {step + 1}: {fault} It was skipped; see {file.name}.")
            return
        # A resumed run must repeat the rejected step with the same random numbers.
        self.rewind_rng()
        self.save()
        self._checkpoints.wait()
        text = (
            f"Step {step + 1}: {fault} The samples of its batch are in {file}. Inspect them, use a smaller "
            f"learning rate or another precision, or skip such steps: {fault.option}='skip'."
        )
        raise self._run.ranks.common_error(SnugfitError(text))

    def rewind_rng(self) -> None:
        """Restore the states of the random generators from before the last step."""
        set_rng_states(self._rng_at_step_start, self._run.device)

    def check_weights(self) -> None:
        """Check the weights before the last step's results are used. Raises `WeightsNonFinite`."""
        self.step.check_weights(self.state)
        self._logger.write(self.step.norm)

    def _keeps_whole(self) -> bool:
        """Return True if the checkpoint of this step must contain the whole model, even if its weights are
        sharded over processes.
        """
        return self._is_ended or self.progress.step == self.steps

    def save_end(self) -> None:
        """Save the checkpoint of the run's end, with the whole model even if its weights are sharded."""
        # Each checkpoint of adapters is whole.
        in_parts = self._is_sharded and not is_adapted(self.state.model)
        if in_parts and not self._keeps_whole() and self._has_stepped:
            self._is_ended, self._checkpoints.saved_step = True, None
        self.save()

    def save(self) -> None:
        """Save a checkpoint after the current step, unless this step has one."""
        if self._checkpoints.saved_step == self.progress.step:
            return
        self.check_weights()
        best = self.progress.best_step if self._run.options.load_best_model_at_end else None
        self._checkpoints.save(self.progress.step, self._snapshot, best=best)

    def _snapshot(self, staging: Staging) -> Writable | None:
        """Return this process's part of a copy of the run's state; None if another process
        saves all of it.
        """
        ranks = self._run.ranks
        random = ranks.gather(all_rng_states(self._run.device)) if ranks.are_many else []
        if self._is_sharded:
            is_last = self._keeps_whole()
            part: Writable = state_parts().snapshot(self.state, staging, random=random, is_last=is_last)
            return part
        return snapshot(self.state, staging, random=random) if ranks.is_first else None
