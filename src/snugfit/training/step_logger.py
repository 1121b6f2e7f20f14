"""A run's steps in its journal, beside what was predicted, and whether memory is so short that they crawl.

    foreseen    where the GPU is known: recipe, reserved_bytes, step_seconds, doubts where there are some; or
                text, why that is not known; of a run on several GPUs when it is known, which is after some
                steps
    step        step, epoch, loss, norm, learning_rate, updated, seconds, stall_seconds, samples, tokens; mfu
                where it is known; on a GPU every `logging_steps` the allocator's peaks
    ended       outcome, step, step_seconds, the peaks

Where nobody waits for a step's norm it comes to the host one step later (`finite_check.py`), so a step is
noted when it is done and written when its norm is known; one that has turned out to be wrong is not written
at all.

**Thrashing.** Where the driver has nothing left for a request, torch's allocator gives back all that it keeps
unused and asks again, and the step goes on. That waits for the device and lays the memory out anew, and a run
that does it in each step crawls. The allocator counts such retries (`num_alloc_retries`).
"""

from __future__ import annotations

import statistics
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, final

from snugfit.training.predicted import (
    PredictedRun,
    PredictRun,
    RunAnswer,
    compare_with_prediction,
    predict_nothing,
)

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.journal import Journal

WARMUP = 3
"""Steps that a process takes before it is steady, as where steps are measured
(`measurement/stopwatch.py`)."""

REMEMBERED_STEPS = 1000
"""Steps whose seconds the median at the end is taken over: the last ones."""

THRASHING = "allocation retries"
"""The cause that a journal names when memory is short."""

RETRIES_IN_A_ROW = 3
"""Steps with retries, one after the other, that count as thrashing. The first steps of a run may retry while
they grow (the first makes the gradients and the optimizer's states, the second is the first with both), and
one retry may lay memory out for good, such as after an evaluation or the longest batch so far; the third in a
row shows that what a retry has laid out does not serve even the next step. Composer, whose rule this is,
takes two."""


def retries_of(device: torch.device) -> int:
    """How often this process's allocator has started over; 0 where there is none that counts."""
    import torch

    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


@final
class StepLogger:
    """Writes the steps of one run into its journal."""

    def __init__(
        self, journal: Journal, device: torch.device, *, every: int, predict: PredictRun = predict_nothing
    ) -> None:
        self._journal, self._device, self._every, self._predict = journal, device, every, predict
        self._recipe: Recipe | None = None
        self._awaited: Future[RunAnswer] | None = None
        self._predicted: PredictedRun | None = None
        self._predicted_figures: dict[str, Any] = {}
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def restart(self, job: Job, recipe: Recipe) -> None:
        """From here on under this recipe: its prediction is written once, and figures begin anew."""
        if recipe != self._recipe:
            self._recipe, self._predicted, self._predicted_figures = recipe, None, {}
            answer = self._predict(job, recipe)
            self._awaited = answer if isinstance(answer, Future) else None
            if not isinstance(answer, Future):
                self._hear(answer)
        self._noted: dict[str, Any] = {}
        self._steps = 0
        self._seconds.clear()
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        self.ignore_retries()

    def _hear(self, answer: RunAnswer) -> None:
        """Writes what is predicted under this recipe, or why that is not known."""
        self._awaited = None
        self._predicted = answer if isinstance(answer, PredictedRun) else None
        self._predicted_figures = (
            {"text": answer} if isinstance(answer, str) else answer.to_json() if answer else {}
        )
        if answer is not None:
            self._journal.tell("foreseen", recipe=str(self._recipe), **self._predicted_figures)

    # ---- steps -------------------------------------------------------------------------------------------

    def note(self, *, step: int, seconds: float, samples: int, tokens: int, **fields: Any) -> None:
        """Step `step` (the first is 1) is done; it is written by `write`."""
        if self._awaited is not None and self._awaited.done():
            self._hear(self._awaited.result())
        self._steps += 1
        if self._steps > WARMUP:
            self._seconds.append(seconds)
        mfu = self._predicted.mfu(seconds, samples, tokens) if self._predicted else None
        self._noted = {
            "step": step,
            **fields,
            "seconds": seconds,
            "samples": samples,
            "tokens": tokens,
            **({} if mfu is None else {"mfu": mfu}),
            # To ask at each step would cost small models something.
            **(self._memory_peaks() if step % self._every == 0 else {}),
        }

    def write(self, norm: float | None) -> None:
        """Writes the step that was noted last, whose gradients had this norm; nothing where that is done
        already."""
        if self._noted:
            self._journal.tell("step", **self._noted, norm=norm)
            self._noted = {}

    def end(self, outcome: str, step: int, *, in_words: bool = False) -> None:
        """The run has ended after this step: the peaks, and the median of its steady steps; `in_words` beside
        what was predicted. A run that has finished waits for its prediction, one that is stopped does not."""
        if self._awaited is not None and outcome == "finished":
            self._hear(self._awaited.result())
        steady = {"step_seconds": statistics.median(self._seconds)} if self._seconds else {}
        measured = {**self._memory_peaks(), **steady}
        lines = compare_with_prediction(self._predicted_figures, measured) if in_words else []
        text = {"text": "; ".join(lines)} if lines else {}
        self._journal.tell("ended", outcome=outcome, step=step, **measured, **text)

    def _memory_peaks(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        import torch

        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }

    # ---- thrashing ---------------------------------------------------------------------------------------

    def watch_retries(self) -> None:
        """From here on the allocator's retries count: those of building a run do not."""
        self._retries: int | None = retries_of(self._device)
        self._retried_in_a_row = 0

    def ignore_retries(self) -> None:
        """They do not count: nothing can be done about them, or nothing is trained yet."""
        self._retries = None

    def is_thrashing(self) -> bool:
        """After a step: whether it was the last of `RETRIES_IN_A_ROW` with retries. The next ones are counted
        anew."""
        if self._retries is None:
            return False
        before, self._retries = self._retries, retries_of(self._device)
        self._retried_in_a_row = self._retried_in_a_row + 1 if self._retries > before else 0
        if self._retried_in_a_row < RETRIES_IN_A_ROW:
            return False
        self._retried_in_a_row = 0
        return True
