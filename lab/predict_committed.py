"""Predict every run under results/ again, and compare two states of the code.

    python lab/predict_committed.py write OUT.json [EVERY]    # in the old state, then in the new one
    python lab/predict_committed.py compare OLD.json NEW.json

A change that only moves or renames code must not change any figure of a prediction. Bytes and seconds are
equal to the last digit. `compare` prints the figures that differ and then ends with 1. Sentences (the doubts
under a prediction) are for people and may be reworded. They are compared separately, and only counted. Both
files need the same versions of torch and transformers and the same machine.

Predictions of one run take a second or two, all of them some twenty minutes on two cores. EVERY predicts one
run of that many.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SENTENCES = ("doubts",)
"""Keys of a prediction that hold text for people."""


def committed_runs() -> list[str]:
    """Return each different run under results/ once, as the JSON text of the inputs of `predict`."""
    runs = {
        json.dumps(run, sort_keys=True)
        for path in sorted((ROOT / "results").rglob("*.json"))
        for run in _runs_in(json.loads(path.read_text(encoding="utf-8")))
    }
    return sorted(runs)


def _runs_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield runs of measurements, accuracy draws and verified plans anywhere in a document."""
    if isinstance(value, list):
        for inner in value:
            yield from _runs_in(inner)
    if not isinstance(value, dict):
        return
    if value.get("what") == "measurement":
        gpu = value["device"]["name"] if value["device"]["type"] == "cuda" else None
        gpus = value.get("gpus") or len(value.get("ranks") or ()) or 1
        yield _run(value["job"], value["recipe"], value["loop"], gpu, gpus)
    elif value.get("what") == "accuracy":
        for run in value["runs"]:
            gpus = run.get("gpus") or value.get("gpus") or 1
            yield _run(run["job"], run["recipe"], "plain", value["gpu"], gpus)
    else:
        yield from _runs_in(list(value.values()))


def _run(job: dict[str, Any], recipe: str, loop: str, gpu: str | None, gpus: int) -> dict[str, Any]:
    return {"job": job, "recipe": recipe, "loop": loop, "gpu": gpu, "gpus": gpus}


def predict_run(text: str) -> dict[str, Any]:
    """Return the prediction of one run, or the error that prevents it."""
    from snugfit import Job, SnugfitError, predict

    with contextlib.suppress(ImportError):  # older states have no deferred imports
        from snugfit.deferred_imports import defer_imports

        defer_imports()  # the command does so too
    run = json.loads(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            job = Job.from_json(run["job"])
            asked = {"gpu": run["gpu"], "gpus": run["gpus"], "loop": run["loop"]}
            return predict(job, run["recipe"], **asked).to_json()
        except SnugfitError as refused:
            return {"refused": f"{type(refused).__name__}: {refused}"[:200]}


def write(path: Path, every: int = 1) -> None:
    """Predict all committed runs, or one of `every` so many, and write them to `path`."""
    runs = committed_runs()[::every]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=10) as pool:
        predictions = {}
        for number, (text, prediction) in enumerate(zip(runs, pool.imap(predict_run, runs), strict=True), 1):
            predictions[text] = prediction
            print(f"\r{number} of {len(runs)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    path.write_text(json.dumps(predictions, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compare(old_path: Path, new_path: Path) -> int:
    """Print each run whose figures differ, and return the exit code."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (old_path, new_path))
    shared = sorted(old.keys() & new.keys())
    different = [run for run in shared if _figures(old[run]) != _figures(new[run])]
    reworded = sum(1 for run in shared if _sentences(old[run]) != _sentences(new[run]))
    for run in different:
        asked = json.loads(run)
        print(f"{asked['job']['model']['name']} {asked['recipe']} ({asked['loop']}): ", end="")
        print("; ".join(_differences(_figures(old[run]), _figures(new[run]))))
    print(f"{len(shared)} runs: {len(shared) - len(different)} the same to the last digit,", end=" ")
    print(f"{len(different)} different; sentences differ in {reworded}.")
    print(
        f"Only in the old file: {len(old.keys() - shared)}; only in the new one: {len(new.keys() - shared)}."
    )
    return 1 if different or old.keys() ^ new.keys() or not shared else 0


def _figures(prediction: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in prediction.items() if key not in SENTENCES}


def _sentences(prediction: dict[str, Any]) -> list[Any]:
    return [prediction.get(key) for key in SENTENCES]


def _differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """Yield the places in two JSON values that are not equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{at}.{key}" if at else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{at}[{number}]")
    elif old != new:
        yield f"{at} {old!r} -> {new!r}"


def main() -> None:
    """Run `write` or `compare` from the command line."""
    match sys.argv[1:]:
        case ["write", path]:
            write(Path(path))
        case ["write", path, every]:
            write(Path(path), int(every))
        case ["compare", old, new]:
            sys.exit(compare(Path(old), Path(new)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
