"""Numbers in a technique's warnings equal those of the committed measurements.

The warnings of `fp8`, `budget`, `zero2` and `zero3` state by how much measured steps exceeded their
predicted time. This test computes the numbers again. They are measured seconds over predicted ones, of each
step under `results/` with the technique. After new rates or new steps, the failure shows the numbers to
write.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from in_roster import needs_techniques
from small_models import small_job
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.results.measurement import Measurement
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe

RESULTS = Path(__file__).parents[1] / "results"
STEPS = sorted((RESULTS / "h200-2026-11-24" / "techniques").glob("*.json"))
STEPS.append(RESULTS / "h200-2026-11-24" / "zero3-bert-large" / "measurement.json")
DRAWN = RESULTS / "accuracy-seed2411.json"

WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ROUNDING = 1
"""Percentage points: kernels, and so seconds, differ a little between versions of torch."""


APART = {"zero2": 7}
"""Rounding in percentage points of techniques with a less certain smallest value. Two environments with
equal versions gave 21 and 27 %, for an unknown reason."""


@functools.cache
def document(path: Path) -> dict[str, Any]:
    """Return the content of a committed file."""
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def ratios(name: str) -> Iterator[float]:
    """Yield measured seconds over predicted ones, of each step with this technique."""
    for path in STEPS:
        if _has(document(path)["recipe"], name):
            seen = Measurement.from_json(document(path))
            found = predict(seen.job, seen.recipe, gpu="h200", loop=seen.loop)
            assert seen.timing is not None
            assert found.timing is not None
            yield seen.timing.step_seconds / found.timing.step_seconds
    for run in document(DRAWN)["runs"]:
        if run["step_seconds"] and _has(run["recipe"], name):
            found = predict(Job.from_json(run["job"]), run["recipe"], gpu="h200")
            assert found.timing is not None
            yield run["step_seconds"] / found.timing.step_seconds


def _has(recipe: str, name: str) -> bool:
    return name in {technique.name for technique in Recipe.parse(recipe)}


def stated(name: str) -> tuple[int, int, int]:
    """Return a warning's number of steps, and the smallest and largest percentage by which these took
    longer.

    A sentence about both zero2 and zero3 has their numbers in this order.
    """
    technique = next(one for one in roster.techniques() if one.name == name)
    one = technique(share=0.5) if name == "budget" else technique()
    text = " ".join(one.warnings(small_job("llama", 2, padding=0.25), (9, 0))).lower()
    counted = re.findall(rf"\b({'|'.join(WORDS)})\b(?: steps?| of zero)", text)
    ranges = re.findall(r"(\d+) to (\d+) % more|(\d+) % less and (\d+) % more", text)
    assert len(counted) == len(ranges) > 0, text
    index = 1 if name == "zero3" else 0
    least, most, less, more = ranges[index]
    numbers = (int(least), int(most)) if least else (-int(less), int(more))
    return WORDS.index(counted[index]), *numbers


@pytest.mark.whole
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fp8", marks=pytest.mark.slow),  # the test predicts many steps again
        pytest.param("budget", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.slow),
    ],
)
def test_a_warning_s_numbers_are_the_files(name: str) -> None:
    needs_techniques(name)
    if lacking := next(one for one in roster.techniques() if one.name == name).missing_package():
        pytest.skip(lacking)
    more = [100 * (ratio - 1) for ratio in ratios(name)]
    found = len(more), round(min(more)), round(max(more))
    told = stated(name)
    both = f"{name}: the warning has {told} (steps, least %, most %), the files have {found}"
    assert told[0] == found[0], both
    rounding = APART.get(name, ROUNDING)
    assert max(abs(one - other) for one, other in zip(told, found, strict=True)) <= rounding, both
