"""Log of a run's steps in its journal, next to their prediction, and the detection of steps slowed by too
little memory.

- `foreseen`: recipe, reserved_bytes, step_seconds and doubts, on a known GPU; or text, the reason for their
  absence. On several GPUs it comes after some steps, when the prediction is ready.
- `step`: step, epoch, loss, norm, learning_rate, updated, seconds, stall_seconds, samples, tokens; mfu if it
  is known; on a GPU every `logging_steps` the allocator's peaks.
- `ended`: outcome, step, step_seconds, the peaks.

Without a check before the update, the gradient norm of a step reaches the host one step later
(`run/loop.py`). The entry of a step is therefore stored first, and written when the norm is known. A step
that proves to be wrong is not written.

**Thrashing.** If the driver has no memory left for a request, torch's allocator frees its cached blocks and
tries again. Such a retry waits for the device and changes the layout of memory. A run with retries in each
step is very slow. The allocator counts them (`num_alloc_retries`).
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
"""Number of steps at the start of a process that count as warm-up, as in measurements
(`measurement/stopwatch.py`)."""

MEDIAN_STEPS = 1000
"""Number of last steps whose seconds enter the median that the run reports at its end."""

THRASHING = "allocation retries"
"""Name of the cause in the run's journal if the CUDA allocator frees its cache and retries in each step."""

RETRIES_IN_A_ROW = 3
"""Number of successive steps with allocation retries that counts as a lack of memory.

The first steps of a run may retry while they grow. The first step allocates the gradients and the optimizer's
states, and the second is the first with both. One retry may fix the layout of memory for good, such as after
an evaluation or the longest batch so far. A third one in a row shows that the new layout does not even serve
the next step. Composer, the source of this rule, takes two.
"""


def retries_of(device: torch.device) -> int:
    """Return how often CUDA's allocator in this process had to free its cache and retry; 0 on a device
    without such a counter.
    """
    import torch

    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


@final
class StepLogger:
    """Writes the steps of one training run into its journal, next to their prediction."""

    def __init__(
        self, journal: Journal, device: torch.device, *, every: int, predict: PredictRun = predict_nothing
    ) -> None:
        self._journal, self._device, self._every, self._predict = journal, device, every, predict
        self._recipe: Recipe | None = None
        self._awaited: Future[RunAnswer] | None = None
        self._predicted: PredictedRun | None = None
        self._predicted_figures: dict[str, Any] = {}
        self._seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def restart(self, job: Job, recipe: Recipe) -> None:
        """After a change of recipe, start new medians and peaks of the logged steps, and request the recipe's
        prediction.
        """
        if recipe != self._recipe:
            self._recipe, self._predicted, self._predicted_figures = recipe, None, {}
            answer = self._predict(job, recipe)
            self._awaited = answer if isinstance(answer, Future) else None
            if not isinstance(answer, Future):
                self._log_prediction(answer)
        self._noted: dict[str, Any] = {}
        self._steps = 0
        self._seconds.clear()
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        self.ignore_retries()

    def _log_prediction(self, answer: RunAnswer) -> None:
        """Write the prediction for this recipe into the journal, or the reason why there is none."""
        self._awaited = None
        self._predicted = answer if isinstance(answer, PredictedRun) else None
        self._predicted_figures = (
            {"text": answer} if isinstance(answer, str) else answer.to_json() if answer else {}
        )
        if answer is not None:
            self._journal.tell("foreseen", recipe=str(self._recipe), **self._predicted_figures)

    # ---- steps -------------------------------------------------------------------------------------------

    def note(self, *, step: int, seconds: float, samples: int, tokens: int, **fields: Any) -> None:
        """Store loss, seconds and other values of a finished step (numbered from 1), until `write` adds the
        gradients' norm.
        """
        # The prediction is computed during the training, and no step waits for it.
        if self._awaited is not None and self._awaited.done():
            self._log_prediction(self._awaited.result())
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
            # Reading memory peaks at each step would slow down small models.
            **(self._memory_peaks() if step % self._every == 0 else {}),
        }

    def write(self, norm: float | None) -> None:
        """Write the journal's line on the last stored step, with its gradient norm, unless it is written
        already.
        """
        if self._noted:
            self._journal.tell("step", **self._noted, norm=norm)
            self._noted = {}

    def end(self, outcome: str, step: int, *, in_words: bool = False) -> None:
        """Write the run's end after this step into the journal: the peaks, and the median seconds of its
        later steps.

        `in_words` adds a comparison with the prediction. A finished run waits for its prediction, a stopped
        one does not.
        """
        if self._awaited is not None and outcome == "finished":
            self._log_prediction(self._awaited.result())
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
        """Start counting the allocator's retries. Earlier ones are ignored."""
        self._retries: int | None = retries_of(self._device)
        self._retried_in_a_row = 0

    def ignore_retries(self) -> None:
        """Stop counting the allocator's retries, because no recipe can change now, or training has not
        started yet.
        """
        self._retries = None

    def is_thrashing(self) -> bool:
        """Return True if the last `RETRIES_IN_A_ROW` steps all had allocator retries, and then start counting
        again.
        """
        if self._retries is None:
            return False
        before, self._retries = self._retries, retries_of(self._device)
        self._retried_in_a_row = self._retried_in_a_row + 1 if self._retries > before else 0
        if self._retried_in_a_row < RETRIES_IN_A_ROW:
            return False
        self._retried_in_a_row = 0
        return True
