"""Compare measured runs with their predictions.

    python lab/compare_measurements.py FOLDER

The current code predicts every `measurement.json` under FOLDER. The figures go to FOLDER/compared.json, and
as a table to the terminal. Measured are requested, allocated and reserved bytes, the median step and the
first step. The first step includes compilation if the recipe compiles. `first_step_seconds` is predicted
without a cache of an earlier run. A measurement in a folder whose name ends in `warm` had such a cache.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

FIGURES = (
    "requested_bytes", "allocated_bytes", "reserved_bytes", "step_seconds", "first_step_seconds",
)  # fmt: skip
HEADS = (
    "Model", "Batch", "Recipe", "allocated %", "reserved %", "ms a step", "measured", "%", "first step s",
    "measured",
)  # fmt: skip


def figures(result: Any) -> dict[str, float | None]:
    """Return the compared figures of a Measurement or a Prediction."""
    found = {name: getattr(result.footprint, name) for name in FIGURES[:3]}
    found["step_seconds"] = result.timing and result.timing.step_seconds
    found["first_step_seconds"] = result.startup and result.startup.first_step_seconds
    return found


def compare(file: Path) -> dict[str, Any]:
    """Return one run's figures, measured and predicted."""
    from snugfit import predict
    from snugfit.results.measurement import Measurement

    seen = Measurement.from_json(json.loads(file.read_text(encoding="utf-8")))
    foreseen = predict(seen.job, seen.recipe, gpu=seen.device.name, loop=seen.loop)
    return {
        "run": file.parent.name,
        "model": seen.job.model.name,
        "batch": [seen.job.batch_size, seen.job.sequence_length],
        "recipe": str(seen.recipe),
        "loop": seen.loop,
        "measured": figures(seen),
        "predicted": figures(foreseen),
        "versions": {"measured": dict(seen.versions), "predicted": dict(foreseen.versions)},
    }


def row(run: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    seen, foreseen = run["measured"], run["predicted"]

    def apart(name: str, digits: int) -> str:
        return (
            f"{(foreseen[name] / seen[name] - 1) * 100:+.{digits}f}" if seen[name] and foreseen[name] else ""
        )

    def shown(value: float | None, unit: float) -> str:
        return f"{value * unit:,.1f}" if value else ""

    return [
        run["model"].rpartition("/")[2], " × ".join(map(str, run["batch"])), run["recipe"],
        apart("allocated_bytes", 2), apart("reserved_bytes", 2), shown(foreseen["step_seconds"], 1e3),
        shown(seen["step_seconds"], 1e3), apart("step_seconds", 1), shown(foreseen["first_step_seconds"], 1),
        shown(seen["first_step_seconds"], 1),
    ]  # fmt: skip


def main(folder: Path) -> None:
    """Write compared.json and print the table."""
    runs = [compare(file) for file in sorted(folder.rglob("measurement.json"))]
    (folder / "compared.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    for run in runs:
        print(f"| {' | '.join(row(run))} |")
    apart = [abs(run["predicted"]["step_seconds"] / run["measured"]["step_seconds"] - 1) for run in runs]
    print(f"\nSteps: median {statistics.median(apart):.1%}, largest {max(apart):.1%}, of {len(runs)} runs.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
