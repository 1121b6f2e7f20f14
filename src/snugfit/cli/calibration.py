"""The calibration file of this machine's GPU, from which later predictions take their rates.

`snugfit calibrate` writes it anew. What a verified plan teaches corrects its rates; beside them stands what
each correction came from: when, which job, which recipes, both factors, the errors before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import SnugfitError
from snugfit.evaluation.learn import LearnedFactors, slower
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import Rates, calibration_file, rates_for

if TYPE_CHECKING:
    from snugfit.comparison.compared_runs import ComparedRun
    from snugfit.job.gpu import Gpu

CORRECTED = "; corrected by "
"""Between the source of the rates and what corrected them."""

KEPT = 20
"""Corrections whose origin is kept; the rates hold all of them."""


def write_calibration(gpu: Gpu, document: dict[str, Any]) -> Path:
    """Writes the file of this GPU, whole or not at all; raises `SnugfitError` when it cannot be written."""
    file = calibration_file(gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_document(file, document)
    except OSError as error:
        raise SnugfitError(f"{file}: cannot be written ({error.strerror}).") from None
    return file


def remember(learned: LearnedFactors, runs: Sequence[ComparedRun], gpu: Gpu) -> LearnedFactors:
    """Writes the corrected rates of this GPU; gives what was learned with its file. What was not taken in
    changes nothing. Raises `SnugfitError` when the file cannot be written."""
    if not learned.changes_rates:
        return learned
    document = _read(gpu)
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": runs[0].job.model.name,
        "job_id": runs[0].job_id,
        "recipes": [str(run.recipe) for run in runs],
        **{name: value for name, value in learned.to_json().items() if name not in ("why_not", "file")},
        "versions": installed_versions(),
    }
    document["learned"] = [*document.get("learned", []), entry][-KEPT:]
    document["rates"] = _corrected_rates(rates_for(gpu), learned).to_json()
    return replace(learned, file=str(write_calibration(gpu, document)))


def _corrected_rates(rates: Rates, learned: LearnedFactors) -> Rates:
    """These rates with both factors taken in, and where that comes from."""
    source, _, _ = rates.source.partition(CORRECTED)
    changed = slower(rates, host=learned.host, device=learned.device)
    return replace(changed, source=f"{source}{CORRECTED}{len(learned.before)} verified runs")


def _read(gpu: Gpu) -> dict[str, Any]:
    """The file of this GPU, or an empty calibration where there is none."""
    file = calibration_file(gpu)
    try:
        return read_document(file)
    except FileNotFoundError:
        return {"schema": 1, "what": "calibration", "readings": [], "versions": installed_versions()}
    except BadDocument as fault:
        raise SnugfitError(f"{file}: cannot be read ({fault}).") from None
