"""A run in this process: its steps, with evaluation, checkpoints and stops between them. See `train.py`."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from snugfit.errors import OutOfMemory, SnugfitError
from snugfit.job.batch import tokens_of
from snugfit.job.job import Job
from snugfit.step.applier import after_evaluation, evaluation_context
from snugfit.step.memory_errors import memory_cause
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks
from snugfit.training.checkpoint.manager import CheckpointManager
from snugfit.training.checkpoint.manifest import Checkpoint, verify
from snugfit.training.checkpoint.state import RunProgress, release_unused_memory
from snugfit.training.interrupt import EXIT_CODES, EvaluationStopped, StopSignals
from snugfit.training.journal import Journal
from snugfit.training.predicted import PredictRun
from snugfit.training.ranks import ToldElsewhere, is_broken_exchange
from snugfit.training.recovery import (
    STEP_BOUNDARY,
    WHAT_TO_TRY,
    Compare,
    Exhausted,
    Recovery,
    Replan,
    cut_warning,
    short_of_memory,
)
from snugfit.training.run.active_run import ActiveRun
from snugfit.training.run.evaluate import EvaluationResult, evaluate, in_order
from snugfit.training.run.exchange import StepExchange
from snugfit.training.run.loader import Prefetcher, report_worker_death
from snugfit.training.run.loop import StepResult, WeightsNonFinite
from snugfit.training.run.opening import not_built, open_run
from snugfit.training.run.run import Run
from snugfit.training.run.spikes import Spikes
from snugfit.training.run.trained import EARLY, FINISHED, STOPPED, LastCheckpointNotSaved, Trained
from snugfit.training.step_logger import StepLogger

MicroBatches = list[dict[str, Any]]

RESTART_ADVICE = "--restart starts from the beginning and renames the old checkpoints."


class Session:
    """Executes one training run in this process, also across changes of its recipe."""

    def __init__(
        self,
        run: Run,
        checkpoints: CheckpointManager,
        journal: Journal,
        stops: StopSignals,
        reports: Sequence[Any],
        *,
        replan: Replan,
        compare: Compare,
        predict: PredictRun,
    ) -> None:
        self._run, self._checkpoints, self._journal = run, checkpoints, journal
        self._stops, self._reports = stops, reports
        self._exchange = StepExchange(run.ranks, stops)
        every = run.options.logging_steps
        several = hooks("processes") if run.ranks.are_many else ()
        self._rank_watches = [code().watch(run.ranks, journal, every) for code in several]
        self._logger = StepLogger(journal, run.device, every=every, predict=predict)
        self._recovery, self._compare = Recovery(run.job, journal, replan), compare
        self._spikes = Spikes(run.options, journal)
        self._last: StepResult | None = None
        self._sync_to = self._taken = 0
        self._is_compared = False
        self._ran_out: Any = None
        # Once the time limit for stopping is over, a save that the run waits for is abandoned.
        checkpoints.is_too_late = lambda: stops.too_late

    def train(self, checkpoint: Checkpoint | None, ran_out: Any = None) -> Trained:
        """Train to the end of the run, from `checkpoint` or from the beginning.

        If lack of memory ended all processes of the previous start, `ran_out` is the record of it; else None.
        """
        run = self._run
        if ran_out is None:
            self._begin(run.recipe if checkpoint is None else run.recipe_after(checkpoint.about), checkpoint)
        else:
            self._open_after(ran_out, checkpoint)
        self._journal.tell(
            "started",
            job=run.job.model.name,
            recipe=str(self._recipe),
            steps=self._active.steps,
            samples=len(run.data.samples),
            resumed_from=checkpoint.step if checkpoint else None,
        )
        # The whole batch needs no comparison yet. `_recover` compares before it splits a batch.
        if self._active.order.micro_batches > 1:
            self._compare_cut()
        # A finished run that is resumed only returns its result, unless its last evaluation is missing.
        if checkpoint is not None and not self._progress.unevaluated and (outcome := self._outcome()):
            text = f"This run is {outcome}, so nothing is trained. Its result is returned. {RESTART_ADVICE}"
            self._journal.tell("note", text=text)
        try:
            with report_worker_death():
                return self._end(self._run_to_the_end())
        finally:
            self._checkpoints.wait()  # no thread may write here after the lock is released

    def _begin(self, recipe: Recipe, checkpoint: Checkpoint | None) -> None:
        """Build the run's model and optimizer under this recipe. Raises `OutOfMemory` if the model cannot
        even be built.
        """
        try:
            self._open(recipe, checkpoint)
        except (SnugfitError, RuntimeError, MemoryError) as fault:
            if is_broken_exchange(fault) or not (cause := memory_cause(fault)):
                raise
            raise not_built(self._run, recipe, cause) from fault

    def _open_after(self, ran_out: Any, checkpoint: Checkpoint | None) -> None:
        """Build model and optimizer again in all processes under another recipe, after memory ran out in one
        of them.
        """
        self._ran_out, ranks, before = ran_out, self._run.ranks, ran_out.recipe
        mixes = True
        while mixes:
            job = self._recovery.job
            chosen = ranks.first_answers(lambda: ran_out.next_recipe(self._run, self._recovery))
            self._open_smaller(chosen, checkpoint, ran_out.exhausted, ran_out.step)
            if self._active.order.micro_batches > before.pieces:
                self._compare_cut()
            mixes = ranks.first_answers(lambda: self._recovery.job is not job)  # noqa: B023 - called at once
            if mixes:
                self._close()
        resumed = checkpoint.step if checkpoint else 0
        self._recovery.record_change(
            ran_out.exhausted, before, chosen, ran_out.step, rank=ran_out.rank, resumed_from=resumed
        )

    def _compare_cut(self) -> None:
        """Compare the gradients of a few samples, in one batch and in micro-batches. This runs once, before
        the first recipe with micro-batches.
        """
        if self._is_compared or self._active.step.passes is not None:  # a pipeline stage has no loss
            return
        self._is_compared = True
        before = self._recovery.job
        self._recovery.job = after = self._compare_pieces(before)
        for warning in cut_warning(after, self._recipe) if after is not before else ():
            self._journal.warn_once(warning["text"])

    def _compare_pieces(self, job: Job) -> Job:
        active = self._active
        samples = active.first_samples()
        after = self._compare(job, active.step, active.state.model, samples, self._taken > 0)
        # The comparison ran passes outside of a training step, so handlers clean up as after an evaluation.
        after_evaluation(active.setup, active.state.model)
        return after

    def _cuts_alone(self) -> bool:
        """Return True if this process may change its number of micro-batches alone, because no other process
        waits for it.
        """
        active = self._active
        return active.order.micro_batches > 1 and active.step.passes is None and not self._run.ranks.are_many

    def _run_to_the_end(self) -> str:
        while True:
            wrong = False
            try:
                ended = self._take_steps()
                if not isinstance(ended, Exhausted):
                    return ended
                self._recover(ended)
            except WeightsNonFinite:
                wrong = True
            if wrong:  # outside of `except`, because a traceback would keep memory alive
                self._replay()

    def _replay(self) -> None:
        """After NaN gradients were found too late, restore the last correct state and repeat the steps since
        then.

        The step with those gradients then stops before its update.
        """
        step = self._progress.step
        # The newest checkpoint may still be being written.
        self._checkpoints.wait()
        checkpoint = self._run.ranks.first_answers(self._checkpoints.newest)
        begin = checkpoint.step if checkpoint else 0
        text = f"Step {step}: a gradient was not a number. The run goes back to step {begin}."
        self._journal.tell("warning", text=text)
        # Up to this step, each update waits for its gradients, so that the wrong step is rejected before its
        # update.
        self._sync_to = step
        # The old model is freed before the new one is built, because memory may not suffice for both.
        self._close()
        self._open(self._recipe, checkpoint)

    def _close(self) -> None:
        self._active.close()
        del self._active
        release_unused_memory(self._run.device)

    def _open(self, recipe: Recipe, checkpoint: Checkpoint | None) -> None:
        run, self._recipe = self._run, recipe
        self._logger.restart(run.job, recipe)
        self._active = ActiveRun(
            run,
            recipe,
            checkpoint,
            checkpoints=self._checkpoints,
            journal=self._journal,
            logger=self._logger,
            spikes=self._spikes,
            exchange=self._exchange,
            sync_to=self._sync_to,
        )
        if run.ranks.are_many:
            self._logger.ignore_retries()  # a single process cannot change the recipe
        else:
            self._logger.watch_retries()
        for report in self._reports:
            report.open(self._active.state.model, self._progress.step, self._active.steps)

    @property
    def _progress(self) -> RunProgress:
        return self._active.progress

    def _take_steps(self) -> str | Exhausted:
        """Take training steps until the run ends, stops, or lacks memory; return its outcome or the memory
        record.
        """
        active = self._active
        # An evaluation that a signal interrupted is repeated first.
        if outcome := self._at_boundary() if self._progress.unevaluated else self._outcome():
            return outcome
        with contextlib.closing(active.batches()) as batches:
            prefetcher = Prefetcher(functools.partial(next, batches, None))
            # The seconds of a step include loading, so the clock starts before the batch is fetched.
            began = time.perf_counter()
            while (micro_batches := self._next(prefetcher)) is not None:
                # The scheduler changes the learning rate within the step, so it is read before.
                rate = active.state.scheduler.get_last_lr()[0]
                result = active.take_step(micro_batches, lambda: self._meanwhile(prefetcher))
                if isinstance(result, Exhausted):
                    return result
                self._last = result
                # Loading data delays a step only if the device has finished its work meanwhile.
                stalled = 0.0 if active.step.device_was_busy else prefetcher.fetching_seconds
                for watch in self._rank_watches:
                    watch.note(self._progress.step, self._exchange.own_seconds + stalled)
                self._note(result, micro_batches, rate, time.perf_counter() - began, stalled)
                self._taken += 1
                if self._cuts_alone():
                    self._recovery.compare_again(self._recipe, self._taken, self._compare_pieces)
                if outcome := self._at_boundary():
                    return outcome
                if self._logger.is_thrashing():
                    return short_of_memory()
                began = time.perf_counter()
        return FINISHED

    def _note(
        self,
        result: StepResult,
        micro_batches: MicroBatches,
        learning_rate: float,
        seconds: float,
        stall_seconds: float,
    ) -> None:
        step, order = self._progress.step, self._active.order
        self._logger.note(
            step=step,
            epoch=step / order.steps_per_epoch,
            loss=result.loss,
            learning_rate=learning_rate,
            updated=result.updated,
            seconds=seconds,
            stall_seconds=stall_seconds,
            samples=len(order.batch(step - 1)),
            tokens=self._exchange.tokens if self._run.ranks.are_many else sum(map(tokens_of, micro_batches)),
        )
        # If the host has not read the norm yet, `_meanwhile` writes this entry in the next step.
        if not self._active.step.unread:
            self._logger.write(self._active.step.norm)

    def _next(self, prefetcher: Prefetcher[MicroBatches | None]) -> MicroBatches | None:
        """Return the next step's micro-batches from the loader. If loading fails, save a checkpoint first."""
        try:
            return prefetcher.take()
        except Exception:
            # Saving needs all processes, but the others are not at this point.
            keeps = self._run.options.save_strategy != "no" and not self._run.ranks.are_many
            if self._progress.step and keeps:
                self._active.save()
            raise

    def _meanwhile(self, prefetcher: Prefetcher[MicroBatches | None]) -> None:
        """While the device runs the backward pass, write the previous step to the journal and fetch the next
        batch.
        """
        self._logger.write(self._active.step.norm)
        prefetcher.fetch()

    def _at_boundary(self) -> str | None:
        """Evaluate, save and stop between two steps; return the outcome of the run if it ends here, else
        None.

        An evaluation that a signal abandons is repeated when the run is resumed.
        """
        options, better = self._run.options, False
        # A resumed run comes here first if this flag is set, and repeats the evaluation below.
        self._progress.unevaluated = False
        if self._is_due(options.eval_strategy, options.eval_steps or options.logging_steps):
            try:
                better = self._run.evaluation is not None and self._evaluate()
            except EvaluationStopped:
                self._progress.unevaluated = True
        wants_save = self._stops.wants_checkpoint()
        due = self._is_due(options.save_strategy, options.save_steps)
        # The best weights must be saved now, because later steps change them.
        if wants_save or due or (better and options.load_best_model_at_end):
            self._active.save()
        outcome = self._outcome()
        # A run must not return weights with NaN as its result.
        if outcome:
            self._active.check_weights()
        return outcome

    def _outcome(self) -> str | None:
        if self._stops.stopping is not None:
            return STOPPED
        patience = self._run.options.early_stopping_patience
        if patience is not None and self._progress.evaluations_without_gain >= patience:
            return EARLY
        return FINISHED if self._progress.step == self._active.steps else None

    def _is_due(self, strategy: str, every: int) -> bool:
        active = self._active
        return is_due(strategy, every, self._progress.step, active.steps, active.order.steps_per_epoch)

    def _evaluate(self) -> bool:
        """Evaluate the model on the evaluation data; return True if the result is the best so far."""
        assert self._run.evaluation is not None
        self._active.check_weights()
        options, progress = self._run.options, self._progress
        ranks = self._run.ranks
        # An evaluation uses the micro-batch size of the training by default, since it fits into memory.
        micro_batch = self._active.setup.per_piece(self._run.job.batch_size // ranks.data_ranks)
        passes = self._active.step.passes
        try:
            evaluated = evaluate(
                self._active.state.model if passes is None else passes.in_turn(),
                self._run.job,
                in_order(
                    self._run.evaluation,
                    options.per_device_eval_batch_size or micro_batch,
                    self._run.job,
                    self._active.setup,
                    self._run.device,
                    ranks,
                ),
                self._run.device,
                self._active.step.forward_context(),
                self._stops.raise_if_stopping,
                ranks,
                functools.partial(evaluation_context, self._active.setup, self._active.state.model),
            )
        # Handlers must clean up the model after an interrupted evaluation too.
        finally:
            after_evaluation(self._active.setup, self._active.state.model)
        progress.evaluated = asdict(evaluated)
        self._journal.tell("evaluated", step=progress.step, loss=evaluated.loss, accuracy=evaluated.accuracy)
        return progress.record_metric(
            evaluated.metric(options.metric_for_best_model),
            higher_is_better=options.metric_for_best_model == "accuracy",
            threshold=options.early_stopping_threshold,
        )

    def _recover(self, exhausted: Exhausted) -> None:
        """Repeat the step under another recipe of the same global batch, after memory ran out.

        If memory is only short (the allocator retries in each step), the next step uses such a recipe, if
        there is one.
        """
        before, step = self._recipe, self._progress.step
        if self._run.ranks.are_many:
            raise (
                hooks("processes")[0]()
                .restarts()
                .end_of_several(self._run, exhausted, before, step, self._ran_out)
            )
        # After a failed update, the run restarts from a checkpoint, so only other phases check the weights.
        if exhausted.phase != "update":
            self._active.check_weights()
        # The next recipe may split the batch, so gradients are compared before it is chosen.
        self._compare_cut()
        chosen = self._recovery.next_recipe(exhausted, before, step)
        if chosen is None:
            self._logger.ignore_retries()
            return
        checkpoint = self._resumable_checkpoint(exhausted.phase)
        if exhausted.phase == STEP_BOUNDARY and (checkpoint is None or checkpoint.step != step):
            self._logger.ignore_retries()  # the save failed with a warning; going back costs more
            return
        self._close()
        self._recovery.record_change(exhausted, before, chosen, step + 1)
        self._open_smaller(chosen, checkpoint, exhausted, step + 1)

    def _open_smaller(
        self, recipe: Recipe, checkpoint: Checkpoint | None, exhausted: Exhausted, step: int
    ) -> None:
        try:
            self._open(recipe, checkpoint)
        except ToldElsewhere:
            raise
        except (SnugfitError, RuntimeError, MemoryError) as fault:
            if is_broken_exchange(fault):
                raise
            text = f"Memory ran out in step {step} ({exhausted.cause}). '{recipe}' could not be started:"
            raise OutOfMemory(f"{text} {fault} {WHAT_TO_TRY}") from fault

    def _resumable_checkpoint(self, phase: str) -> Checkpoint | None:
        """Return a checkpoint of the current step to continue from, if no weight has changed since then.

        If the update itself failed, return the last one, or None for the beginning.
        """
        if phase == STEP_BOUNDARY:
            self._active.save()
        elif phase != "update" and self._progress.step:
            # The failed step has drawn random numbers, and its repetition must draw the same ones.
            self._active.rewind_rng()
            self._active.save()
        return self._checkpoints.newest()

    def _end(self, outcome: str) -> Trained:
        """Save a checkpoint at the end of the run, and return the run's result."""
        options, progress = self._run.options, self._progress
        signal = self._stops.stopping
        if outcome == STOPPED:
            # A single long step may exceed the time limit, so the last save gets a new limit.
            self._stops.begin_last_save()
        if outcome == STOPPED:
            self._active.save()
        elif options.save_strategy != "no":
            self._active.save_end()
        self._checkpoints.wait()
        self._logger.end(outcome, progress.step)
        for report in self._reports:
            report.end(self._active.state.model)
        model, root = self._active.state.model, self._checkpoints.store.root
        best_step = progress.best_step
        self._active.close()
        if options.load_best_model_at_end and best_step is not None and best_step != progress.step:
            folder, step = root / f"checkpoint-{best_step}", best_step
            best = self._run.ranks.first_answers(lambda: verify(folder, step))
            model = open_run(self._run, self._active.setup, self._active.steps, best).model
        trained = Trained(
            outcome=outcome,
            exit_code=EXIT_CODES[signal] if outcome == STOPPED and signal else 0,
            step=progress.step,
            recipe=self._recipe,
            loss=self._last.loss if self._last else progress.losses[-1] if progress.losses else math.nan,
            evaluated=EvaluationResult(**progress.evaluated) if progress.evaluated else None,
            folder=root,
            model=model,
        )
        if outcome != STOPPED and (failure := self._checkpoints.failure) is not None:
            raise LastCheckpointNotSaved(failure, trained)
        return trained


# ---- boundaries -------------------------------------------------------------------------------------------


def is_due(strategy: str, every: int, step: int, steps: int, steps_per_epoch: int) -> bool:
    """Return True if `strategy` requires an evaluation or a checkpoint after `step`, of a run of `steps`
    steps.

    The run's end is included by each strategy but `no`.
    """
    if strategy == "no":
        return False
    return step == steps or step % (steps_per_epoch if strategy == "epoch" else every) == 0
