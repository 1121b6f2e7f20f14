"""Invented training runs with predictions and measurements, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made_up import footprint, job
from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.techniques.recipe import Recipe


def a_run(number: int, foreseen: float, seen: float | None, **changes: Any) -> ComparedRun:
    whole = ComparedRun(
        number=number,
        family="bert",
        job=job(),
        recipe=Recipe.parse(f"micro_batches({number + 2})"),
        predicted=footprint(),
        fits=True,
        predicted_step_seconds=foreseen,
        outcome="ok" if seen else "oom:torch",
        measured=footprint() if seen else None,
        step_seconds=seen,
    )
    return replace(whole, **changes)
