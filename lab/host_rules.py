"""Compare three rules for the seconds of a host on timed runs: packaged, one factor, and seven prices.

    python lab/host_rules.py OUT.json TIMED.json [TIMED.json ...]

TIMED.json is a file of `timed_runs.py`, one for each host. Each run is simulated once. `packaged` has the
seconds of `rates.json`. `one factor` multiplies all of them by the median of measured / predicted of the
host-bound runs, without the run itself. `prices` has those of `host_probe.host_at`. The level of a host is
that factor. The packaged prices that would give it are in the file as `packaged_prices`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.features.calibration.host_probe import PACKAGED_PRICES, host_at
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import HostLaunchCosts, packaged_rates
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from snugfit.versions import versions

RULES = ("packaged", "one factor", "prices")


def run_of(row: dict[str, Any], gpu_name: str, prices: dict[str, float]) -> dict[str, Any] | None:
    """Return a run with its seconds by packaged rates and by prices, and a function of the host's factor."""
    if not row.get("step_seconds"):
        return None
    job, setup, gpu = Job.from_json(row["job"]), Recipe.parse(row["recipe"]).setup(), find_gpu(gpu_name)
    policy, rates = policy_for(gpu, Software()), packaged_rates(gpu)
    try:
        trace = rehearse_from_few_layers(job, setup, policy) or rehearse(job, setup, policy)
    except SnugfitError:
        return None

    def seconds(host: HostLaunchCosts) -> Any:
        workers = setup.loader.workers
        given = replace(rates, host=host)
        return step_seconds(trace, gpu, batch_size=job.batch_size, rates=given, workers=workers)

    packaged = seconds(rates.host)
    found = {
        "model": job.model.name, "recipe": row["recipe"], "measured": row["step_seconds"],
        "mhz": row.get("mhz"), "watts": row.get("watts"), "limited_mhz": packaged.limited_mhz,
        "bound": packaged.bound, "device": packaged.device_seconds, "host": packaged.host_seconds,
        "packaged": packaged.step_seconds,
        "scaled": lambda factor: seconds(rates.host.slower(factor)).step_seconds,
    }  # fmt: skip
    if PACKAGED_PRICES and prices:
        found["prices"] = seconds(host_at(rates.host, prices, PACKAGED_PRICES)).step_seconds
    return found


def level(runs: Sequence[dict[str, Any]]) -> float:
    """Return the factor of the host by its host-bound runs."""
    return statistics.median(run["measured"] / run["packaged"] for run in runs if run["bound"] == "host")


def of_host(file: Path) -> dict[str, Any]:
    """Return the runs of one host with the seconds of each rule."""
    document = json.loads(file.read_text(encoding="utf-8"))
    # A file of several parts has the timed runs under this key.
    document = document.get("runs", document) if "rows" not in document else document
    prices = document["host"]["prices"]
    gpu = document.get("gpu", "h200")
    runs = [run for row in document["rows"] if (run := run_of(row, gpu, prices))]
    for run in runs:
        scaled = run.pop("scaled")
        run["one factor"] = scaled(level([other for other in runs if other is not run]))
    own = level(runs)
    return {
        "file": file.name, "level": own, "prices": prices, "prices_after": document.get("host_after"),
        "packaged_prices": {name: value / own for name, value in prices.items()}, "runs": runs,
    }  # fmt: skip


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return signed and absolute medians of `predicted / measured - 1` by rule and bottleneck."""
    table: dict[str, Any] = {}
    for rule in RULES:
        for bound in ("host", "GPU"):
            errors = [
                run[rule] / run["measured"] - 1
                for run in runs
                if rule in run and (run["bound"] in ("host", "loading")) is (bound == "host")
            ]
            if errors:
                absolute = sorted(map(abs, errors))
                table[f"{rule}, {bound}-bound"] = {
                    "runs": len(errors),
                    "signed_median": statistics.median(errors),
                    "median": statistics.median(absolute),
                    "p90": absolute[int(0.9 * (len(absolute) - 1))],
                }
    return table


def main() -> None:
    """Compare the rules, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("timed", type=Path, nargs="+")
    given = parser.parse_args()
    hosts = [of_host(file) for file in given.timed]
    for host in hosts:
        print(host["file"], "level", round(host["level"], 3), host["packaged_prices"])
        for run in sorted(host["runs"], key=lambda run: run["bound"]):
            ratios = [f"{run[rule] / run['measured']:.2f}" for rule in RULES if rule in run]
            print(*ratios, run["bound"], run["model"], run["recipe"])
    shown = summary([run for host in hosts for run in host["runs"]])
    write_document(
        given.out, {"what": "rules of the host", "versions": versions(), "summary": shown, "hosts": hosts}
    )
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
