"""One call of a fitted trainer's `train()`: its folder, its checkpoints, its journal and its step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snugfit.frontends.trainer.checkpoints import Keeping
from snugfit.frontends.trainer.step_logger import Lines
from snugfit.frontends.trainer.step_state import StepState
from snugfit.training.checkpoint.lock import hold_folder
from snugfit.training.checkpoint.store import Store
from snugfit.training.interrupt import Interrupts


@dataclass(kw_only=True)
class FitRun:
    """What a `train()` that is going on works with."""

    checkpoints: Keeping
    logger: Lines
    step: StepState = field(default_factory=StepState)


@contextlib.contextmanager
def open_run(trainer: Any, resume_from: str | bool | None) -> Iterator[FitRun]:
    """The run of one `train()`, in a folder that is locked meanwhile; `checkpoints.resumed` is where it goes
    on. `trainer.snugfit_run` is the run within this context, and None outside of it."""
    notices = trainer.snugfit.notices
    store = Store(Path(trainer.args.output_dir))
    store.prepare()
    with hold_folder(store.root), Interrupts(store.root) as interrupts:
        store.sweep()
        checkpoints = Keeping(trainer, store, interrupts)
        notices.journal = checkpoints.journal
        try:
            checkpoints.open(resume_from)
            trainer.snugfit_run = FitRun(checkpoints=checkpoints, logger=Lines(trainer))
            yield trainer.snugfit_run
        finally:
            checkpoints.wait()  # nobody writes here once the folder is given back
            notices.journal = trainer.snugfit_run = None
