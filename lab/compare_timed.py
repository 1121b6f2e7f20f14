"""Predict the runs of `timed_runs.py` with the packages of this process, beside the measured figures.

    python lab/compare_timed.py OUT.json TIMED.json ... [--rates CALIBRATION.json]    adds runs that OUT lacks
    python lab/compare_timed.py OUT.json --summary                                    prints the errors

Bytes that earlier runs of the process left allocated are subtracted, and the summary leaves out runs with
more than `MOST_LEFT` of them. Reserved bytes are compared where the recipe has no allocator setting, because
the process has one allocator for all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from snugfit.documents import write_document
from snugfit.errors import one_line
from snugfit.features.accuracy.files import read_rates
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from snugfit.versions import versions

KINDS = ("requested", "allocated", "reserved")
MOST_LEFT = 1 << 20


def predicted(row: dict[str, Any], rates: Any) -> dict[str, Any]:
    """Return the predicted bytes and seconds of a measured run on an H200."""
    gpu = find_gpu("h200")
    prediction = predict(Job.from_json(row["job"]), Recipe.parse(row["recipe"]), gpu=gpu, rates=rates)
    footprint, timing = prediction.footprint, prediction.timing
    assert timing is not None
    return {f"{kind}_bytes": getattr(footprint, f"{kind}_bytes") for kind in KINDS} | {
        "step_seconds": timing.step_seconds, "host_seconds": timing.host_seconds,
        "device_seconds": timing.device_seconds, "bound": timing.bound,
    }  # fmt: skip


def compared(row: dict[str, Any], rates: Any) -> dict[str, Any]:
    """Return a run with its measured and predicted figures, or with the reason for which it has none."""
    job = row["job"]
    run = {"model": job["model"]["name"], "task": job["task"], "recipe": row["recipe"]}
    if not row.get("step_seconds"):
        return run | {"not_measured": row.get("refused")}
    left = row.get("left_bytes", 0)
    keys = ("step_seconds", "spread", "disturbed", "mhz", "watts", "left_bytes")
    measured = {key: row.get(key) for key in keys}
    for kind in KINDS:
        if (peak := row.get(f"{kind}_bytes")) is not None:
            measured[f"{kind}_bytes"] = peak - left
    try:
        return run | {"measured": measured, "predicted": predicted(row, rates)}
    except Exception as fault:  # the other runs are predicted all the same
        return run | {"measured": measured, "not_predicted": one_line(fault)}


def errors(rows: Sequence[dict[str, Any]], figure: str) -> Iterator[float]:
    """Yield predicted / measured - 1 of a figure."""
    for row in rows:
        compares = figure != "reserved_bytes" or "expandable" not in row["recipe"]
        if figure.endswith("_bytes"):
            compares &= (row.get("measured", {}).get("left_bytes") or 0) <= MOST_LEFT
        if compares and "predicted" in row and row["measured"].get(figure):
            yield row["predicted"][figure] / row["measured"][figure] - 1


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of runs, the signed and absolute median and the 90th percentile by figure."""
    by_host = [row for row in rows if "predicted" in row and row["predicted"]["bound"] == "host"]
    by_gpu = [row for row in rows if "predicted" in row and row["predicted"]["bound"] != "host"]
    groups = {f"{kind}_bytes": (rows, f"{kind}_bytes") for kind in KINDS} | {
        "seconds, host-bound": (by_host, "step_seconds"), "seconds, others": (by_gpu, "step_seconds"),
    }  # fmt: skip
    table = {}
    for name, (chosen, figure) in groups.items():
        found = list(errors(chosen, figure))
        absolute = sorted(map(abs, found))
        if found:
            table[name] = {
                "runs": len(found), "signed_median": statistics.median(found),
                "median": statistics.median(absolute), "p90": absolute[int(0.9 * (len(absolute) - 1))],
                "within_0.05_percent": sum(error <= 0.0005 for error in absolute),
                "worst": absolute[-1],
            }  # fmt: skip
    return table


def main() -> None:
    """Predict the runs that the file lacks, or print its summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("timed", type=Path, nargs="*")
    parser.add_argument("--rates", type=Path)
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": {}}
    rates = read_rates(given.rates, find_gpu("h200")) if given.rates else None
    for file in given.timed:
        for number, row in enumerate(json.loads(file.read_text(encoding="utf-8"))["rows"]):
            name = f"{file.stem}/{number}"
            if name not in known["rows"]:
                known["rows"][name] = compared(row, rates)
                known = {"what": "timed runs beside predictions", "versions": versions(), **known}
                write_document(given.out, known)
    known["summary"] = summary(list(known["rows"].values()))
    write_document(given.out, known)
    print(json.dumps(known["summary"], indent=1))


if __name__ == "__main__":
    main()
