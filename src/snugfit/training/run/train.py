"""Training of a recipe over a dataset, with checkpoints, resuming and recovery.

| phase    | work                                                                                         |
|----------|----------------------------------------------------------------------------------------------|
| open     | the folder is locked for this run (`lock.py`); its newest whole checkpoint is resumed, or    |
|          | the run begins                                                                               |
| step     | a global batch in micro-batches, a check of loss and gradients, the update (`loop.py`)       |
| boundary | between two steps no work is half done: logging, evaluation, checkpoints and stops           |
| end      | waits for checkpoints in progress, and saves the last step too                               |

A step depends only on the run's seed and its own number. A run that was killed and resumed therefore has the
same results as one that was not.

Events (`journal.py`):

- `started`: job, recipe, steps, samples, resumed_from.
- `step`, `foreseen` and `ended`: see `step_logger.py`.
- `evaluated`: step, loss, accuracy.
- `saved`: step, folder, bytes, blocked_seconds that training waited, seconds of writing meanwhile.
- `replanned`: step, cause, before, recipe, planning_seconds; of several processes also rank and resumed_from.
- `warning` and `note`: text; a warning of a straggler also has its rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snugfit.errors import UsageError
from snugfit.step.applier import engine_context, run_context
from snugfit.techniques.registry import hooks
from snugfit.training.checkpoint.manager import CheckpointManager, named_step, open_shared_store
from snugfit.training.checkpoint.manifest import Checkpoint
from snugfit.training.checkpoint.weights import no_progress_bars
from snugfit.training.interrupt import Interrupts, StopSignals
from snugfit.training.journal import Event, Journal
from snugfit.training.predicted import PredictRun, predict_nothing
from snugfit.training.recovery import Compare, Replan
from snugfit.training.run.run import Run, compare_runs, lengthens, moved_model
from snugfit.training.run.session import Session
from snugfit.training.run.trained import STOPPED, Trained

BEGIN_ANEW = "with --restart (from Python restart=True)"

CURE = (
    f" Resume it with the same settings, name another folder, or start again {BEGIN_ANEW}, which renames "
    "the old checkpoints."
)


def train(
    run: Run,
    *,
    restart: bool = False,
    resume_from: str | os.PathLike[str] | None = None,
    replan: Replan = lambda job, recipe, cause: None,
    compare: Compare = lambda job, step, model, batch, again: job,
    predict: PredictRun = predict_nothing,
    watch: Callable[[Event], None] = lambda event: None,
) -> Trained:
    """Train to the run's end or to a stop; resume the run if its folder has a checkpoint.

    `restart` begins anew and renames the old checkpoints. `resume_from` goes back to one of the folder's
    checkpoints, and later ones are renamed. `replan` chooses another recipe when memory runs out, `compare`
    compares micro-batches with the whole batch, `predict` predicts a recipe, `watch` receives every event.

    Raises `UsageError` for a run that cannot start or resume, and `OutOfMemory` if no recipe is left. Raises
    `SnugfitError` for a NaN loss, or if the last checkpoint could not be saved.
    """
    if restart and resume_from is not None:
        raise UsageError(
            "restart starts from the beginning, and resume_from_checkpoint resumes. Leave one of them out."
        )
    named = None if resume_from is None else Path(resume_from)
    if named is not None:
        named_step(named, run.folder)
    ranks = run.ranks

    def warn(text: str) -> None:
        journal.tell("warning", text=text)

    reports = [trackers().Reports(run, restart=restart, warn=warn) for trackers in hooks("trackers")]
    journal = Journal(run.folder.absolute(), watch, *reports) if ranks.is_first else Journal(None)
    with (
        open_shared_store(run.folder, run.ranks, begin_anew=BEGIN_ANEW) as store,
        run_context(run.setup(run.recipe)),
        engine_context(run.setup(run.recipe), run.device, lambda text: journal.tell("note", text=text)),
        no_progress_bars(),
    ):
        limit = run.options.save_total_limit
        checkpoints = CheckpointManager(store, journal, run.device, limit=limit, ranks=ranks)
        checkpoint = ranks.first_answers(lambda: _start(run, checkpoints, journal, named, restart))
        with Interrupts(
            store.root if ranks.is_first else None, stop_seconds=run.options.stop_seconds
        ) as interrupts:
            arguments: dict[str, Any] = {"replan": replan, "compare": compare, "predict": predict}
            stops = StopSignals(interrupts, ranks)
            session = Session(run, checkpoints, journal, stops, reports, **arguments)
            try:
                trained = session.train(
                    checkpoint, ranks.first_answers(lambda: _memory_record(run, checkpoint))
                )
            # Trackers are closed even after an error.
            finally:
                for report in reports:
                    report.end(None)
        if ranks.is_first and trained.outcome != STOPPED:
            _stop_memory_record(run)
        return trained


def _memory_record(run: Run, checkpoint: Checkpoint | None) -> Any:
    """Return the record of exhausted memory that ended all processes of this run, or None."""
    return next((code().restarts().record_of(run, checkpoint) for code in hooks("processes")), None)


def _stop_memory_record(run: Run) -> None:
    for code in hooks("processes"):
        code().restarts().forget(run.folder)


def _start(
    run: Run, checkpoints: CheckpointManager, journal: Journal, named: Path | None, restart: bool
) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run, and rename old checkpoints that a new run
    would overwrite.

    Raises `UsageError` for another run's checkpoint.
    """
    if restart:
        checkpoints.store.restart()
        _stop_memory_record(run)
    checkpoint = checkpoints.newest() if named is None else checkpoints.checkpoint_at(named, in_store=True)
    for note in (*run.data.notes, *(run.recipe.lines_on_cpu() if run.device.type == "cpu" else ())):
        journal.tell("note", text=note)
    if checkpoint is not None:
        wrong, changed = compare_runs(checkpoint.about, run, checkpoint.step)
        checkpoints.refuse_another_run(checkpoint, wrong, changed, cure=CURE)
        if note := moved_model(checkpoint.about, run):
            journal.tell("note", text=note)
        if note := lengthens(run, checkpoint.about, checkpoint.step):
            journal.tell("warning", text=note)
        if named is not None:
            checkpoints.discard_later(checkpoint)
    return checkpoint
