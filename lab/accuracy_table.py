"""Write `docs/accuracy.md` from the files `results/accuracy-*.json`: a row for each draw of runs.

`lab/write_docs.py` calls it. A file has the first prediction of each run, the measurement, and for draws that
were predicted again the new prediction. `snugfit accuracy --show results --format markdown` prints all runs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
TEMPLATE = Path(__file__).with_suffix(".md")
FIGURES = ("requested_bytes", "reserved_bytes", "nvml_bytes")

HEADS = (
    "runs", "GPU", "number", "requested", "reserved", "on the GPU", "seconds", "again: reserved",
    "again: on the GPU", "again: seconds",
)  # fmt: skip


def page() -> str:
    """Return the page: the template with the table and the figures about all runs."""
    files = sorted(RESULTS.glob("accuracy-*.json"), key=_order)
    draws = [json.loads(file.read_text()) for file in files]
    rows = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    rows += ["| " + " | ".join(_cells(file, draw)) + " |" for file, draw in zip(files, draws, strict=True)]
    runs = [run for draw in draws for run in _measured(draw)]
    figures = {
        "table": "\n".join(rows),
        "runs": str(len(runs)),
        "seconds": _shares([_seconds_error(run, first=False) for run in runs], last=0.9, digits=1),
        "reserved": f"{sum((_error(run, 'reserved_bytes', first=False) or 0) <= 0.03 for run in runs)}",
        "gap": f"{100 * max(_gaps(draw for draw in draws if draw.get('kind') == 'top')):.1f} %",
    }
    text = TEMPLATE.read_text()
    for name, figure in figures.items():
        text = text.replace(f"<!-- {name} -->", figure)
    return text


def _measured(draw: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in draw["runs"] if run["outcome"] == "ok" and run["predicted"]]


def _gaps(draws: Iterable[dict[str, Any]]) -> Iterator[float]:
    """Yield for each planned job the loss of the first choice, as a share of its fastest recipe's seconds."""
    jobs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in (run for draw in draws for run in _measured(draw)):
        jobs[run["job_id"]].append(run)
    for runs in jobs.values():
        first = min(runs, key=lambda run: run["predicted_step_seconds"])
        yield first["step_seconds"] / min(run["step_seconds"] for run in runs) - 1


def _order(file: Path) -> tuple[bool, int, str]:
    """Return the place of a file: one GPU before several, then by the number of runs, the most last."""
    return "-gpus" in file.name, len(json.loads(file.read_text())["runs"]), file.name


def _cells(file: Path, draw: dict[str, Any]) -> Iterator[str]:
    runs = _measured(draw)
    count = {run.get("gpus") or 1 for run in runs}.pop()
    again = bool(draw.get("rescored"))
    yield f"[{_name(draw)}](../results/{file.name})"
    yield ("" if count == 1 else f"{count} x ") + draw["device"].removeprefix("NVIDIA ").split()[0]
    yield str(len(runs))
    for figure in FIGURES:
        yield _shares([_error(run, figure, first=True) for run in runs], last=1.0)
    yield _shares([_seconds_error(run, first=True) for run in runs], last=0.9, digits=1)
    for figure in FIGURES[1:]:
        yield _shares([_error(run, figure, first=False) for run in runs], last=1.0) if again else ""
    yield _shares([_seconds_error(run, first=False) for run in runs], last=0.9, digits=1) if again else ""


def _name(draw: dict[str, Any]) -> str:
    return f"seed {draw['seed']}" if draw["seed"] is not None else "six jobs"


def _error(run: dict[str, Any], figure: str, *, first: bool) -> float | None:
    """Return the absolute relative error of a figure, by the first prediction or the last one."""
    predicted = (run.get("original") if first else None) or run["predicted"]
    before, after = predicted.get(figure), run["measured"].get(figure)
    return abs(before / after - 1) if before is not None and after else None


def _seconds_error(run: dict[str, Any], *, first: bool) -> float | None:
    predicted = (run.get("original_step_seconds") if first else None) or run["predicted_step_seconds"]
    return abs(predicted / run["step_seconds"] - 1) if predicted and run["step_seconds"] else None


def _shares(errors: list[float | None], *, last: float, digits: int = 2) -> str:
    """Return the bound on half of the errors and the bound on this share of them, in per cent."""
    known = sorted(error for error in errors if error is not None)
    bounds = [known[max(0, -int(-share * len(known) // 1) - 1)] for share in (0.5, last)] if known else []
    return ", ".join(f"{100 * bound:.{digits}f}" for bound in bounds)
