"""Training: a recipe over a dataset, to its end, whatever happens on the way.

    open        the folder is this run's alone (`lock.py`); its newest whole checkpoint is taken up, or the
                run begins
    step        a global batch in micro-batches, a look at loss and gradients, the update (`loop.py`)
    border      between two steps nothing is half done: here it is logged, evaluated, kept, and stopped
    end         what is being kept is waited for; the last step is kept too

A step is a function of the run's seed and its number, so a run that was killed and resumed passes through the
same numbers as one that was not.

Events (`journal.py`): `started` (job, recipe, steps, samples, resumed_from), `step` (step, epoch, loss,
norm, learning_rate, seconds, stall_seconds, samples, tokens; where it is known mfu; on a GPU every
`logging_steps` the allocator's peaks), `foreseen` (recipe, reserved_bytes, step_seconds; or text, why
nothing is), `evaluated` (step, loss, accuracy), `saved` (step, folder, bytes, blocked_seconds that training
waited, seconds beside it), `replanned` (step, cause, before, recipe), `warning` and `note` (text), `ended`
(outcome, step, step_seconds, the peaks).
"""

from __future__ import annotations

from collections.abc import Callable

from snugfit.step.applier import run_context
from snugfit.training.checkpoint.bars import without_bars
from snugfit.training.checkpoint.lock import hold_folder
from snugfit.training.checkpoint.store import Store
from snugfit.training.interrupt import Interrupts
from snugfit.training.journal import Event, Journal
from snugfit.training.predicted import Foresee, nothing_foreseen
from snugfit.training.run.reporting import Reports
from snugfit.training.run.run import Run, refuse_another_run
from snugfit.training.run.session import Replan, Session
from snugfit.training.run.trained import Trained


def train(
    run: Run,
    *,
    restart: bool = False,
    replan: Replan = lambda job, recipe, cause: None,
    foresee: Foresee = nothing_foreseen,
    watch: Callable[[Event], None] = lambda event: None,
) -> Trained:
    """Trains to the run's end, or to where it is stopped; a run that stands in its folder is resumed.

    `restart` begins anew and keeps the old checkpoints under other names. `replan` is asked for another
    recipe when memory runs out, `foresee` what a recipe should take. `watch` hears every event.

    Raises `UsageError` for what cannot be run or resumed, `OutOfMemory` when no recipe is left, and
    `SnugfitError` when a loss is no number or the last checkpoint could not be kept.
    """
    journal = Journal(run.folder.absolute(), watch)
    reports = Reports(run, restart=restart, warn=lambda text: journal.tell("warning", text=text))
    journal.also_to(reports)
    store = Store(run.folder)
    store.prepare()
    with hold_folder(store.root), run_context(run.recipe.setup()), without_bars():
        store.sweep()
        if restart:
            store.restart()
        kept = store.newest()
        for broken in store.broken:
            journal.tell("warning", text=str(broken))
        for note in run.data.notes:
            journal.tell("note", text=note)
        if kept is not None:
            for change in refuse_another_run(kept.about, run, kept.folder):
                text = f"{change}: the run goes on correctly, and no longer bit for bit"
                journal.tell("warning", text=text)
        with Interrupts(store.root, stop_seconds=run.options.stop_seconds) as interrupts:
            session = Session(run, store, journal, interrupts, reports, replan=replan, foresee=foresee)
            try:
                return session.train(kept)
            finally:
                reports.ends(None)
