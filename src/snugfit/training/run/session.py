"""A run in this process: its steps, and what happens on the borders between them. See `train.py`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from snugfit.errors import OutOfMemory, SnugfitError
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.training.checkpoint.manifest import Checkpoint, verify
from snugfit.training.checkpoint.state import Progress, free_unused
from snugfit.training.checkpoint.store import Store
from snugfit.training.interrupt import EXIT_CODES, Interrupts
from snugfit.training.journal import Journal
from snugfit.training.predicted import Foresee, Foreseen
from snugfit.training.run.active_run import Opened
from snugfit.training.run.evaluate import Evaluated, evaluate, in_order
from snugfit.training.run.loop import WHAT_TO_TRY, Exhausted, Poisoned, Taken
from snugfit.training.run.opening import open_run
from snugfit.training.run.order import Ahead
from snugfit.training.run.reporting import Reports
from snugfit.training.run.run import Run
from snugfit.training.run.spikes import Spikes
from snugfit.training.run.trained import EARLY, FINISHED, STOPPED, Trained
from snugfit.training.run.worker_death import deaths_told
from snugfit.training.thrash import CAUSE, IN_A_ROW, Thrash

Replan = Callable[[Job, Recipe, str], Recipe | None]
"""A job, the recipe that ran out of memory and the cause: the recipe to go on with, or None."""

BORDER = "border"
"""Where memory was found to be short between two steps."""


class Session:
    """One run in this process."""

    def __init__(
        self,
        run: Run,
        store: Store,
        journal: Journal,
        interrupts: Interrupts,
        reports: Reports,
        *,
        replan: Replan,
        foresee: Foresee,
    ) -> None:
        self._run, self._store, self._journal = run, store, journal
        self._interrupts, self._reports, self._replan, self._foresee = interrupts, reports, replan, foresee
        self._spikes = Spikes(run.options, journal)
        self._last: Taken | None = None
        self._evaluated: Evaluated | None = None
        self._careful_to = 0

    def train(self, kept: Checkpoint | None) -> Trained:
        """To the end, from where `kept` was taken or from the beginning."""
        run = self._run
        self._adopt(Recipe.parse(kept.about["recipe"]) if kept is not None else run.recipe)
        self._open(kept)
        self._journal.tell(
            "started",
            job=run.job.model.name,
            recipe=str(self._recipe),
            steps=self._now.steps,
            samples=len(run.data.samples),
            resumed_from=kept.step if kept else None,
        )
        try:
            with deaths_told():
                return self._end(self._to_the_end())
        finally:
            if "_now" in vars(self):  # else it was not to be opened, and nothing is being written
                self._now.wait()  # nobody writes here once the folder is given back

    def _adopt(self, recipe: Recipe) -> None:
        """From here on under this recipe; what is foreseen of it is told."""
        self._recipe = recipe
        found = self._foresee(self._run.job, recipe)
        self._foreseen = found if isinstance(found, Foreseen) else None
        if found is not None:
            figures = {"text": found} if isinstance(found, str) else found.to_json()
            self._journal.tell("foreseen", recipe=str(recipe), **figures)

    def _to_the_end(self) -> str:
        while self._progress.step < self._now.steps:
            poisoned = False
            try:
                ended = self._go_on()
                if not isinstance(ended, Exhausted):
                    return ended
                self._recover(ended)
            except Poisoned:
                poisoned = True
            if poisoned:  # out here, where no traceback holds what has to be given back
                self._replay()
        return FINISHED

    def _replay(self) -> None:
        """Back to where the weights were right, and again up to the step that made them wrong, which then
        stops before its update."""
        step = self._progress.step
        kept = self._now.newest()
        text = f"Step {step}: a gradient was no number. The run goes back to step {kept.step if kept else 0}."
        self._journal.tell("warning", text=text)
        self._careful_to = step
        del self._now
        free_unused(self._run.device)
        self._open(kept)

    def _open(self, kept: Checkpoint | None) -> None:
        run = self._run
        self._now = Opened(
            run,
            self._recipe,
            kept,
            store=self._store,
            journal=self._journal,
            spikes=self._spikes,
            foreseen=self._foreseen,
            careful_to=self._careful_to,
        )
        self._thrash: Thrash | None = Thrash(run.device)
        self._reports.opens(self._now.running.model, self._progress.step, self._now.steps)

    @property
    def _progress(self) -> Progress:
        return self._now.progress

    def _go_on(self) -> str | Exhausted:
        """Step after step, until the run's end, a stop, or the end of memory."""
        now = self._now
        with contextlib.closing(now.batches()) as batches:
            ahead = Ahead(batches)
            began = time.perf_counter()
            while (pieces := self._next(ahead)) is not None:
                rate = now.running.scheduler.get_last_lr()[0]
                taken = now.take(pieces, lambda: self._meanwhile(ahead))
                if isinstance(taken, Exhausted):
                    return taken
                self._last = taken
                stalled = 0.0 if now.step.device_was_busy else ahead.fetching_seconds
                seconds = time.perf_counter() - began
                now.events.note(now.progress.step, taken, pieces, now.order, rate, seconds, stalled)
                if not now.step.unread:
                    now.events.tell(now.step.norm)
                if outcome := self._border():
                    return outcome
                if self._thrash is not None and self._thrash.seen():
                    return Exhausted(cause=CAUSE, phase=BORDER, message=f"{IN_A_ROW} steps in a row")
                began = time.perf_counter()
        return FINISHED

    def _next(self, ahead: Ahead) -> list[dict[str, Any]] | None:
        """The next step's micro-batches. Where the data breaks, what was trained is kept first."""
        try:
            return ahead.take()
        except Exception:
            if self._progress.step and self._run.options.save_strategy != "no":
                self._now.keep()
            raise

    def _meanwhile(self, ahead: Ahead) -> None:
        self._now.events.tell(self._now.step.norm)
        ahead.fetch()

    def _border(self) -> str | None:
        """Between two steps: evaluate, keep, stop. Gives the outcome when the run ends here."""
        options = self._run.options
        better = self._is_due(options.eval_strategy, options.eval_steps or options.logging_steps)
        better = better and self._run.evaluation is not None and self._evaluate()
        asked = self._interrupts.wants_checkpoint()
        due = self._is_due(options.save_strategy, options.save_steps)
        if asked or due or (better and options.load_best_model_at_end):
            self._now.keep()
        outcome = self._outcome()
        if outcome:
            self._now.settle()
        return outcome

    def _outcome(self) -> str | None:
        if self._interrupts.stopping is not None:
            return STOPPED
        patience = self._run.options.early_stopping_patience
        if patience is not None and self._progress.evaluations_without_gain >= patience:
            return EARLY
        return FINISHED if self._progress.step == self._now.steps else None

    def _is_due(self, strategy: str, every: int) -> bool:
        step = self._progress.step
        if strategy == "epoch":
            return step % self._now.order.steps_per_epoch == 0 or step == self._now.steps
        return strategy == "steps" and step % every == 0

    def _evaluate(self) -> bool:
        """Goes through the evaluation data; whether it was the best so far."""
        assert self._run.evaluation is not None
        self._now.settle()
        options, progress = self._run.options, self._progress
        micro_batch = self._run.job.batch_size // self._now.setup.micro_batches
        found = evaluate(
            self._now.running.model,
            self._run.job,
            in_order(
                self._run.evaluation,
                options.per_device_eval_batch_size or micro_batch,
                self._run.job,
                self._now.setup,
            ),
            self._run.device,
            self._now.step.forward_context(),
        )
        self._evaluated = found
        self._journal.tell("evaluated", step=progress.step, loss=found.loss, accuracy=found.accuracy)
        return progress.judge(
            found.metric(options.metric_for_best_model),
            higher_is_better=options.metric_for_best_model == "accuracy",
            threshold=options.early_stopping_threshold,
        )

    def _recover(self, exhausted: Exhausted) -> None:
        """After memory ran out: the same step again, under another recipe of the same global batch. Where it
        is only short, the next step, if there is such a recipe."""
        cause, before, step = exhausted.cause, self._recipe, self._progress.step
        if exhausted.phase != "update":
            self._now.settle()
        chosen = self._replan(self._run.job, before, cause)
        if chosen is None:
            self._go_on_short(exhausted)
            return
        kept = self._kept_for_replay(exhausted.phase)
        if exhausted.phase == BORDER and (kept is None or kept.step != step):
            self._thrash = None  # it could not be kept, which was told; to go back would cost more
            return
        del self._now
        free_unused(self._run.device)
        self._journal.tell("replanned", step=step + 1, cause=cause, before=str(before), recipe=str(chosen))
        self._adopt(chosen)
        try:
            self._open(kept)
        except (SnugfitError, RuntimeError, MemoryError) as fault:
            text = f"Memory ran out in step {step + 1} ({cause}). '{chosen}' could not be begun: {fault}"
            raise OutOfMemory(f"{text} {WHAT_TO_TRY}") from fault

    def _go_on_short(self, exhausted: Exhausted) -> None:
        """No other recipe is left: a run whose memory is short goes on, one whose memory ran out cannot."""
        before, cause, step = self._recipe, exhausted.cause, self._progress.step
        if exhausted.phase != BORDER:
            raise OutOfMemory(
                f"Memory ran out in step {step + 1} ({exhausted.phase}, {cause}) under"
                f" '{before}', and no other recipe is left. {exhausted.message.splitlines()[0]} {WHAT_TO_TRY}"
            )
        self._thrash = None
        text = f"Step {step}: memory is short ({cause}, {exhausted.message}) under '{before}', and no other"
        self._journal.tell("warning", text=f"{text} recipe is left; the run goes on, slower than it could.")

    def _kept_for_replay(self, phase: str) -> Checkpoint | None:
        """The border from which the run goes on: this one, where no weight has changed since; the last one
        that was kept, or the beginning, when the update itself broke."""
        if phase == BORDER:
            self._now.keep()
        elif phase != "update" and self._progress.step:
            self._now.put_back()
            self._now.keep()
        return self._now.newest()

    def _end(self, outcome: str) -> Trained:
        """Keeps the last border, and gives the result."""
        options, progress = self._run.options, self._progress
        signal = self._interrupts.stopping
        if options.save_strategy != "no" or outcome == STOPPED:
            self._now.keep()
        self._now.wait(stop=lambda: self._interrupts.too_late)
        self._journal.tell("ended", outcome=outcome, step=progress.step, **self._now.pace.in_all())
        if self._now.failure is not None and outcome != STOPPED:
            raise SnugfitError(f"The run is done, and its last checkpoint is not kept: {self._now.failure}")
        self._reports.ends(self._now.running.model)
        model = self._now.running.model
        if options.load_best_model_at_end and progress.best_step not in (None, progress.step):
            folder = self._store.root / f"checkpoint-{progress.best_step}"
            model = open_run(
                self._run, self._now.setup, self._now.steps, verify(folder, progress.best_step)
            ).model
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
