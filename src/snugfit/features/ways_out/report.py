"""Sentences on the changes with which a step fits, for reports and for errors."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from snugfit.job.gpu import find_gpu
from snugfit.report.text.answer import show_gib
from snugfit.report.text.facts import LABEL, Facts
from snugfit.report.text.pace import roughly
from snugfit.report.text.page import Sentence
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut
from snugfit.units import show_bytes, show_seconds

MANY = 3
"""Number of changes from which no further command is suggested."""

NO_SLOWDOWN = 0.0005
"""Share of a step below which a slowdown is not shown."""

FIDELITY = {"same": "exact", "rounds": "rounds differently", "learns": "another algorithm"}
"""Words for the fidelity of a change."""


def about_ways_out(ways: WaysOut, command: str, of: str = "the recipe") -> Iterator[str]:
    """Yield a heading, a line for each change and the first one as an option.

    With few changes, a further `command` follows. They are changes `of` the recipe of this name.
    """
    if ways.ways:
        yield f"Changes of {of} that fit, the cheapest first (predicted):"
        for number, way in enumerate(ways.ways, 1):
            yield f"{number}. {_about(way)}"
        yield f"The first one: --recipe {shlex.quote(ways.ways[0].recipe)}"
    elif ways.larger_gpu:
        yield f"No change of {of} was found that fits. {_about_larger(ways.larger_gpu)}"
    if len(ways.ways) < MANY and command:
        yield f"A plan searches all techniques: {command}"


def in_short(ways: WaysOut) -> Iterator[Facts | Sentence]:
    """Yield lines of a report: each change that fits, then the option `--recipe` for the first; else a larger
    GPU.
    """
    changes = map(_about, ways.ways) if ways.ways else filter(None, [_about_larger(ways.larger_gpu)])
    rows = tuple(("" if number else "fits with", text) for number, text in enumerate(changes))
    if rows:
        yield Facts(rows)
    if ways.ways:
        option = f"--recipe {shlex.quote(ways.ways[0].recipe)}"
        yield Sentence(f"{'':{LABEL}}  {option}", "recipe")


def _about(way: WayOut) -> str:
    figures = [show_gib(way.needed_bytes)]
    if way.step_seconds is not None:
        figures += [f"{roughly(way.step_seconds)} a step{_slowdown(way.slowdown)}"]
    figures += [FIDELITY[way.fidelity]]
    figures += [f"tight: {show_bytes(way.spare_bytes)} to spare"] if way.tight else []
    return f"{' + '.join(way.changes)}: {', '.join(figures)}."


def _slowdown(share: float | None) -> str:
    if share is None:
        return ""
    return " (no slower)" if abs(share) < NO_SLOWDOWN else f" ({100 * share:+.1f} %)"


def _about_larger(larger: LargerGpu | None) -> str:
    if larger is None:
        return ""
    figures = show_bytes(larger.needed_bytes)
    figures += f", {show_seconds(larger.step_seconds)} a step" if larger.step_seconds is not None else ""
    return (
        f"The smallest GPU that fits is {find_gpu(larger.gpu, exact=True).name}, with "
        f"{show_bytes(larger.memory_bytes)}: {larger.recipe} takes {figures}."
    )
