"""A hand-written loop's run: its steps, its checkpoints, and where it is in its data.

A step does not take another recipe by itself, as the other doors do: the loop around it is the user's, and
so is what to do when a step cannot be taken. It raises, with every weight as it was before the step.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

from snugfit.errors import OutOfMemory, SnugfitError, UsageError
from snugfit.frontends.custom_loop.batches import Batches
from snugfit.frontends.custom_loop.checkpoints import HandKeeping
from snugfit.frontends.custom_loop.step import HandStep
from snugfit.frontends.items import pieces_of, samples_in
from snugfit.frontends.next_recipe import next_recipe
from snugfit.frontends.predicted import foresees
from snugfit.frontends.trainer.finite_check import write_batch
from snugfit.job.batch import tokens_of
from snugfit.step.applier import run_context
from snugfit.training.checkpoint.state import Running
from snugfit.training.generators import generators, set_generators
from snugfit.training.interrupt import EXIT_CODES
from snugfit.training.journal import Event
from snugfit.training.run.loop import Exhausted, NonFinite, Taken
from snugfit.training.throughput import Pace

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

MOST_SKIPPED = 50
"""Steps in a row that a gradient scaler may leave out, as in the other doors."""


class Stopped(SystemExit):
    """A signal has stopped the run on a step's border, where a checkpoint was kept; `code` is 75 or 130."""


def _close(run: weakref.ref[HandRun]) -> None:
    alive = run()
    if alive is not None:
        alive.close()


