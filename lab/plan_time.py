"""Measure plans: wall time, CPU time of all their processes and peak memory, cold and warm.

    python lab/plan_time.py [NAME ...] [--output FILE]

The commands are plans for one GPU, for all GPUs of the table and for many at once, and the guide. Each
command runs as a user starts it, with a cache of its own. It runs cold, then once more with a cached result
(the guide caches none). A fork server starts the rehearsing processes, so their CPU time is in no `wait`
here. Therefore psutil samples all of the command's descendants while they run. The last moments of a process
are missing (`INTERVAL` seconds at most each).

Wall time is meaningful only on an idle machine, so the row holds the load before and after. CPU seconds
suffer less, yet they too grow on shared cores.

The script writes FILE, or results/plan-time-DATE.json, atomically.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from snugfit.measurement.host import cpu_name
from snugfit.report.text.files import write_atomically
from snugfit.versions import versions

RESULTS = Path(__file__).resolve().parents[1] / "results"
INTERVAL = 0.1
"""Seconds between two samples."""

COUNTED = re.compile(
    r"([\d,]+) valid recipes, ([\d,]+) of them distinct, with ([\d,]+) distinct footprints; "
    r"([\d,]+) kinds of passes simulated, ([\d,]+) recipes"
)
"""Pattern of the line in which a plan reports its search."""

LLAMA = "plan Llama-3.1-8B --task causal-lm --gpu h200"
BERT = "plan bert-large-uncased --task sequence-classification --gpu h200"
COMMANDS = {
    "BERT-large": BERT,
    "BERT-large, learns": f"{BERT} --fidelity learns",
    "Llama-3.1-8B": LLAMA,
    "Llama-3.1-8B, 8 x 2048": f"{LLAMA} --sequence-length 2048 --batch-size 8",
    "Llama-3.1-8B, learns": f"{LLAMA} --fidelity learns",
    "Llama-3.1-8B, LoRA": f"{LLAMA} --keep 'lora(r=16)'",
    "Llama-3.1-8B, LoRA, 16 x 2048": "plan Llama-3.1-8B --task causal-lm --batch-size 16"
    " --sequence-length 2048 --gpu 'rtx 4090' --keep 'lora(r=16)'",
    "Llama-3.1-8B, LoRA, 16 x 512": "plan Llama-3.1-8B --task causal-lm --batch-size 16"
    " --sequence-length 512 --gpu 'rtx 4090' --keep 'lora(r=16)'",
    "Qwen2.5-7B, QLoRA, 16 GiB": "plan Qwen2.5-7B --task causal-lm --batch-size 4 --sequence-length 2048"
    " --gpu 'rtx 4090' --memory 16GiB --keep 'qlora(r=16)'",
    "t5-3b, learns": "plan t5-3b --task seq2seq-lm --gpu h200 --fidelity learns",
    "BERT-large, all GPUs": "gpus --for bert-large-uncased --task sequence-classification",
    "Llama-3.1-8B, LoRA, all GPUs": "gpus --for Llama-3.1-8B --task causal-lm --keep 'lora(r=16)'",
    "Llama-3.1-8B, up to 4,096 GPUs": "plan Llama-3.1-8B --dtype float32 --batch-size 4096"
    " --sequence-length 2048 --gpu h100-sxm --gpus 1..4096",
    "Llama-3.1-8B, cards up to 4,096": "gpus h100-sxm --for Llama-3.1-8B --dtype float32 --batch-size 4096"
    " --sequence-length 2048 --gpus 1..4096 --price h100-sxm=2.5",
    "guide": "guide",
}


def cost(command: str, cache: Path) -> dict[str, Any]:
    """Return the costs of `snugfit COMMAND`. Raises `RuntimeError` if it prints no result."""
    load, began = os.getloadavg()[0], time.perf_counter()
    program = str(Path(sys.executable).with_name("snugfit"))
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryFile("w+") as said:
        child = psutil.Popen([program, *shlex.split(command)], env=environment, stdout=said, cwd=cache)
        seconds: dict[tuple[int, float], float] = {}
        peak = 0
        while child.poll() is None:
            peak = max(peak, _sample(child, seconds))
            time.sleep(INTERVAL)
        wall = time.perf_counter() - began
        said.seek(0)
        answer = " ".join(said.read().split())
    if child.returncode not in (0, 3):
        raise RuntimeError(f"{command} ended with {child.returncode}")
    return {
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(sum(seconds.values()), 1),
        "peak_bytes": peak,
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        **_counts(answer),
    }


def _sample(child: psutil.Process, seconds: dict[tuple[int, float], float]) -> int:
    """Record the CPU seconds of all living descendants, and return the sum of their resident bytes."""
    resident = 0
    try:
        living = [child, *child.children(recursive=True)]
    except psutil.Error:
        return 0
    for process in living:
        try:
            used = process.cpu_times()
            seconds[process.pid, process.create_time()] = used.user + used.system
            resident += process.memory_info().rss
        except psutil.Error:
            continue
    return resident


def _counts(answer: str) -> dict[str, Any]:
    match = COUNTED.search(answer)
    if not match:
        return {}
    names = ("recipes", "tapes", "footprints", "passes", "replayed")
    counted = {name: int(text.replace(",", "")) for name, text in zip(names, match.groups(), strict=True)}
    return {**counted, "verified": "simulated in full and takes the same bytes" in answer}


def line(name: str) -> dict[str, Any]:
    """Return the costs of one command, cold and warm."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (cost(COMMANDS[name], Path(cache)) for _ in range(2))
    print(f"{name}: cold {cold}, warm {warm['wall_seconds']} s", file=sys.stderr)
    return {"name": name, "command": f"snugfit {COMMANDS[name]}", "cold": cold, "warm": warm}


def main() -> None:
    """Measure the commands and write the day's file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--output", type=Path, help="the file to write")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in COMMANDS]:
        parser.error(f"no such command: {', '.join(unknown)}")
    names = asked.names or list(COMMANDS)
    now = datetime.datetime.now(datetime.UTC)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    document = {
        "schema": 1,
        "what": "plan-time",
        "date": now.isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "cores": cores},
        "versions": versions(),
        "commands": [line(name) for name in names],
    }
    path = asked.output or RESULTS / f"plan-time-{document['date'][:10]}.json"
    print(write_atomically(path, json.dumps(document, indent=1).encode() + b"\n"))


if __name__ == "__main__":
    main()
