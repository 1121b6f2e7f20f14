"""A run that is open under one recipe: what is built for it, and how it is kept.

A run goes on under another recipe by opening it anew, from the border where the one before has ended. So
nothing of a recipe outlives its `Opened`: no tensor, and no figure of its pace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.saver import Saver
from snugfit.training.checkpoint.staging import Staging
from snugfit.training.checkpoint.state import Progress, Running, bytes_of, snapshot
from snugfit.training.generators import generators, set_generators
from snugfit.training.run.collate_cast import collate_for
from snugfit.training.run.loop import Exhausted, Refused, Taken, TrainingStep
from snugfit.training.run.opening import open_run
from snugfit.training.run.order import feed
from snugfit.training.run.step_events import StepEvents
from snugfit.training.throughput import Pace

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.training.checkpoint.manifest import Checkpoint
    from snugfit.training.checkpoint.store import Store
    from snugfit.training.journal import Journal
    from snugfit.training.predicted import Foreseen
    from snugfit.training.run.run import Run
    from snugfit.training.run.spikes import Spikes


@final
class Opened:
    """What is built, from where `kept` was taken or from the beginning. Up to the step `careful_to` gradients
    are waited for."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        kept: Checkpoint | None,
        *,
        store: Store,
        journal: Journal,
        spikes: Spikes,
        foreseen: Foreseen | None,
        careful_to: int,
    ) -> None:
        self._run, self._store, self._journal, self._spikes = run, store, journal, spikes
        self.recipe, self.setup = recipe, recipe.setup()
        self.order = run.order(self.setup.micro_batches)
        self.steps = run.steps(self.order)
        """Optimizer steps of the whole run."""
        self.pace = Pace(run.device, every=run.options.logging_steps, foreseen=foreseen)
        self.events = StepEvents(journal, self.pace)
        self.step = TrainingStep(run.job, self.setup, run.device)
        self.step.refuses = lambda loss: spikes.refused(loss, self.progress)
        self._careful_to = careful_to
        self._generators: tuple[torch.Tensor, ...] = ()
        self.running: Running = open_run(run, self.setup, self.steps, kept)
        self._staging = Staging(run.device)
        if run.options.save_strategy != "no":
            self._staging.prepare(bytes_of(self.running))
        self._kept_step = kept.step if kept else None
        self._saver = Saver(store, run.about(recipe), journal, limit=run.options.save_total_limit)

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.running.progress

    @property
    def failure(self) -> Exception | None:
        """What the last save said, when it failed."""
        return self._saver.failure

    def batches(self) -> Generator[list[dict[str, torch.Tensor]]]:
        """The host micro-batches of each step that is left."""
        loader, data = self.setup.loader, self._run.data
        return feed(
            data.samples,
            self.order,
            collate_for(self._run.job, self.setup, data.collate),
            start_step=self.progress.step,
            stop_step=self.steps,
            workers=loader.workers,
            pinned=loader.pinned and self._run.device.type == "cuda",
        )

    def take(self, pieces: list[dict[str, Any]], meanwhile: Callable[[], None]) -> Taken | Exhausted:
        """One step; where it must not be made, what the options say of it."""
        self._generators = generators(self._run.device)
        self.step.careful |= self.progress.step < self._careful_to
        most = self._run.options.most_skipped_in_a_row
        try:
            taken = self.step.attempt(self.running, pieces, meanwhile)
        except Refused as fault:
            self.events.tell(self.step.norm)
            self._stop_or_skip(fault)
            self.step.norm = fault.norm
            self.progress.took(False, most_skipped=most)
            return Taken(loss=fault.loss, updated=False)
        if isinstance(taken, Taken):
            self.progress.took(taken.updated, most_skipped=most)
            self._spikes.made(taken.loss, self.progress)
        return taken

    def _stop_or_skip(self, fault: Refused) -> None:
        """Writes down the samples of a step that was not made, and ends the run unless it may be skipped."""
        step = self.progress.step
        file = fault.write(self._store.root, step + 1, self.order.step(step))
        if getattr(self._run.options, fault.option) == "skip":
            self._journal.tell("warning", text=f"Step {step + 1}: {fault} It was skipped; see {file.name}.")
            return
        self.put_back()
        self.keep()
        self.wait()
        raise SnugfitError(
            f"Step {step + 1}: {fault} The samples of its batch stand in {file}. Look at them, take a smaller"
            f" learning rate or another precision, or go on without such steps: {fault.option}='skip'."
        )

    def put_back(self) -> None:
        """The generators as they were before the step that was taken last."""
        set_generators(self._generators, self._run.device)

    def settle(self) -> None:
        """Before what the last step has made is used: whether it is sound."""
        self.step.settle(self.running)
        self.events.tell(self.step.norm)

    def keep(self) -> None:
        """A checkpoint of this border, unless there is one."""
        if self._kept_step == self.progress.step:
            return
        self.settle()
        best = self.progress.best_step if self._run.options.load_best_model_at_end else None
        self._saver.keep(lambda: snapshot(self.running, self._staging), best=best)
        self._kept_step = self.progress.step

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Until no checkpoint is being written, or `stop` says so."""
        self._saver.wait(stop)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, when none is being written."""
        self.wait()
        return self._store.newest()
