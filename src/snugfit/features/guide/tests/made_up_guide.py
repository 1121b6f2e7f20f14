"""Invented results of the guide, without a simulation or a GPU, for tests of reports."""

from __future__ import annotations

from dataclasses import replace

from in_roster import missing_techniques
from made_up import footprint, job, timing
from snugfit.features.guide.per_parameter import PerParameter
from snugfit.features.guide.result import (
    GuideResult,
    GuideRow,
    LargeModelRow,
    ModernRow,
    PublishedPrediction,
    TakenInstead,
)
from snugfit.features.guide.suite import LargeModel, large_models, machines, suite, without_figures
from snugfit.results.speed import speed_of
from snugfit.units import GIB, MIB


def modern_row(row: GuideRow, today: GuideRow) -> ModernRow:
    """Return a row with another experiment's recipe as today's; none where that is refused."""
    if not row.predicted or not today.predicted:
        return ModernRow(name=row.name, memory_bytes=16160 * MIB, why_none="no recipe is as small")
    return ModernRow(
        name=row.name,
        memory_bytes=row.predicted_bytes,
        recipe=today.recipe,
        needed_bytes=today.predicted_bytes,
        speed=speed_of(0.1, job(), measured_rates=False),
        instead=(TakenInstead(slot="precision", then="as_loaded", now="bf16"),),
    )


def large_model_row(model: LargeModel) -> LargeModelRow:
    """Return a large model, predicted to fit."""
    return LargeModelRow(
        name=model.name,
        gpu="NVIDIA GeForce RTX 3090",
        recipe=model.recipe,
        why=model.why,
        needed_bytes=12 * GIB,
        fits=True,
        speed=speed_of(2.0, job(), measured_rates=False),
    )


def guide_result(*, measured: bool = False, modern: bool = False) -> GuideResult:
    """Return the guide's rows, each half a GiB smaller than the one before, the tf32 row refused.

    With `modern` every second row has a recipe of today.
    """
    known = machines()
    rows = []
    speed = speed_of(0.4, job(), measured_rates=False)
    for place, experiment in enumerate(suite()):
        size = (14 - place // 2) * GIB - 512 * MIB * (place % 2)
        row = GuideRow(
            name=experiment.name,
            recipe=experiment.recipe,
            loop=experiment.loop,
            predicted=footprint(size),
            predicted_speed=speed_of(0.4 + place / 10, job(), measured_rates=False),
            fits=True,
            then=tuple(
                PublishedPrediction(
                    published=one,
                    predicted_bytes=one.mib * MIB * 101 // 100 if known[one.machine].gpu else None,
                    predicted_speed=speed if known[one.machine].gpu else None,
                )
                for one in experiment.published
            ),
        )
        missing = missing_techniques(experiment.recipe)
        if experiment.name == "tf32" or missing:
            row = replace(row, predicted=None, predicted_speed=None, fits=None)
            why = f"Unknown technique {missing}" if missing else "it needs compute capability 8.0"
            row = replace(row, refused=f"tf32 cannot run this job:\ntf32: {why}")
        elif measured:
            row = replace(row, measured=footprint(size + 30 * MIB), timing=timing(20.0 + place), outcome="ok")
        rows.append(row)
    return GuideResult(
        gpu="Tesla V100-SXM2-16GB",
        memory_bytes=16160 * MIB,
        rows=tuple(rows),
        per_parameter=(
            PerParameter(
                model="bert-large-uncased",
                optimizer="adamw",
                weights=4,
                gradients=4,
                states=8,
                rest=4.1,
                peak="update",
                rule_states=8,
                rule_total=18,
            ),
            PerParameter(model="bert-large-uncased", optimizer="adamw_8bit", refused="not installed"),
        ),
        without_figures=without_figures(),
        modern=tuple(map(modern_row, rows[::2], rows[1::2])) if modern else (),
        large_models=tuple(map(large_model_row, large_models())) if modern else (),
        device="NVIDIA H200" if measured else None,
        versions={"torch": "2.13.0"},
    )
