"""Law 7: for awkward modules, a prediction is right, doubted or refused; it is never silently wrong.

Each module of `awkward_*.py` declares one of these three outcomes. A right prediction equals the peak of
three real steps on the CPU, byte for byte. Law 1 makes the same comparison (`reported.py`). A doubt names
the assumption, and a refusal names the reason.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import awkward_autograd  # noqa: F401
import awkward_choices  # noqa: F401
import awkward_layers  # noqa: F401
import awkward_outputs  # noqa: F401
import awkward_shapes  # noqa: F401
from aligned import peak
from awkward_modules import CASES, EQUAL, Case
from cpu_scratch import compared
from reported import foreseen, reports
from snugfit.errors import SnugfitError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.record.questions import ValueReads
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe


def hold_to_law(case: Case) -> None:
    """Check law 7 for one module."""
    model = Model.from_module(case.make(), case.example())
    job, setup = (
        Job(model=model, task=Task.CUSTOM, batch_size=case.batch_size),
        Recipe.parse(case.recipe).setup(),
    )
    if case.refused:
        with pytest.raises(SnugfitError, match=case.says):
            rehearse(job, setup, CpuPolicy())
        return
    trace = rehearse(job, setup, CpuPolicy())
    doubts = " ".join(trace.doubts)
    if case.says != EQUAL:
        assert re.search(case.says, doubts), f"no doubt says {case.says}: {doubts or 'none'}"
        return
    assert not doubts, f"doubted: {doubts}"
    real, predicted = (peak(compared(events)) for events in (reports(job, setup), foreseen(trace)))
    assert predicted == real, f"{predicted:,} bytes predicted, {real:,} real"


def marks(number: int, case: Case) -> list[pytest.MarkDecorator]:
    """Put two of three cases into the slow tier."""
    tier = [pytest.mark.slow] if number % 3 else []
    return [*tier, pytest.mark.xfail(reason=case.xfail, strict=True)] if case.xfail else tier


@pytest.mark.whole
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=marks(number, case))
        for number, case in enumerate(sorted(CASES, key=lambda case: case.name))
    ],
)
def test_an_awkward_module_is_predicted_right_or_doubted_or_refused(case: Case) -> None:
    hold_to_law(case)


@pytest.mark.parametrize("name", ["OpensAGate", "RoutesByWhere", "DropsLayersByPython", "HasUnusedWeights"])
def test_a_guess_without_its_doubt_turns_the_law_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.name == name)
    hold_to_law(case)
    monkeypatch.setattr(Recorder, "warn", lambda self, sentence: None)
    with pytest.raises(AssertionError, match="no doubt says"):
        hold_to_law(case)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["TrimsToTheLongestRow", "LoopsAsLongAsARow"])
def test_a_silent_guess_of_what_the_batch_says_turns_the_law_red(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace each number read from the batch by 20, without a doubt."""
    (case,) = (case for case in CASES if case.name == name)
    real = ValueReads._value

    def guess(self: ValueReads, tensor: torch.Tensor) -> Any:
        value, assumption = real(self, tensor)
        return (value, assumption) if value.is_floating_point() else (torch.full_like(value, 20), None)

    monkeypatch.setattr(ValueReads, "_value", guess)
    with pytest.raises(AssertionError, match="bytes predicted"):
        hold_to_law(case)
