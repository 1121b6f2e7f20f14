"""A run in this process: its steps, and what happens on the borders between them. See `train.py`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.errors import OutOfMemory, SnugfitError
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.training.evaluate import Evaluated, evaluate, in_order
from snugfit.training.generators import generators, set_generators
from snugfit.training.interrupt import EXIT_CODES, Interrupts
from snugfit.training.journal import Journal
from snugfit.training.loop import Exhausted, NonFinite, Poisoned, Taken, TrainingStep
from snugfit.training.manifest import Checkpoint, verify
from snugfit.training.opening import open_run
from snugfit.training.order import Ahead, feed
from snugfit.training.pace import Pace
from snugfit.training.run import Run
from snugfit.training.saver import Saver
from snugfit.training.staging import Staging
from snugfit.training.state import Progress, Running, bytes_of, free_unused, snapshot
from snugfit.training.step_events import StepEvents
from snugfit.training.store import Store
from snugfit.training.trained import EARLY, FINISHED, STOPPED, Trained

if TYPE_CHECKING:
    import torch

Replan = Callable[[Job, Recipe, str], Recipe | None]
"""A job, the recipe that ran out of memory and the cause: the recipe to go on with, or None."""


class Session:
    """One run in this process."""

    def __init__(
        self, run: Run, store: Store, journal: Journal, interrupts: Interrupts, replan: Replan
    ) -> None:
        self._run, self._store, self._journal = run, store, journal
        self._interrupts, self._replan = interrupts, replan
        self._recipe = run.recipe
        self._kept_step: int | None = None
        self._last: Taken | None = None
        self._pace = Pace(run.device, every=run.options.logging_steps)
        self._events = StepEvents(journal, self._pace)
        self._evaluated: Evaluated | None = None
        self._careful_to = 0
        self._generators: tuple[torch.Tensor, ...] = ()

    def train(self, kept: Checkpoint | None) -> Trained:
        """To the end, from where `kept` was taken or from the beginning."""
        if kept is not None:
            self._recipe = Recipe.parse(kept.about["recipe"])
        self._open(kept)
        run = self._run
        self._journal.tell(
            "started",
            job=run.job.model.name,
            recipe=str(self._recipe),
            steps=self._steps,
            samples=len(run.data.samples),
            resumed_from=kept.step if kept else None,
        )
        try:
            return self._end(self._to_the_end())
        finally:
            self._saver.wait()  # nobody writes here once the folder is given back

    def _to_the_end(self) -> str:
        while self._progress.step < self._steps:
            try:
                ended = self._go_on()
                if not isinstance(ended, Exhausted):
                    return ended
                self._recover(ended)
            except Poisoned:
                self._replay()
        return FINISHED

    def _replay(self) -> None:
        """Back to where the weights were right, and again up to the step that made them wrong, which then
        stops before its update."""
        step = self._progress.step
        self._events.forget()
        self._saver.wait()
        kept = self._store.newest()
        text = f"Step {step}: a gradient was no number. The run goes back to step {kept.step if kept else 0}."
        self._journal.tell("warning", text=text)
        self._careful_to = step
        del self._running
        free_unused(self._run.device)
        self._open(kept)

    def _open(self, kept: Checkpoint | None) -> None:
        run, setup = self._run, self._recipe.setup()
        self._order = run.order(setup.micro_batches)
        self._steps = run.steps(self._order)
        self._setup = setup
        self._step = TrainingStep(run.job, setup, run.device)
        self._running: Running = open_run(run, setup, self._steps, kept)
        self._staging = Staging(run.device)
        if run.options.save_strategy != "no":
            self._staging.prepare(bytes_of(self._running))
        self._kept_step = kept.step if kept else None
        about = run.about(self._recipe)
        self._saver = Saver(self._store, about, self._journal, limit=run.options.save_total_limit)

    @property
    def _progress(self) -> Progress:
        return self._running.progress

    def _go_on(self) -> str | Exhausted:
        """Step after step, until the run's end, a stop, or the end of memory."""
        run, loader = self._run, self._setup.loader
        batches = feed(
            run.data.samples,
            self._order,
            run.data.collate,
            start_step=self._progress.step,
            stop_step=self._steps,
            workers=loader.workers,
            pinned=loader.pinned and run.device.type == "cuda",
        )
        with contextlib.closing(batches):
            ahead = Ahead(batches)
            began = time.perf_counter()
            while (pieces := ahead.take()) is not None:
                rate = self._running.scheduler.get_last_lr()[0]
                taken = self._take(pieces, lambda: self._meanwhile(ahead))
                if isinstance(taken, Exhausted):
                    return taken
                stalled = 0.0 if self._step.device_was_busy else ahead.fetching_seconds
                seconds = time.perf_counter() - began
                self._events.note(self._progress.step, taken, pieces, self._order, rate, seconds, stalled)
                if not self._step.unread:
                    self._events.tell(self._step.norm)
                if outcome := self._border():
                    return outcome
                began = time.perf_counter()
        return FINISHED

    def _meanwhile(self, ahead: Ahead) -> None:
        self._events.tell(self._step.norm)
        ahead.fetch()

    def _take(self, pieces: list[dict[str, Any]], meanwhile: Callable[[], None]) -> Taken | Exhausted:
        """One step; where a loss is no number, what the options say of it."""
        self._generators = generators(self._run.device)
        self._step.careful |= self._progress.step < self._careful_to
        try:
            taken = self._step.attempt(self._running, pieces, meanwhile)
        except NonFinite as fault:
            self._events.tell(self._step.norm)
            self._stop_or_skip(fault)
            self._step.norm = fault.norm
            taken = Taken(loss=fault.loss, updated=False)
        if isinstance(taken, Exhausted):
            return taken
        self._progress.took(taken.updated, most_skipped=self._run.options.most_skipped_in_a_row)
        self._last = taken
        return taken

    def _stop_or_skip(self, fault: NonFinite) -> None:
        """Writes down what a step met that has no number, and ends the run unless it may be skipped."""
        step = self._progress.step
        file = fault.write(self._store.root, step + 1, self._order.step(step))
        if self._run.options.on_nonfinite == "skip":
            self._journal.tell("warning", text=f"Step {step + 1}: {fault} It was skipped; see {file.name}.")
            return
        set_generators(self._generators, self._run.device)
        self._keep()
        self._saver.wait()
        raise SnugfitError(
            f"Step {step + 1}: {fault} The samples of its batch stand in {file}. Look at them, take a smaller"
            " learning rate or another precision, or go on without such steps: on_nonfinite='skip'."
        )

    def _settle(self) -> None:
        """Before what the last step has made is used: whether it is sound."""
        self._step.settle(self._running)
        self._events.tell(self._step.norm)

    def _border(self) -> str | None:
        """Between two steps: evaluate, keep, stop. Gives the outcome when the run ends here."""
        options = self._run.options
        better = self._is_due(options.eval_strategy, options.eval_steps or options.logging_steps)
        better = better and self._run.evaluation is not None and self._evaluate()
        asked = self._interrupts.wants_checkpoint()
        due = self._is_due(options.save_strategy, options.save_steps)
        if asked or due or (better and options.load_best_model_at_end):
            self._keep()
        outcome = self._outcome()
        if outcome:
            self._settle()
        return outcome

    def _outcome(self) -> str | None:
        if self._interrupts.stopping is not None:
            return STOPPED
        patience = self._run.options.early_stopping_patience
        if patience is not None and self._progress.evaluations_without_gain >= patience:
            return EARLY
        return FINISHED if self._progress.step == self._steps else None

    def _is_due(self, strategy: str, every: int) -> bool:
        step = self._progress.step
        if strategy == "epoch":
            return step % self._order.steps_per_epoch == 0 or step == self._steps
        return strategy == "steps" and step % every == 0

    def _evaluate(self) -> bool:
        """Goes through the evaluation data; whether it was the best so far."""
        assert self._run.evaluation is not None
        self._settle()
        options, progress = self._run.options, self._progress
        micro_batch = self._run.job.batch_size // self._setup.micro_batches
        found = evaluate(
            self._running.model,
            self._run.job,
            in_order(self._run.evaluation, options.per_device_eval_batch_size or micro_batch),
            self._run.device,
            self._step.autocast(),
        )
        self._evaluated = found
        self._journal.tell("evaluated", step=progress.step, loss=found.loss, accuracy=found.accuracy)
        return progress.judge(
            found.metric(options.metric_for_best_model),
            higher_is_better=options.metric_for_best_model == "accuracy",
            threshold=options.early_stopping_threshold,
        )

    def _keep(self) -> None:
        """A checkpoint of this border, unless there is one."""
        if self._kept_step == self._progress.step:
            return
        self._settle()
        best = self._progress.best_step if self._run.options.load_best_model_at_end else None
        self._saver.keep(lambda: snapshot(self._running, self._staging), best=best)
        self._kept_step = self._progress.step

    def _recover(self, exhausted: Exhausted) -> None:
        """After memory ran out: the same step again, under another recipe of the same global batch."""
        cause, before = exhausted.cause, self._recipe
        if exhausted.phase != "update":
            self._settle()
        chosen = self._replan(self._run.job, before, cause)
        if chosen is None:
            raise OutOfMemory(
                f"Memory ran out in step {self._progress.step + 1} ({exhausted.phase}, {cause}) under"
                f" '{before}', and no other recipe is left. {exhausted.message.splitlines()[0]}"
            )
        kept = self._kept_for_replay(exhausted.phase)
        step = self._progress.step
        del self._running
        free_unused(self._run.device)
        self._recipe = chosen
        self._journal.tell("replanned", step=step + 1, cause=cause, before=str(before), recipe=str(chosen))
        self._open(kept)

    def _kept_for_replay(self, phase: str) -> Checkpoint | None:
        """The border from which the step is taken again: this one, where no weight has changed yet; the last
        one that was kept, or the beginning, when the update itself broke."""
        if phase != "update" and self._progress.step:
            set_generators(self._generators, self._run.device)
            self._keep()
        self._saver.wait()
        return self._store.newest()

    def _end(self, outcome: str) -> Trained:
        """Keeps the last border, and gives the result."""
        options, progress = self._run.options, self._progress
        signal = self._interrupts.stopping
        if options.save_strategy != "no" or outcome == STOPPED:
            self._keep()
        self._saver.wait(stop=lambda: self._interrupts.too_late)
        self._journal.tell("ended", outcome=outcome, step=progress.step, **self._pace.in_all())
        if self._saver.failure is not None and outcome != STOPPED:
            raise SnugfitError(f"The run is done, and its last checkpoint is not kept: {self._saver.failure}")
        model = self._running.model
        if options.load_best_model_at_end and progress.best_step not in (None, progress.step):
            folder = self._store.root / f"checkpoint-{progress.best_step}"
            model = open_run(self._run, self._setup, self._steps, verify(folder, progress.best_step)).model
        return Trained(
            outcome=outcome,
            exit_code=EXIT_CODES[signal] if outcome == STOPPED and signal else 0,
            step=progress.step,
            recipe=self._recipe,
            loss=self._last.loss if self._last else math.nan,
            evaluated=self._evaluated,
            folder=self._store.root,
            model=model,
        )
