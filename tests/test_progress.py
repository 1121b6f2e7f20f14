"""Progress of a search: one line that is rewritten, with a remaining time that does not jump."""

from __future__ import annotations

import io
import sys
from itertools import pairwise

import pytest

from small_models import small_job
from snugfit.cli import progress as shown_progress
from snugfit.cli.progress import show_progress
from snugfit.planning.keep import Kept
from snugfit.planning.search import progress as searching
from snugfit.planning.search.reasons import cures
from snugfit.planning.search.search import plan
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.units import GIB


class Terminal(io.StringIO):
    """A stderr that passes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress() as tell:
            for number in range(30):
                tell(f"judging {number} of 30, " + "a long word " * 9)
        assert ("judging" in stream.getvalue()) is shown
        assert stream.getvalue().count("\n") <= 2


def test_in_a_pipe_an_hour_is_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(shown_progress.time, "monotonic", lambda: clock)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with show_progress() as tell:
        for second in range(3600):
            clock = float(second)
            tell(f"judging {second}")
    seconds = [30, 60, 120, 240, 480, 960, 1920]
    assert stream.getvalue().splitlines() == [f"After {n} s: judging {n}" for n in seconds]


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_the_best_so_far_is_said_while_a_plan_is_searched() -> None:
    """The line first has no best recipe, and each later one is at least as fast. The last is as fast as
    the answer."""
    told: list[str] = []
    keep = {slot: roster.plain(slot) for slot in Slot if slot not in (Slot.PRECISION, Slot.BATCHING)}
    job = small_job("gpt2", 2, batch_size=4, sequence_length=32)
    answer = plan(job, gpu="h200", workers=1, keep=keep, tell=told.append)
    best = [text.split("best so far ")[1] for text in told if "best so far" in text]
    speeds = [float(text.split()[0].replace(",", "")) for text in best]
    assert "best so far" not in told[0]
    assert speeds == sorted(speeds)
    assert answer.best is not None
    assert speeds[-1] >= round(answer.best.samples_per_second, 1)
    assert Recipe.parse(best[-1].split(": ")[1])
    assert " MiB: " in best[-1]


def test_the_time_left_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in ten takes ten times as long. From the tenth part on, the estimated sum is right to a
    fifth."""
    clock = 0.0
    monkeypatch.setattr(searching.time, "monotonic", lambda: clock)
    lines: list[str] = []
    progress = searching.Progress("judging", 100, lines.append)
    left: list[int] = []
    for number in range(100):
        clock += 10.0 if number % 10 == 9 else 1.0
        progress.step()
        if "about" in lines[-1]:
            left.append(int(lines[-1].split("about ")[1].split()[0]))
    assert len(lines) == 100
    assert len(left) > 90
    assert max(later - earlier for earlier, later in pairwise(left)) <= 15
    assert left[-1] < 10


def test_what_will_be_skipped_is_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search skips nine in ten of a thousand parts in no time, most of them at the end."""
    clock = 0.0
    monkeypatch.setattr(searching.time, "monotonic", lambda: clock)
    lines: list[str] = []
    progress = searching.Progress("judging", 1000, lines.append)
    for number in range(1000):
        skips = number >= 200 or number % 2 == 1
        clock += 0.0 if skips else 1.0
        progress.step(skips, share=max(0, 200 - number) / 2 / (1000 - number))
        if "about" in lines[-1]:
            assert abs(int(lines[-1].split("about ")[1].split()[0]) - (100 - clock)) <= 5
    assert "about 0 s left" in lines[-1]


@pytest.mark.parametrize(("recipe", "cut"), [("micro_batches(4)", True), ("micro_batches(2)", False)])
def test_the_batch_is_cut_as_far_as_it_goes_only_where_it_is(recipe: str, cut: bool) -> None:
    job = small_job("gpt2", 1, batch_size=4, sequence_length=8)
    texts = cures(Recipe.parse(recipe), 2 * GIB, job, GIB, Fidelity.LEARNS, Kept())
    last = [*texts][-1]
    assert last.startswith("It would also fit with shorter sequences")
    assert ("cannot be cut further" in last) is cut
