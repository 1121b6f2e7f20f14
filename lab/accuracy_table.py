"""Write two pages from the files `results/accuracy-*.json`, each of which is a draw of runs.

`docs/accuracy.md` has a row for each kind and number of GPUs, `dev/accuracy.md` one for each draw.
`lab/write_docs.py` calls it. A file has the first prediction of each run, the measurement, and for draws that
were predicted again the new prediction. `snugfit accuracy --show results --format markdown` prints all runs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PAGES = {"docs/accuracy.md": "accuracy_table.md", "dev/accuracy.md": "accuracy_draws.md"}
"""The template of each page."""

FIGURES = ("requested_bytes", "reserved_bytes", "nvml_bytes")

USER_HEADS = (
    "GPU", "runs", "first: reserved", "first: on the GPU", "first: seconds", "last: reserved",
    "last: on the GPU", "last: seconds",
)  # fmt: skip

HEADS = (
    "runs", "GPU", "number", "requested", "reserved", "on the GPU", "seconds", "again: reserved",
    "again: on the GPU", "again: seconds",
)  # fmt: skip


def pages() -> dict[str, str]:
    """Return the text of each page: its template with the tables and the figures about all runs."""
    files = sorted(RESULTS.glob("accuracy-*.json"), key=_order)
    draws = [json.loads(file.read_text()) for file in files]
    runs = [run for draw in draws for run in _measured(draw)]
    figures = {
        "table": _table(USER_HEADS, _rows_by_gpu(draws)),
        "draws": _table(HEADS, (_cells(file, draw) for file, draw in zip(files, draws, strict=True))),
        "runs": str(len(runs)),
        "seconds": _shares([_seconds_error(run, first=False) for run in runs], last=0.9, digits=1),
        "reserved": f"{sum((_error(run, 'reserved_bytes', first=False) or 0) <= 0.03 for run in runs)}",
        "gap": f"{100 * max(_gaps(draw for draw in draws if draw.get('kind') == 'top')):.1f} %",
    }
    made = {}
    for path, template in PAGES.items():
        made[path] = Path(__file__).with_name(template).read_text()
        for name, figure in figures.items():
            made[path] = made[path].replace(f"<!-- {name} -->", figure)
    return made


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rows_by_gpu(draws: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of each kind and number of GPUs, with the errors of all its runs together."""
    by_gpu: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for draw in draws:
        by_gpu[_gpu(draw)] += _measured(draw)
    for gpu, runs in sorted(by_gpu.items(), key=lambda one: ("x" in one[0], -len(one[1]))):
        yield [gpu, str(len(runs)), *_errors(runs, first=True), *_errors(runs, first=False)]


def _errors(runs: list[dict[str, Any]], *, first: bool) -> Iterator[str]:
    """Yield the errors of reserved bytes, of bytes on the GPU and of seconds."""
    for figure in FIGURES[1:]:
        yield _shares([_error(run, figure, first=first) for run in runs], last=1.0)
    yield _shares([_seconds_error(run, first=first) for run in runs], last=0.9, digits=1)


def _gpu(draw: dict[str, Any]) -> str:
    count = {run.get("gpus") or 1 for run in _measured(draw)}.pop()
    return ("" if count == 1 else f"{count} x ") + draw["device"].removeprefix("NVIDIA ").split()[0]


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
    yield f"[{_name(draw)}](../results/{file.name})"
    yield _gpu(draw)
    yield str(len(runs))
    yield _shares([_error(run, FIGURES[0], first=True) for run in runs], last=1.0)
    yield from _errors(runs, first=True)
    yield from _errors(runs, first=False) if draw.get("rescored") else [""] * 3


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
