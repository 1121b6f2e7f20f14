"""The calibration file of this machine's GPU, from which later predictions take their rates.

`snugfit calibrate` writes it anew. What a verified plan teaches corrects its rates; beside them stands what
each correction came from: when, which job, which recipes, both factors, the errors before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import SnugfitError
from snugfit.evaluation.learn import LearnedFactors, learn, nothing_learned, slower
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import Rates, calibration_file, rates_for

if TYPE_CHECKING:
    from snugfit.comparison.compared_runs import ComparedRun
    from snugfit.job.gpu import Gpu

CORRECTED = "; corrected by "
"""Between the source of the rates and what corrected them."""

KEPT = 20
"""Corrections whose origin is kept; the rates hold all of them."""


def write_calibration(file: Path, document: dict[str, Any]) -> None:
    """Writes a GPU's file, whole or not at all; raises `SnugfitError` when it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_document(file, document)
    except OSError as error:
        raise SnugfitError(f"{file}: cannot be written ({error.strerror}).") from None


def learn_from(
    runs: Sequence[ComparedRun], gpu: Gpu, *, workers: int, tell: Callable[[str], None]
) -> LearnedFactors:
    """What the calibration took in of these measured runs, or why nothing: runs are shown in any case."""
    try:
        rates = rates_for(gpu)
        return remember(learn(runs, gpu, rates=rates, workers=workers, tell=tell), runs, gpu, rates)
    except SnugfitError as failure:
        return nothing_learned(str(failure))


def remember(learned: LearnedFactors, runs: Sequence[ComparedRun], gpu: Gpu, rates: Rates) -> LearnedFactors:
    """Writes this GPU's rates with what was learned taken in; gives what was learned with its file. Factors
    that are not believed change nothing. Raises `SnugfitError` when the file cannot be written."""
    if not learned.changes_rates:
        return learned
    file = calibration_file(gpu)
    document = _read(file)
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": runs[0].job.model.name,
        "job_id": runs[0].job_id,
        "recipes": [str(run.recipe) for run in runs],
        **{name: value for name, value in learned.to_json().items() if name not in ("why_not", "file")},
        "versions": installed_versions(),
    }
    document["learned"] = [*document.get("learned", []), entry][-KEPT:]
    document["rates"] = _corrected_rates(rates, learned).to_json()
    write_calibration(file, document)
    return replace(learned, file=str(file))


def _corrected_rates(rates: Rates, learned: LearnedFactors) -> Rates:
    """These rates with both factors taken in, and where that comes from."""
    source, _, _ = rates.source.partition(CORRECTED)
    changed = slower(rates, host=learned.host, device=learned.device)
    return replace(changed, source=f"{source}{CORRECTED}{len(learned.before)} verified runs")


def _read(file: Path) -> dict[str, Any]:
    """What a GPU's file holds, or an empty calibration where there is none."""
    try:
        return read_document(file)
    except FileNotFoundError:
        return {"schema": 1, "what": "calibration", "readings": [], "versions": installed_versions()}
    except BadDocument as fault:
        raise SnugfitError(f"{file}: cannot be read ({fault}).") from None
