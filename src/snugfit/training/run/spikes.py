"""A loss that jumps: told, or a reason to stop or to leave the step out, as the options say.

The rule is Lightning's (`SpikeDetection`): a loss that is worse than the one before, and further from the
mean of the last ten than `loss_spike_rtol` times that mean. Here it is looked at before the update, so that a
step which is stopped or left out changes no weight. Losses that are left out are not remembered, as there;
those that are only told are, or a run on another level would be told for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from snugfit.training.run.loop import Refused

if TYPE_CHECKING:
    from snugfit.training.checkpoint.state import Progress
    from snugfit.training.journal import Journal
    from snugfit.training.options import TrainOptions

WINDOW = 10
"""Losses that the mean is taken over; with fewer nothing is called a spike."""

MOST_TOLD = 3
"""Of a process's spikes, how many are told; small losses jump often, and the journal holds them all."""


class Spiked(Refused):
    """A loss jumps."""

    name, option = "spike", "on_loss_spike"

    def __init__(self, loss: float, mean: float) -> None:
        super().__init__(f"The loss is {loss:.4g}, after {WINDOW} with a mean of {mean:.4g}", loss, None)


@final
class Spikes:
    """Looks at one loss after the other."""

    def __init__(self, options: TrainOptions, journal: Journal) -> None:
        self._rtol, self._policy = options.loss_spike_rtol, options.on_loss_spike
        self._journal, self._told = journal, 0

    def refused(self, loss: float, progress: Progress) -> Spiked | None:
        """Before an update: why it is not made."""
        return None if self._policy == "warn" else self._found(loss, progress)

    def made(self, loss: float, progress: Progress) -> None:
        """After a step that was made: tells of a loss that has jumped, and remembers it."""
        if self._policy == "warn" and self._told < MOST_TOLD and (found := self._found(loss, progress)):
            self._told += 1
            last = " More such steps are not told." if self._told == MOST_TOLD else ""
            what = str(found).partition(";")[0]
            self._journal.tell("warning", text=f"Step {progress.step}: {what}.{last}")
        progress.losses = [*progress.losses, loss][-WINDOW:]

    def _found(self, loss: float, progress: Progress) -> Spiked | None:
        before = progress.losses
        if self._rtol is None or len(before) < WINDOW or loss <= before[-1]:
            return None
        mean = sum(before) / len(before)
        return Spiked(loss, mean) if abs(loss - mean) >= self._rtol * abs(mean) else None
