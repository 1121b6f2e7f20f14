"""Spikes of the loss: a warning, a stop or a skipped step, as the options require.

The rule is Lightning's (`SpikeDetection`). A spike is higher than the previous loss. It also differs from the
mean of the last ten losses by more than `loss_spike_rtol` times that mean. Unlike in Lightning, the check
comes before the update, so that a stopped or skipped step changes no weight. Losses of skipped steps are not
stored, as in Lightning. Losses that only gave a warning are stored. Otherwise, a run whose losses stay at a
higher level would warn in each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from snugfit.training.run.loop import StepRejected

if TYPE_CHECKING:
    from snugfit.training.checkpoint.state import RunProgress
    from snugfit.training.journal import Journal
    from snugfit.training.options import TrainOptions

WINDOW = 10
"""Number of previous losses in the mean that defines a spike. Before there are as many, no loss is a spike.
"""

MOST_WARNINGS = 3
"""Largest number of warnings about loss spikes per process. Small losses often have spikes, and the journal
contains all losses."""


class LossSpike(StepRejected):
    """Error that rejects a training step because its loss is far above the previous losses."""

    name, option = "spike", "on_loss_spike"

    def __init__(self, loss: float, mean: float) -> None:
        super().__init__(f"The loss is {loss:.4g}, after {WINDOW} with a mean of {mean:.4g}", loss, None)


@final
class Spikes:
    """Detects spikes: a loss that is far above the previous losses of the run."""

    def __init__(self, options: TrainOptions, journal: Journal) -> None:
        self._rtol, self._policy = options.loss_spike_rtol, options.on_loss_spike
        self._journal, self._warnings = journal, 0

    def reject(self, loss: float, progress: RunProgress) -> LossSpike | None:
        """Return the error that rejects a step with this loss before its update, or None."""
        return None if self._policy == "warn" else self._spike(loss, progress)

    def add_loss(self, loss: float, progress: RunProgress) -> None:
        """Store the loss of a finished step, and warn if it is a spike."""
        if (
            self._policy == "warn"
            and self._warnings < MOST_WARNINGS
            and (spike := self._spike(loss, progress))
        ):
            self._warnings += 1
            last = " Further steps like this are not reported." if self._warnings == MOST_WARNINGS else ""
            description = str(spike).partition(";")[0]
            self._journal.tell("warning", text=f"Step {progress.step}: {description}.{last}")
        progress.losses = [*progress.losses, loss][-WINDOW:]

    def _spike(self, loss: float, progress: RunProgress) -> LossSpike | None:
        before = progress.losses
        if self._rtol is None or len(before) < WINDOW or loss <= before[-1]:
            return None
        mean = sum(before) / len(before)
        return LossSpike(loss, mean) if abs(loss - mean) >= self._rtol * abs(mean) else None
