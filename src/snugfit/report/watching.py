"""Display of a training run in progress: a bar on a terminal, plain lines elsewhere.

    step 120 of 500  (epoch 0.96)  loss 0.4120  norm 1.93  rate 3.8e-05  71.2 samples/s  9,113 tokens/s
    38.2% MFU  waiting for data 3%  31.20 GiB reserved of 33.00 GiB predicted  0:01:12 left

Only events of the journal (`training/journal.py`) are shown, so that all of it can be read again afterwards.
Speeds are means since the last line.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from snugfit.errors import escape_controls
from snugfit.training.predicted import compare_with_prediction
from snugfit.training.step_logger import THRASHING
from snugfit.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from snugfit.training.journal import Event

STALLED = 0.1
"""Share of a step spent on waiting for data, above which the report proposes more data loader workers
(chosen)."""


class Watching:
    """Prints the events of a running training as they happen. Without a `started` event, in a hand-written
    loop, the last step is unknown.
    """

    def __init__(self, every: int, *, out: TextIO | None = None, bar: bool | None = None) -> None:
        self._out = out or sys.stderr
        self._every, self._steps, self._since = every, 0, _LineSums()
        self._expected: Event = {}
        self._reserved_bytes = 0
        self._bar = _Bar() if (self._out.isatty() if bar is None else bar) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.close()

    def __call__(self, event: Event) -> None:
        """Print one event of the training journal; an event without a line is ignored."""
        show = getattr(self, f"_on_{event['event']}", None)
        if show is not None:
            show(event)

    def _print_line(self, text: str) -> None:
        if self._bar:
            self._bar.print_line(escape_controls(text))
        else:
            with suppress(OSError):  # a closed terminal must not end the run
                print(escape_controls(text), file=self._out, flush=True)

    def _on_started(self, event: Event) -> None:
        self._steps = event["steps"]
        resumed = event["resumed_from"]
        start = f"continues after step {resumed:,}" if resumed is not None else "begins"
        self._print_line(
            f"{event['job']} {start}: {event['steps']:,} steps over {event['samples']:,} samples, as"
            f" {event['recipe']}"
        )
        if self._bar:
            self._bar.open(event["steps"], resumed or 0)

    def _on_step(self, event: Event) -> None:
        self._since.add(event)
        if self._bar:
            self._bar.move(event["step"], self._short(event))
        if event["step"] % self._every == 0 or event["step"] == self._steps:
            if not self._bar:
                # The remaining time is negative if the last step is unknown, and is then not shown.
                left = (self._steps - event["step"]) * self._since.seconds / self._since.steps
                more = f"  {timedelta(seconds=round(left))} left" if left > 0 else ""
                of = f" of {self._steps:,}" if self._steps else ""
                self._print_line(f"step {event['step']:,}{of}  {self._short(event)}{more}")
            self._propose_workers()
            self._since = _LineSums(proposed=self._since.proposed)

    def _propose_workers(self) -> None:
        share = self._since.stalled / self._since.seconds if self._since.seconds else 0.0
        if share > STALLED and self._since.steps > 1 and not self._since.proposed:
            self._since.proposed = True
            self._print_line(
                f"{share:.0%} of a step is spent waiting for data. More loader workers would help."
            )

    def _on_evaluated(self, event: Event) -> None:
        accuracy = "" if event["accuracy"] is None else f", accuracy {event['accuracy']:.2%}"
        self._print_line(f"evaluation after step {event['step']:,}: loss {event['loss']:.4f}{accuracy}")

    def _on_saved(self, event: Event) -> None:
        waited, beside = show_seconds(event["blocked_seconds"]), show_seconds(event["seconds"])
        self._print_line(
            f"saved {event['folder']} ({show_bytes(event['bytes'])}; training waited {waited}, the rest "
            f"took {beside} in the background)"
        )

    def _on_replanned(self, event: Event) -> None:
        if event["cause"] == THRASHING:
            self._print_line(
                f"memory is too tight ({THRASHING} in several steps in a row) with {event['before']}. From "
                f"step {event['step']:,} the recipe is {event['recipe']}, with the same global batch"
            )
            return
        ran_out = f"memory ran out ({event['cause']}) in step {event['step']:,} with {event['before']}"
        if "rank" in event:
            self._print_line(
                f"{ran_out}, on rank {event['rank']}. All processes have started again: the run continues "
                f"from step {event['resumed_from']:,} with {event['recipe']}, with the same global batch"
            )
            return
        self._print_line(
            f"{ran_out}. The step is repeated with {event['recipe']}, with the same global batch"
        )

    def _on_foreseen(self, event: Event) -> None:
        self._expected, self._reserved_bytes = event, 0
        if "text" in event:
            self._print_line(event["text"])
        for doubt in event.get("doubts", ()):
            self._print_line(f"uncertain: {doubt}")

    def _on_note(self, event: Event) -> None:
        self._print_line(event["text"])

    def _on_warning(self, event: Event) -> None:
        self._print_line(f"warning: {event['text']}")

    def _on_ended(self, event: Event) -> None:
        self._print_line(f"{event['outcome']} after step {event['step']:,}")
        for line in compare_with_prediction(self._expected, event):
            self._print_line(line)

    def _short(self, event: Event) -> str:
        parts = [*_of_the_step(event), *self._since.speeds()]
        self._reserved_bytes = event.get("reserved_bytes", self._reserved_bytes)  # only some events have it
        if self._reserved_bytes:
            limit = self._expected.get("reserved_bytes")
            more = f" of {show_bytes(limit)} predicted" if limit else ""
            parts.append(f"{show_bytes(self._reserved_bytes)} reserved{more}")
        return "  ".join(parts)


class _LineSums:
    """Sums since the last printed line: steps, samples, tokens, seconds, seconds that wait for data. It also
    sums the seconds that the arithmetic takes at the data sheet's peak rate.
    """

    def __init__(self, *, proposed: bool = False) -> None:
        self.steps, self.samples, self.tokens = 0, 0, 0
        self.seconds, self.stalled, self.at_peak = 0.0, 0.0, 0.0
        self.proposed = proposed
        """True once a report has proposed more data loader workers."""

    def add(self, event: Event) -> None:
        self.steps += 1
        self.samples += event["samples"]
        self.tokens += event["tokens"]
        self.seconds += event["seconds"]
        self.stalled += event["stall_seconds"]
        self.at_peak += event["seconds"] * event.get("mfu", 0.0)

    def speeds(self) -> list[str]:
        """Return speeds as text, such as samples and tokens per second, and the share of time that waits for
        data.
        """
        if not self.seconds:
            return []
        parts = [f"{self.samples / self.seconds:,.1f} samples/s"]
        if self.tokens:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s")
        if self.at_peak:
            parts.append(f"{self.at_peak / self.seconds:.1%} MFU")
        if self.stalled > 0.01 * self.seconds:
            parts.append(f"waiting for data {self.stalled / self.seconds:.0%}")
        return parts


def _of_the_step(event: Event) -> list[str]:
    return [
        f"(epoch {event['epoch']:.2f})",
        f"loss {event['loss']:.4f}",
        *([] if event["norm"] is None else [f"norm {event['norm']:.3g}"]),
        f"rate {event['learning_rate']:.3g}",
    ]


class _Bar:
    """A progress bar on stderr, drawn by rich."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def open(self, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            console=Console(stderr=True, markup=False, emoji=False, highlight=False),
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, completed=done, what="")

    def move(self, step: int, label: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, what=label)

    def print_line(self, text: str) -> None:
        if self._progress is not None:
            # Lines must be printed by the progress bar's console, which puts them above the bar.
            self._progress.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
