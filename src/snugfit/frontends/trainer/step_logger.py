"""A fitted trainer's steps in the journal, as the own loop tells its own, beside what was foreseen.

    foreseen    where the GPU is known: recipe, reserved_bytes, step_seconds
    step        step, epoch, loss, norm, learning_rate, updated, seconds, stall_seconds, samples, tokens; mfu
                and the allocator's peaks where they are known
    ended       outcome, step, step_seconds, the peaks; in words, foreseen beside seen

A step begins when its micro-batches are asked for and ends at its border, before the Trainer logs, evaluates
and saves. Most of them are made in the step before (`prefetch.py`), which has waited for data when the
device had nothing left to do when they came.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from snugfit.frontends.items import samples_in
from snugfit.frontends.predicted import foresees
from snugfit.frontends.trainer.setup import optimizer_is_theirs
from snugfit.job.batch import token_count
from snugfit.training.generators import preserve_generators
from snugfit.training.predicted import Foreseen, beside, nothing_foreseen
from snugfit.training.thrash import Thrash
from snugfit.training.throughput import Pace

if TYPE_CHECKING:
    import torch

    from snugfit.frontends.trainer.step_state import StepState


@final
class Lines:
    """The lines of one call of `train()`."""

    def __init__(self, trainer: Any) -> None:
        import torch

        self._trainer = trainer
        device = trainer.args.device
        self._foresee = nothing_foreseen if optimizer_is_theirs(trainer) else foresees(device)
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._began = self._stalled = 0.0
        self._samples = 0
        self.tokens: torch.Tensor | int = 0
        """Of the step, and where they lie: they are read when the step's loss is (`finite_check.py`)."""
        self._untold = False
        self.goes_on()

    def goes_on(self) -> None:
        """From here on under the recipe that the trainer has now."""
        trainer, plan = self._trainer, self._trainer.snugfit
        with preserve_generators(trainer.args.device):
            found = self._foresee(plan.job, plan.recipe)
        figures = {"text": found} if isinstance(found, str) else found.to_json() if found else {}
        self._expected = figures
        if figures:
            plan.notices.tell("foreseen", recipe=str(plan.recipe), **figures)
        known = found if isinstance(found, Foreseen) else None
        every = round(trainer.args.logging_steps)  # below 1 it is a share of all steps
        self._pace = Pace(trainer.args.device, every=max(1, every), foreseen=known)
        self._thrash: Thrash | None = Thrash(trainer.args.device)

    def begin(self) -> None:
        """A step begins."""
        self._began, self._stalled = time.perf_counter(), 0.0

    def computed(self) -> None:
        """All that a step computes was asked for, the update apart."""
        if self._event is not None:
            self._event.record()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Within it micro-batches are made."""
        began = time.perf_counter()
        yield
        if self._event is None or self._event.query():
            self._stalled += time.perf_counter() - began

    def fetched(self, batches: list[Any]) -> None:
        """These are they."""
        self._samples = sum(samples_in(each) for each in batches)
        self.tokens = sum(token_count(each) for each in batches)
        self._untold = bool(batches)

    def tell(self, step: StepState, learning_rate: float | None) -> bool:
        """At a border: the line of the step that ends there; False where there is none."""
        if not self._untold or step.figures is None or step.pending_micro_batches:
            return False
        self._untold = False
        trainer, state = self._trainer, self._trainer.state
        seconds = time.perf_counter() - self._began
        loss, norm, tokens = step.figures
        trainer.snugfit.notices.tell(
            "step",
            step=state.global_step,
            epoch=state.epoch,
            loss=loss,
            norm=norm,
            learning_rate=learning_rate,
            updated=not trainer.accelerator.optimizer_step_was_skipped,
            seconds=seconds,
            stall_seconds=self._stalled,
            samples=self._samples,
            tokens=tokens,
            **self._pace.told(state.global_step, seconds, self._samples, tokens),
        )
        return True

    def short(self) -> bool:
        """After a step: whether memory is so short that steps crawl."""
        return self._thrash is not None and self._thrash.seen()

    def stays_short(self) -> None:
        """There is nothing to be done about it; it is not asked any more."""
        self._thrash = None

    def end(self, outcome: str) -> None:
        """The run is over: what it took, beside what was foreseen."""
        seen = self._pace.in_all()
        lines = beside(self._expected, seen)
        said = {"text": "; ".join(lines)} if lines else {}
        step = self._trainer.state.global_step
        self._trainer.snugfit.notices.tell("ended", outcome=outcome, step=step, **seen, **said)
