"""Kills processes of runs on several GPUs at random moments, and compares with a run that nobody touched.

    python benchmarks/kill_ranks.py OUT.json [--gpus 2] [--recipes fsdp ddp] [--kills 30] [--device cuda]

For each recipe a small BERT with dropout is trained whole by `snugfit train --gpus N`. Then, in another
folder, it is started again and again, and at a drawn moment (while it starts, steps or writes) one process of
its ranks, or the launcher, gets a SIGKILL, or the launcher a SIGTERM. Once there were so many kills, it runs
to its end. Its losses, norms, rates and weights must be those of the whole run, bit for bit; each end must
have said its cause in one line, and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from snugfit.documents import write_document
from snugfit.training.journal import read_journal
from snugfit.versions import versions

STEPS, SAVE_STEPS = 400, 20
LEFT_SECONDS = 40.0
"""How long ranks may outlive a kill: torch's launcher gives those that hang 30 s."""

CONFIG = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 256,
    "num_attention_heads": 4, "vocab_size": 512, "intermediate_size": 1024, "max_position_embeddings": 64,
    "num_hidden_layers": 4,
}  # fmt: skip


def write_job(folder: Path, device: str) -> Path:
    """The job file, with its model and its data."""
    draw = random.Random(0)
    rows = [
        {"input_ids": [draw.randrange(5, 500) for _ in range(draw.randrange(8, 60))], "label": index % 2}
        for index in range(203)
    ]
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = {
        "model": folder / "config.json", "task": "sequence-classification", "batch_size": 16,
        "sequence_length": 64, "clip": 1.0, "dataset": folder / "rows.jsonl", "from_scratch": "true",
        "max_steps": STEPS, "save_steps": SAVE_STEPS, "device": device,
    }  # fmt: skip
    job = folder / "job.yaml"
    job.write_text("\n".join(f"{key}: {value}" for key, value in lines.items()))
    return job


def command(job: Path, out: Path, recipe: str, gpus: int) -> list[str]:
    """The words that start, or resume, a run."""
    words = [sys.executable, "-m", "snugfit", "train", str(job), "--offline", "--no-predict"]
    return [*words, "--gpus", str(gpus), "--recipe", recipe, "--output-dir", str(out)]


def figures(out: Path) -> dict[int, tuple[Any, ...]]:
    """Loss, norm and rate of each step; of one that was taken again, the last."""
    if not (out / "journal.jsonl").exists():
        return {}
    return {
        event["step"]: (event["loss"], event["norm"], event["learning_rate"])
        for event in read_journal(out)
        if event["event"] == "step"
    }


def start_and_kill(words: list[str], draw: random.Random, longest: float) -> dict[str, Any]:
    """One start, and how it ended."""
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + draw.uniform(0.0, longest)
    ranks: list[psutil.Process] = []
    while time.monotonic() < until and running.poll() is None:
        time.sleep(0.02)
        ranks = psutil.Process(running.pid).children() if running.poll() is None else ranks
    kind = draw.choice(["rank", "rank", "rank", "launcher", "SIGTERM"])
    if running.poll() is None:
        if kind == "SIGTERM":
            running.terminate()
        elif kind == "launcher" or not ranks:
            running.kill()
        else:
            draw.choice(ranks).kill()
    _, said = running.communicate()
    left = psutil.wait_procs(ranks, timeout=LEFT_SECONDS)[1]
    last = said.strip().splitlines()[-1:] or [""]
    return {"kill": kind, "exit_code": running.returncode, "last_line": last[0], "left": len(left)}


def chain(job: Path, folder: Path, recipe: str, gpus: int, kills: int, seed: int) -> dict[str, Any]:
    """A whole run and one that was killed so often, compared."""
    whole, out, draw = folder / "whole", folder / "killed", random.Random(seed)
    began = time.monotonic()
    subprocess.run(command(job, whole, recipe, gpus), check=True, stdout=subprocess.DEVNULL)
    longest, words = time.monotonic() - began, command(job, out, recipe, gpus)
    ends = [start_and_kill(words, draw, longest) for _ in range(kills)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    first, second = (load_file(at / f"checkpoint-{STEPS}" / "model.safetensors") for at in (whole, out))
    return {
        "recipe": recipe,
        "gpus": gpus,
        "seconds_of_a_whole_run": longest,
        "ends": ends,
        "left": sum(end["left"] for end in ends),
        "same_figures": figures(whole) == figures(out),
        "same_weights": first.keys() == second.keys()
        and all(bool((value == second[name]).all()) for name, value in first.items()),
    }


def main() -> int:
    """Runs the chains, and writes what came of them."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("out", type=Path)
    asked.add_argument("--gpus", type=int, default=2)
    asked.add_argument("--recipes", nargs="+", default=["fsdp", "ddp"])
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--device", default="cuda")
    given = asked.parse_args()
    chains = []
    for recipe in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            job = write_job(Path(folder), given.device)
            chains.append(chain(job, Path(folder), recipe, given.gpus, given.kills, given.seed))
        print({key: value for key, value in chains[-1].items() if key != "ends"}, flush=True)
        write_document(given.out, {"device": given.device, "versions": versions(), "chains": chains})
    return 0 if all(one["same_figures"] and one["same_weights"] and not one["left"] for one in chains) else 1


if __name__ == "__main__":
    sys.exit(main())