@final
class HandRun:
    """What `snugfit.accelerate` gives. Closed at the end of a `with`, when the process ends, or when nobody
    holds it any more."""

    def __init__(
        self,
        *,
        job: Job,
        recipe: Recipe,
        running: Running,
        step: HandStep,
        batches: Batches,
        keeping: HandKeeping | None,
        every: int,
        watch: Callable[[Event], None],
    ) -> None:
        self.job, self.recipe = job, recipe
        self._running, self._step, self._batches = running, step, batches
        self._keeping, self._watch = keeping, watch
        self._every, self._pace = every, Pace(running.device, every=every)
        self._begun = self._closed = False
        if keeping is not None:
            weakref.finalize(self, keeping.close)
        atexit.register(_close, weakref.ref(self))

    # ---- what the loop asks ------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The user's."""
        return self._running.model

    @property
    def optimizer(self) -> Any:
        """The user's, or the one that the recipe has put in its place."""
        return self._running.optimizer

    @property
    def scheduler(self) -> Any:
        """The one that was given or made; it takes a step with each of the run's."""
        return self._running.scheduler

    @property
    def steps(self) -> int:
        """Optimizer steps that are done, those before a resume among them."""
        return self._running.progress.step

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self._batches.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left of so many: a resumed run begins with the one it was in."""
        while self._batches.epoch < count:
            before = self._batches.epoch
            yield before
            if self._batches.epoch == before and not self._batches.leave():
                raise UsageError(
                    "An epoch has passed without its batches. Take them from the run: `for batch in run:`."
                )

    def __iter__(self) -> Iterator[Any]:
        """An epoch's global batches, as the loader makes them."""
        self._refuse_closed()
        return iter(self._batches)

    def step(self, batch: Mapping[str, Any]) -> float:
        """One optimizer step over a global batch (B, ...), in micro-batches; gives its loss.

        Raises `SnugfitError` when the loss or a gradient is no number, `OutOfMemory`, `Stopped`, and
        `UsageError` for what is no batch of this run.
        """
        self._refuse_closed()
        pieces = self._cut(batch)
        if not self._begun:
            self._begin()
        begun, before = time.perf_counter(), generators(self._running.device)
        with run_context(self.recipe.setup()):
            try:
                taken = self._step.attempt(self._running, pieces, self._batches.fetch)
            except NonFinite as fault:
                self._stop(fault, batch, before)
        if isinstance(taken, Exhausted):
            set_generators(before, self._running.device)
            raise self._out_of_memory(taken)
        self._running.progress.took(taken.updated, most_skipped=MOST_SKIPPED)
        self._batches.used()
        self._tell(taken, pieces, time.perf_counter() - begun)
        self._border()
        return taken.loss

    def save(self) -> None:
        """Keeps a checkpoint of this border; it is written while the next steps run."""
        self._kept_in("save").keep()

    def resume(self) -> bool:
        """Takes up the newest whole checkpoint; False where there is none. Raises `UsageError` after the
        first step and for another run's checkpoint, `SnugfitError` when none that is there is whole.
        """
        keeping = self._kept_in("resume")
        if self._begun:
            raise UsageError("resume() comes before the first step.")
        return keeping.resume()

    def close(self) -> None:
        """Waits until the last checkpoint is written, and gives the folder back. Raises `SnugfitError` when
        that could not be kept."""
        if self._closed:
            return
        self._closed = True
        if self._keeping is not None:
            self._keeping.wait()
        if self._begun:
            self._say("ended", outcome="closed", step=self.steps, **self._pace.in_all())
        if self._keeping is not None:
            self._keeping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- a step ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What is done once, before the first step: an old run is put aside, and this one foreseen."""
        self._begun = True
        if self._keeping is not None:
            self._keeping.begin()
        expected = foresees(self._running.device)(self.job, self.recipe)
        if isinstance(expected, str):
            self._say("foreseen", recipe=str(self.recipe), text=expected)
        elif expected is not None:
            self._say("foreseen", recipe=str(self.recipe), **expected.to_json())
            self._pace = Pace(self._running.device, every=self._every, foreseen=expected)

    def _cut(self, batch: Any) -> list[dict[str, Any]]:
        if not isinstance(batch, Mapping) or not batch:
            raise UsageError(
                f"step takes a batch, a mapping of the model's arguments to tensors, and not {batch!r:.80}. A"
                " collate_fn of the loader can make one."
            )
        whole, count = self.job.batch_size, samples_in(batch)
        if count > whole:
            raise UsageError(f"The batch has {count} samples; this run's global batch is {whole}.")
        pieces = pieces_of(batch, whole // self.recipe.setup().micro_batches)
        return [dict(piece) for piece in pieces]

    def _stop(self, fault: NonFinite, batch: Mapping[str, Any], before: Any) -> NoReturn:
        """After a step that has no number: its batch is written down, the border before it is kept."""
        set_generators(before, self._running.device)
        where = ""
        if self._keeping is not None:
            file = write_batch(self._keeping.root, self.steps + 1, [batch])
            self._keeping.keep()
            self._keeping.wait()
            where = f" The step's batch stands in {file}, a checkpoint of the border before it beside."
        raise SnugfitError(
            f"Step {self.steps + 1}: {fault}{where} Look at the batch, take a smaller learning rate,"
            " or another precision."
        )

    def _out_of_memory(self, exhausted: Exhausted) -> OutOfMemory:
        job, recipe = self.job, self.recipe
        following = next_recipe(self._running.device)(job, recipe, exhausted.cause)
        changed = exhausted.phase == "update"
        then = (
            "Weights may have changed in part; begin with the last checkpoint"
            if changed
            else "No weight has changed; run.save() keeps this border"
        )
        advice = (
            f"{then}. The next recipe with the same global batch of {job.batch_size} is '{following}'."
            if following is not None
            else "No recipe of the same training is left that needs less; take a smaller global batch."
        )
        return OutOfMemory(
            f"Memory ran out in step {self.steps + 1} ({exhausted.phase}, {exhausted.cause}) under"
            f" '{recipe}'. {advice} {exhausted.message.splitlines()[0]}"
        )

    def _tell(self, taken: Taken, pieces: list[dict[str, Any]], seconds: float) -> None:
        stalled = 0.0 if self._step.device_was_busy else self._batches.fetching_seconds
        samples = sum(samples_in(piece) for piece in pieces)
        tokens = sum(tokens_of(piece) for piece in pieces)
        event: Event = {
            "step": self.steps,
            "epoch": self._batches.epochs_passed,
            "loss": taken.loss,
            "norm": self._step.norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "updated": taken.updated,
            "seconds": seconds,
            "stall_seconds": min(stalled, seconds),
            "samples": samples,
            "tokens": tokens,
            **self._pace.told(self.steps, seconds, samples, tokens),
        }
        self._say("step", **event)

    def _say(self, event: str, **fields: Any) -> None:
        if self._keeping is not None:
            self._keeping.journal.tell(event, **fields)
        else:
            self._watch({"event": event, **fields})

    def _border(self) -> None:
        if self._keeping is None:
            return
        stopping = self._keeping.interrupts.stopping
        if self._keeping.interrupts.wants_checkpoint() or stopping is not None:
            self._keeping.keep()
        if stopping is not None:
            self.close()
            raise Stopped(EXIT_CODES[stopping])

    def _kept_in(self, what: str) -> HandKeeping:
        self._refuse_closed()
        if self._keeping is None:
            raise UsageError(f"{what}() needs a folder: snugfit.accelerate(..., output_dir='out').")
        return self._keeping

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("This run is closed.")
