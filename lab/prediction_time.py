"""Measure wall time, CPU time and peak resident memory of snugfit's predictions.

    python lab/prediction_time.py [REPEATS] [--output FILE]

Each command runs in a fresh process, as a user starts it. A round runs them all, one after the other, and
rounds are repeated. So other load of the machine affects all commands alike. A first round fills the file
cache and is not counted. The figures are medians over the rounds. Each round also times
`import torch, transformers`, the fixed cost of every tool of this kind. The ratio to it is comparable with
other machines.

Peak memory is the kernel's `ru_maxrss` of the child. Linux passes that figure through fork and exec, so the
child of a large parent reports its parent's size. Therefore this script imports nothing large, and rejects a
figure that is not above its own.

Each command has a store of results of its own, and runs in it twice: first, and again.

The script writes results/prediction-time-DATE.json, or the named file, atomically.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from snugfit.measurement.host import cpu_name, peak_resident_bytes
from snugfit.report.text.files import write_atomically
from snugfit.versions import versions

REPEATS = 5
RESULTS = Path(__file__).resolve().parents[1] / "results"
ALLOWED = (0, 3)
"""Exit codes of a successful prediction. Code 3 means that the job does not fit."""

BERT = "bert-large-uncased --task sequence-classification --gpu h200"
BERT_ALONE = "bert-large-uncased --task sequence-classification"
README = (
    "Llama-3.1-8B --batch-size 16 --sequence-length 2048 --gpu 'rtx 4090' "
    "--recipe 'lora(r=16, targets=all-linear) + bf16 + every_layer + micro_batches(16)'"
)
LLAMA = "Llama-3.1-8B --task causal-lm --sequence-length 2048 --batch-size 8 --gpu h200"
ALL_TOGETHER = "--recipe 'bf16 + tf32 + every_layer + micro_batches(4) + adamw_8bit'"
ALL_TOGETHER_PURE = "--recipe 'bf16_pure + tf32 + every_layer + micro_batches(8) + adamw_8bit'"

IMPORTS = "import torch, transformers"
COMMANDS = {
    IMPORTS: f"python -c '{IMPORTS}'",
    "--help": "snugfit --help",
    "BERT-large in bf16": f"snugfit predict {BERT_ALONE} --recipe bf16",
    "README's first command": f"snugfit predict {README}",
    "BERT-large": f"snugfit predict {BERT}",
    "BERT-large, all together": f"snugfit predict {BERT} {ALL_TOGETHER}",
    "BERT-large, Trainer": f"snugfit predict {BERT} --loop trainer",
    "Llama-3.1-8B": f"snugfit predict {LLAMA}",
    "Llama-3.1-8B, all together": f"snugfit predict {LLAMA} {ALL_TOGETHER_PURE}",
    "Llama-3.1-8B, Trainer": f"snugfit predict {LLAMA} --loop trainer",
}

STORED = {f"{name}, again": name for name, command in COMMANDS.items() if " predict " in command}
"""Commands with stored results, by the name of the second run."""


@dataclass(frozen=True)
class Cost:
    """Costs of one process."""

    wall_seconds: float
    """Seconds from its start until its end was seen."""
    cpu_seconds: float
    """User and system time, its own children's included."""
    peak_bytes: int
    """Largest resident memory of the process."""


def cost(command: str, store: str) -> Cost:
    """Return the costs of this command in a process of its own, with its results in `store`.

    Raises `RuntimeError` if it prints no result.
    """
    before = time.perf_counter()
    child = subprocess.Popen(
        arguments(command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "XDG_CACHE_HOME": store},
    )
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - before
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in ALLOWED:
        raise RuntimeError(f"{command} ended with {child.returncode}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if peak <= peak_resident_bytes():
        raise RuntimeError(f"{command}: its peak memory cannot be told from this script's own")
    return Cost(wall, usage.ru_utime + usage.ru_stime, peak)


def arguments(command: str) -> list[str]:
    """Return a command line for this Python. `snugfit` is the console script beside it."""
    first, *rest = shlex.split(command)
    return [str(Path(sys.executable).with_name(first)), *rest]


def rounds(repeats: int) -> dict[str, list[Cost]]:
    """Return the costs of each of `COMMANDS`, and of the second run of those in `STORED`, round by round."""
    costs: dict[str, list[Cost]] = {name: [] for name in (*COMMANDS, *STORED)}
    for number in range(repeats + 1):
        for name, command in COMMANDS.items():
            again = [other for other, first in STORED.items() if first == name]
            with tempfile.TemporaryDirectory() as store:
                for run in (name, *again):
                    taken = cost(command, store)
                    load = os.getloadavg()[0]
                    print(f"round {number}: {run}: {taken}, load {load:.1f}", file=sys.stderr)
                    if number:
                        costs[run].append(taken)
    return costs


def line(name: str, costs: Sequence[Cost], imports: Sequence[Cost]) -> dict[str, Any]:
    """Return one command's figures, and their ratios to those of the imports."""
    wall, cpu = median(one.wall_seconds for one in costs), median(one.cpu_seconds for one in costs)
    walls = sorted(one.wall_seconds for one in costs)
    return {
        "name": name,
        "command": COMMANDS[STORED.get(name, name)],
        "wall_seconds": round(wall, 3),
        "wall_seconds_least": round(walls[0], 3),
        "wall_seconds_most": round(walls[-1], 3),
        "cpu_seconds": round(cpu, 3),
        "peak_bytes": round(median(one.peak_bytes for one in costs)),
        "wall_of_imports": round(wall / median(one.wall_seconds for one in imports), 3),
        "cpu_of_imports": round(cpu / median(one.cpu_seconds for one in imports), 3),
    }


def record(repeats: int) -> dict[str, Any]:
    """Return the document: the machine, its load, the versions, and a line for each command."""
    now, load = datetime.datetime.now(datetime.UTC), os.getloadavg()
    costs = rounds(repeats)
    return {
        "schema": 1,
        "what": "prediction-time",
        "date": now.isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_before": [round(average, 2) for average in load],
            "load_after": [round(average, 2) for average in os.getloadavg()],
        },
        "versions": versions(),
        "repeats": repeats,
        "commands": [line(name, taken, costs[IMPORTS]) for name, taken in costs.items()],
    }


def main() -> None:
    """Measure the commands and write the day's file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("repeats", nargs="?", type=int, default=REPEATS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    document = record(given.repeats)
    path = given.output or RESULTS / f"prediction-time-{document['date'][:10]}.json"
    print(write_atomically(path, json.dumps(document, indent=1).encode() + b"\n"))


if __name__ == "__main__":
    main()
