"""What is told while a plan is searched: one line that is rewritten, and a time left that does not jump."""

from __future__ import annotations

import io
import sys
from itertools import pairwise

import pytest

from small_models import small_job
from snugfit.cli.progress import show_progress
from snugfit.planning.keep import Kept
from snugfit.planning.search import state
from snugfit.planning.search.reasons import cures
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity
from snugfit.units import GIB


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

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


def test_the_time_left_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in ten takes ten times as long; the sum is known to a fifth from the tenth part on."""
    clock = 0.0
    monkeypatch.setattr(state.time, "monotonic", lambda: clock)
    lines: list[str] = []
    progress = state.Progress("judging", 100, lines.append)
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


@pytest.mark.parametrize(("recipe", "cut"), [("micro_batches(4)", True), ("micro_batches(2)", False)])
def test_the_batch_is_cut_as_far_as_it_goes_only_where_it_is(recipe: str, cut: bool) -> None:
    job = small_job("gpt2", 1, batch_size=4, sequence_length=8)
    texts = cures(Recipe.parse(recipe), 2 * GIB, job, GIB, Fidelity.LEARNS, Kept())
    last = [*texts][-1]
    assert last.startswith("Or with shorter sequences")
    assert ("cut as far as it goes already" in last) is cut
