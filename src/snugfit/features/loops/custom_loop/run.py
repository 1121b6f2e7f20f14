"""A run in a hand-written loop: its steps, checkpoints and position in the data.

Unlike in snugfit's other loops, a failed step does not switch to another recipe. The user's loop decides
after an error: the step raises it, and every weight is unchanged.

An evaluation in the user's loop is detected by its forward passes, without gradients or in evaluation mode.
After a signal, a checkpoint is saved there and the loop ends. The checkpoint stores the state and the random
generators at the last step's end, and marks that step for repetition. A resumed run yields its batch again,
and `run.step` returns the same loss without training. The loop's code after the step, with the evaluation,
then runs again.

If an evaluation uses other weights, such as an average copied into the model, they must not be saved. So
samples of the model's values and the optimizer's settings are compared with those after the step. If they
differ, the run ends before its next step.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

from snugfit.errors import OutOfMemory, SnugfitError, UsageError
from snugfit.features.loops.backward_updates import BackwardWatch
from snugfit.features.loops.custom_loop.batches import Batches
from snugfit.features.loops.custom_loop.checkpoints import RunCheckpoints
from snugfit.features.loops.custom_loop.step import CustomStep
from snugfit.features.loops.pieces import pieces_of, write_batch
from snugfit.frontends.next_recipe import next_recipe
from snugfit.frontends.predicted import run_predictor
from snugfit.job.batch import tokens_of
from snugfit.step.applier import run_context
from snugfit.training.checkpoint.state import TrainState
from snugfit.training.interrupt import EXIT_CODES
from snugfit.training.journal import Journal
from snugfit.training.recovery import Exhausted, Recovery, out_of_memory
from snugfit.training.rng import all_rng_states, restore_all_rng_states, rng_states, set_rng_states
from snugfit.training.run.items import samples_in
from snugfit.training.run.loop import NonFinite, StepResult
from snugfit.training.step_logger import StepLogger

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

MOST_SKIPPED = 50
"""Largest number of successive steps that a gradient scaler may skip, as in the other training loops."""


def _close(run: weakref.ref[HandRun]) -> None:
    alive = run()
    if alive is not None:
        alive.close()


@final
class HandRun:
    """The user's own training loop under a recipe, with its steps and checkpoints (`snugfit.accelerate`).

    The run closes at the end of a `with` block, when the process ends, or when its last reference is deleted.
    """

    def __init__(
        self,
        *,
        job: Job,
        recipe: Recipe,
        state: TrainState,
        step: CustomStep,
        batches: Batches,
        checkpoints: RunCheckpoints | None,
        journal: Journal,
        every: int,
    ) -> None:
        self.recipe = recipe
        self._recovery = Recovery(job, journal, next_recipe(state.device))
        self._state, self._step, self._batches = state, step, batches
        self._checkpoints = checkpoints
        predict = run_predictor(state.device)
        self._logger = StepLogger(journal, state.device, every=every, predict=predict)
        self._backward = BackwardWatch()
        self._taken = 0
        self._begun = self._closed = self._resumed = False
        self._evaluations = EvaluationWatch(state, batches, checkpoints)
        if checkpoints is not None:
            # The folder is unlocked even if the loop ends without `close`.
            weakref.finalize(self, checkpoints.close)
        # With a strong reference, `atexit` would keep the model alive until the process ends.
        atexit.register(_close, weakref.ref(self))

    # ---- interface of the loop ---------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """The training job, with the result of the last comparison of the gradients of micro-batches and
        whole batch.
        """
        return self._recovery.job

    @property
    def model(self) -> Any:
        """The user's model, the same object that was passed to `accelerate`."""
        return self._state.model

    @property
    def optimizer(self) -> Any:
        """The run's optimizer: the user's, or the recipe's replacement."""
        return self._state.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning-rate schedule that was passed in or created; `step` advances it with the optimizer."""
        return self._state.scheduler

    @property
    def steps(self) -> int:
        """Number of finished optimizer steps, including those before a resume."""
        return self._state.progress.step

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._batches.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs out of `count`. A resumed run starts with the interrupted
        epoch.
        """
        if self._resumed and self._batches.epoch >= count:
            done = f"all {count:,} epochs are done, in {self.steps:,} steps"
            self._checkpoints_for("resume").journal.tell("note", text=f"Nothing is left to train: {done}.")
        while self._batches.epoch < count:
            before = self._batches.epoch
            yield before
            self._between_steps()
            # An epoch that the loop leaves by `break` counts as finished, if it has yielded batches.
            if self._batches.epoch == before and not self._batches.leave():
                raise UsageError(
                    "An epoch ended without its batches. Take them from the run: `for batch in run:`."
                )

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's global batches, as the loader creates them."""
        self._refuse_closed()
        for batch in self._batches:
            yield batch
            # The loop's code after a step ends when it requests the next batch.
            self._between_steps()

    def step(self, batch: Mapping[str, Any]) -> float:
        """Run one optimizer step over a global batch (B, ...), in micro-batches, and return its loss.

        Raises `SnugfitError` for a NaN or infinite loss or gradient, and `OutOfMemory` when memory runs out.
        Raises `Stopped` before a step after a signal, and `UsageError` for an invalid batch.
        """
        self._refuse_closed()
        # An invalid batch is refused before any state changes.
        pieces = self._cut(batch)
        self._between_steps()
        if not self._begun:
            self._begin()
        # The forward passes of a step are not an evaluation.
        self._evaluations.end()
        if self._checkpoints is not None and self._checkpoints.repeated_loss is not None:
            return self._repeat(self._checkpoints)
        # A failed step restores these random states, so that it can be repeated.
        began, before = time.perf_counter(), rng_states(self._state.device)
        self._backward.begin(self.model)
        with run_context(self.recipe.setup()):
            try:
                result = self._step.attempt(self._state, pieces, self._before_update)
            except NonFinite as fault:
                self._stop(fault, batch, before)
        if isinstance(result, Exhausted):
            set_rng_states(before, self._state.device)
            raise self._out_of_memory(result)
        self._state.progress.count(result.updated, most_skipped=MOST_SKIPPED)
        # A batch counts as trained after its update. An earlier checkpoint repeats it.
        self._batches.used()
        self._log(result, pieces, time.perf_counter() - began)
        self._compare_again(batch, is_cut=len(pieces) > 1)
        self._at_boundary(result.loss)
        return result.loss

    def save(self) -> None:
        """Save a checkpoint of this step. It is written while the next steps run."""
        self._checkpoints_for("save").save()

    def resume(self, checkpoint: str | os.PathLike[str] | None = None) -> bool:
        """Resume the newest complete checkpoint. Return False if there is none.

        A named checkpoint is resumed even if later ones exist; those are renamed. Raises `UsageError` after
        the first step, for another run's checkpoint, and for an invalid one. Raises `SnugfitError` when no
        existing checkpoint is complete.
        """
        checkpoints = self._checkpoints_for("resume")
        if self._begun:
            raise UsageError("Call resume() before the first step.")
        self._resumed = checkpoints.resume(None if checkpoint is None else Path(checkpoint))
        return self._resumed

    def close(self) -> None:
        """Finish writing the last checkpoint and unlock the output folder. Raises `SnugfitError` when writing
        failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._checkpoints is not None:
                self._checkpoints.wait()
            if self._begun:
                self._logger.end("closed", self.steps)
        finally:
            if self._checkpoints is not None:
                self._checkpoints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # `Stopped` must not replace an error of the loop.
        if error is None and self._begun and self._checkpoints is not None:
            self._between_steps()
        self.close()

    # ---- a step ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before the first step, rename an old run's checkpoints and start to predict this run's memory and
        step time.
        """
        self._begun = True
        if self._checkpoints is not None:
            self._checkpoints.begin()
        self._logger.restart(self.job, self.recipe)

    def _before_update(self) -> None:
        """Load the next batch while the device still computes the backward pass."""
        self._backward.raise_if_updated()
        self._batches.fetch()

    def _cut(self, batch: Any) -> list[dict[str, Any]]:
        if not isinstance(batch, Mapping) or not batch:
            raise UsageError(
                f"step needs a batch that maps the model's arguments to tensors, not {batch!r:.80}. A "
                "collate_fn of the loader can make one."
            )
        dims = self.job.model.batch_dims
        whole, count = self.job.batch_size, samples_in(batch, dims)
        if count > whole:
            raise UsageError(
                f"The batch has {count} samples, but the global batch of this run is {whole}. Give at "
                f"most {whole} samples."
            )
        # A smaller last batch is split into micro-batches of the usual size, so that it fits too.
        micro_batches = self.recipe.pieces
        pieces = pieces_of(batch, whole // micro_batches if micro_batches > 1 else None, dims)
        return [dict(piece) for piece in pieces]

    def _stop(self, fault: NonFinite, batch: Mapping[str, Any], before: Any) -> NoReturn:
        """Write the batch of a step with a NaN or infinite loss to disk. Save a checkpoint from before the
        step, and raise an error.
        """
        # First check for weights that a gradient hook updates, because no checkpoint could undo that.
        self._backward.raise_if_updated()
        set_rng_states(before, self._state.device)
        saved_at = ""
        if self._checkpoints is not None:
            file = write_batch(self._checkpoints.root, self.steps + 1, [batch])
            self._checkpoints.save()
            # The error below names this checkpoint, so it must be complete by then.
            self._checkpoints.wait()
            saved_at = f" The step's batch is in {file}, next to a checkpoint from before the step."
        raise SnugfitError(
            f"Step {self.steps + 1}: {fault}{saved_at} Inspect the batch, or use a smaller learning rate or "
            "another precision."
        )

    def _out_of_memory(self, exhausted: Exhausted) -> OutOfMemory:
        # The advice may be to split the batch, so the effect of a split on the loss is compared first.
        self._recovery.job = self._step.job_with_mixing(self.job, self.model)
        smaller, reason = self._recovery.replan(self.recipe, exhausted.cause)
        unplanned = f" (None could be planned: {reason})" if reason else ""
        intact = "No weight has changed, so run.save() can save this state"
        if exhausted.phase == "update":
            intact = "Some weights may have changed, so start from the last checkpoint"
        advice = (
            f"{intact}. The next recipe with the same global batch of {self.job.batch_size} is '{smaller}'"
            f"{unplanned}."
        )
        if smaller is None:
            advice = "There is no recipe for the same training that needs less. Use a smaller global batch."
        return out_of_memory(exhausted, self.recipe, self.steps, advice)

    def _compare_again(self, batch: Mapping[str, Any], *, is_cut: bool) -> None:
        """At some of the steps, compare the gradients of a batch's micro-batches with those of the whole
        batch.
        """
        self._taken += 1
        if is_cut:
            compare = partial(self._step.job_with_mixing, model=self.model, batch=batch, again=True)
            self._recovery.compare_again(self.recipe, self._taken, compare)

    def _log(self, result: StepResult, pieces: list[dict[str, Any]], seconds: float) -> None:
        # Fetching during the backward pass does not delay the step.
        stalled = 0.0 if self._step.device_was_busy else self._batches.fetching_seconds
        self._logger.note(
            step=self.steps,
            epoch=self._batches.epochs_passed,
            loss=result.loss,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            updated=result.updated,
            seconds=seconds,
            # Fetching may have started before the step's clock.
            stall_seconds=min(stalled, seconds),
            samples=sum(samples_in(piece, self.job.model.batch_dims) for piece in pieces),
            tokens=sum(tokens_of(piece) for piece in pieces),
        )
        self._logger.write(self._step.norm)

    def _at_boundary(self, loss: float) -> None:
        """At the end of a step, begin to detect evaluations in the user's loop. A signal takes effect before
        the next step, or in an evaluation.
        """
        if self._checkpoints is not None:
            self._checkpoints.check_first_update()
            self._evaluations.watch(loss)

    def _between_steps(self) -> None:
        """Before the next step of the user's loop, save a requested checkpoint, or end the run after a
        signal.
        """
        if self._checkpoints is None or self._closed:
            return
        stopping = self._checkpoints.interrupts.stopping
        if self._begun and (self._checkpoints.interrupts.wants_checkpoint() or stopping is not None):
            self._checkpoints.save()
        self._stop_if_requested()

    def _stop_if_requested(self) -> None:
        stopping = None if self._checkpoints is None else self._checkpoints.interrupts.stopping
        if stopping is not None:
            self.close()
            raise Stopped(EXIT_CODES[stopping])

    def _repeat(self, checkpoints: RunCheckpoints) -> float:
        """Return the loss of the last step before a resume, without training. The user's code after that step
        then runs again.
        """
        loss, checkpoints.repeated_loss = checkpoints.repeated_loss, None
        assert loss is not None
        self._batches.used()
        text = f"Step {self.steps:,} is repeated, because a signal stopped what followed it."
        checkpoints.journal.tell("note", text=text)
        self._at_boundary(loss)
        return loss

    def _checkpoints_for(self, method: str) -> RunCheckpoints:
        self._refuse_closed()
        if self._checkpoints is None:
            raise UsageError(f"{method}() needs a folder: snugfit.accelerate(..., output_dir='out').")
        return self._checkpoints

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("This run is closed.")


# ---- evaluations ------------------------------------------------------------------------------------------


TENSORS, NUMBERS = 8, 64
"""Numbers of compared tensors of a model, and of compared values in each (chosen). A moving average, a merge
or other weights change all or most tensors. Reading these few values takes almost no time.
"""


class Stopped(SystemExit):
    """Exit between two steps, after a signal and a saved checkpoint. The exit status `code` is 75 or 130."""

    repeats_step = False
    """True if the resumed run yields the last step's batch again, because the code after that step did not
    finish.

    State that the loop saves itself must then be from before that step.
    """


@final
class EvaluationWatch:
    """Stops an evaluation in the user's loop after a signal, if the model is unchanged since the last
    training step.
    """

    def __init__(self, state: TrainState, batches: Batches, checkpoints: RunCheckpoints | None) -> None:
        self._state, self._batches, self._checkpoints = state, batches, checkpoints
        self._tensors = _sampled_tensors(state.model)
        self._loss = 0.0

    def watch(self, loss: float) -> None:
        """After a step with this loss, start to detect forward passes that belong to an evaluation."""
        if self._checkpoints is None:
            return
        self._loss = loss
        self._left = self._numbers(), _settings(self._state.optimizer)
        self._generators = all_rng_states(self._state.device)
        self._checkpoints.interrupts.watch_modules(self._end_on_signal)

    def end(self) -> None:
        """Stop the detection of evaluations, before the next step."""
        if self._checkpoints is not None:
            self._checkpoints.interrupts.watch_modules(None)

    def _end_on_signal(self, module: Any) -> None:
        checkpoints = self._checkpoints
        if checkpoints is None or not is_evaluation(module):
            return
        # One check per step: later modules in this evaluation are not checked again.
        self.end()
        stopping = checkpoints.interrupts.stopping
        if stopping is not None and self._batches.can_repeat and self._is_unchanged():
            # The evaluation may have drawn random numbers, and the repeated one must draw the same.
            restore_all_rng_states(self._generators, self._state.device)
            checkpoints.save(repeated_loss=self._loss)
            checkpoints.wait()
            stopped = Stopped(EXIT_CODES[stopping])
            stopped.repeats_step = True
            raise stopped
        text = (
            "A signal was received. The run ends before its next step, because its model has changed "
            "meanwhile."
        )
        checkpoints.journal.tell("warning", text=text)

    def _is_unchanged(self) -> bool:
        """Return True if sampled values of the model and the optimizer's settings are unchanged since the
        last step.
        """
        import torch

        numbers, settings = self._left
        # Comparing a few values makes the host wait for the device, but only after a signal.
        return torch.equal(numbers, self._numbers()) and settings == _settings(self._state.optimizer)

    def _numbers(self) -> torch.Tensor:
        """Return the first values of some of the model's tensors as one tensor: at most (TENSORS x NUMBERS,),
        float32.
        """
        import torch

        # A slice along the last dimension is contiguous in most tensors, and every non-empty tensor has one.
        rows = [tensor.detach()[(0,) * (tensor.dim() - 1)] for tensor in self._tensors]
        return torch.cat([row.reshape(-1)[:NUMBERS].float() for row in rows])


def is_evaluation(module: Any) -> bool:
    """Return True if this module's forward pass belongs to an evaluation: without gradients, or in evaluation
    mode."""
    import torch

    return not (torch.is_grad_enabled() and module.training)


def _sampled_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]
    count = min(TENSORS, len(tensors))
    # The indices are spread evenly, and include the first and the last tensor.
    return [tensors[index * (len(tensors) - 1) // max(1, count - 1)] for index in range(count)]


def _settings(optimizer: Any) -> str:
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    # Values may be tensors or lists, which can be compared as text.
    return repr(groups)
