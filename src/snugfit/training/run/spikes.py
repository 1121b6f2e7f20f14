"""A loss that jumps: a warning, or a reason to stop or to leave the step out, as the options say.

The rule is Lightning's (`SpikeDetection`): a loss that is worse than the one before, and further from the
mean of the last ten than `loss_spike_rtol` times that mean. Here it is checked before the update, so that a
step which is stopped or left out changes no weight. Losses that are left out are not remembered, as there;
those that are only warned of are, or a run on another level would be warned of for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from snugfit.training.run.loop import StepRejected

if TYPE_CHECKING:
    from snugfit.training.checkpoint.state import RunProgress
    from snugfit.training.journal import Journal
    from snugfit.training.options import TrainOptions

WINDOW = 10
"""Losses that the mean is taken over; with fewer nothing is called a spike."""

MOST_WARNINGS = 3
"""Of a process's spikes, how many are warned of; small losses jump often, and the journal holds them all."""


class LossSpike(StepRejected):
    """A step was not made, for a loss that jumps."""

    name, option = "spike", "on_loss_spike"

    def __init__(self, loss: float, mean: float) -> None:
        super().__init__(f"The loss is {loss:.4g}, after {WINDOW} with a mean of {mean:.4g}", loss, None)


@final
class Spikes:
    """Compares each loss of a run with those before it."""

    def __init__(self, options: TrainOptions, journal: Journal) -> None:
        self._rtol, self._policy = options.loss_spike_rtol, options.on_loss_spike
        self._journal, self._warnings = journal, 0

    def reject(self, loss: float, progress: RunProgress) -> LossSpike | None:
        """Before an update: why it is not made."""
        return None if self._policy == "warn" else self._spike(loss, progress)

    def remember(self, loss: float, progress: RunProgress) -> None:
        """After a step that was made: warns of a loss that has jumped, and remembers it."""
        if (
            self._policy == "warn"
            and self._warnings < MOST_WARNINGS
            and (spike := self._spike(loss, progress))
        ):
            self._warnings += 1
            last = " Further steps like this are not reported." if self._warnings == MOST_WARNINGS else ""
            what = str(spike).partition(";")[0]
            self._journal.tell("warning", text=f"Step {progress.step}: {what}.{last}")
        progress.losses = [*progress.losses, loss][-WINDOW:]

    def _spike(self, loss: float, progress: RunProgress) -> LossSpike | None:
        before = progress.losses
        if self._rtol is None or len(before) < WINDOW or loss <= before[-1]:
            return None
        mean = sum(before) / len(before)
        return LossSpike(loss, mean) if abs(loss - mean) >= self._rtol * abs(mean) else None
