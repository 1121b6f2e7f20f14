"""Predict the seconds of recorded runs by shipped and by calibrated rates, beside the measured ones.

    python lab/recorded_seconds.py OUT.json [--every 3] [--only NAME]    predicts, and adds to OUT.json
    python lab/recorded_seconds.py OUT.json --summary                    prints and writes the medians

The runs are those of the draws on one GPU (`results/accuracy-seed*.json`) whose core was undisturbed. Runs on
GPUs that several programs shared are left out. Each is simulated once, and its seconds follow from three
kinds of rates: the shipped ones, those with another host (`FACTORS`), and the stored calibration. A second
call predicts the runs that OUT.json lacks.

The summary has the medians of `predicted / measured - 1` by bottleneck. It also has the share of runs inside
the printed range, and the widths that would contain 90 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import Rates, packaged_rates
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.measurement import HIGH_DISTURBANCE
from snugfit.techniques.recipe import Recipe
from snugfit.versions import versions

RESULTS = Path(__file__).resolve().parents[1] / "results"

CALIBRATIONS = {
    "accuracy-seed20261123-within-job": "h200-2026-11-22/calibration-seed20261123.json",
    "accuracy-seed20261124-within-job": "h200-2026-11-22/calibration-seed20261124.json",
    "accuracy-seed2511": "h100-2026-11-25/calibration.json",
    "accuracy-seed2611": "h100-2026-11-26/calibration-seed2611.json",
    "accuracy-seed2612": "h100-2026-11-26/calibration-seed2612.json",
}
"""File of the calibration of each draw's machine, by the draw's name."""

FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.45, 1.6, 1.8)
"""Seconds of a host's launches as multiples of those in `rates.json`."""


def recorded() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the name of the draw, the GPU's name, the number and the record of each undisturbed run."""
    for path in sorted(RESULTS.glob("accuracy-seed*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if "gpus" in path.stem:
            continue
        for number, run in enumerate(document["runs"]):
            quiet = (run.get("disturbed") or 0.0) <= HIGH_DISTURBANCE and not run.get("contaminated")
            # An update by DeepSpeed on the host takes minutes to simulate.
            if run.get("step_seconds") and quiet and "zero" not in run["recipe"]:
                yield path.stem, number, run | {"gpu": document["gpu"]}


def predicted(draw: str, number: int, run: dict[str, Any]) -> dict[str, Any]:
    """Return the measured seconds of this run with the seconds by shipped, scaled and calibrated rates."""
    row: dict[str, Any] = {"draw": draw, "number": number, "recipe": run["recipe"]}
    job, recipe, gpu = Job.from_json(run["job"]), Recipe.parse(run["recipe"]), find_gpu(run["gpu"])
    row |= {"family": run["family"], "measured": run["step_seconds"], "gpu": gpu.key}
    setup = recipe.setup()
    policy = policy_for(gpu, Software())
    try:
        trace = rehearse_from_few_layers(job, setup, policy) or rehearse(job, setup, policy)
    except SnugfitError as refusal:
        return row | {"refused": str(refusal)}
    rates, workers = packaged_rates(gpu), setup.loader.workers

    def seconds(given: Rates) -> Any:
        return step_seconds(trace, gpu, batch_size=job.batch_size, rates=given, workers=workers)

    shipped = seconds(rates)
    row |= {"device": shipped.device_seconds, "host": shipped.host_seconds, "bound": shipped.bound}
    row["shipped"] = shipped.step_seconds
    row["by_factor"] = [
        seconds(replace(rates, host=rates.host.slower(factor))).step_seconds for factor in FACTORS
    ]
    if draw in CALIBRATIONS:
        known = json.loads((RESULTS / CALIBRATIONS[draw]).read_text(encoding="utf-8"))["rates"]
        # Older calibrations have other prices of the host. Their common factor is that of `forward`.
        slower = known["host"]["forward"] / rates.host.forward
        calibrated = seconds(
            Rates.from_json(
                known | {"host": rates.host.slower(slower).to_json(), "power": rates.to_json()["power"]}
            )
        )
        row |= {"calibrated": calibrated.step_seconds, "calibrated_bound": calibrated.bound}
    return row


def errors(rows: Sequence[dict[str, Any]], name: str, host_bound: bool) -> list[float]:
    """Return `predicted / measured - 1` by shipped or calibrated rates, for one kind of bottleneck."""
    found = []
    for row in rows:
        value = row.get(name)
        bound = row["bound" if name == "shipped" else "calibrated_bound"] if value else ""
        if value and (bound in ("host", "loading")) is host_bound:
            found.append(value / row["measured"] - 1)
    return found


def spread(found: Sequence[float]) -> dict[str, float]:
    """Return the medians and the quantiles of these errors that enclose 90 % of them."""
    return {
        "runs": len(found),
        "signed_median": statistics.median(found),
        "median": statistics.median(map(abs, found)),
        "p90": float(np.quantile(np.abs(found), 0.9)),
        "low": float(np.quantile(found, 0.05)),
        "high": float(np.quantile(found, 0.95)),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of the errors by rates and bottleneck."""
    return {
        f"{name}, {'host' if host_bound else 'GPU'}-bound": spread(found)
        for name in ("shipped", "calibrated")
        for host_bound in (False, True)
        if (found := errors(rows, name, host_bound))
    }


def main() -> None:
    """Predict runs until the time is over, or summarise them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", default="", help="name of a draw, or a part of it")
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    rows = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    known = {(row["draw"], row["number"]) for row in rows}
    end = time.monotonic() + 60 * given.minutes
    for draw, number, run in recorded() if not given.summary else ():
        left_out = number % given.every or given.only not in draw or (draw, number) in known
        if left_out or time.monotonic() > end:
            continue
        rows.append(predicted(draw, number, run))
        print(draw, number, rows[-1].get("bound", "refused"), flush=True)
        # A run may be killed at its time limit.
        write_document(given.out, {"rows": rows})
    document = {"what": "recorded seconds", "factors": FACTORS, "versions": versions(), "rows": rows}
    shown = summary([row for row in rows if "by_factor" in row])
    write_document(given.out, document | {"summary": shown})
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
