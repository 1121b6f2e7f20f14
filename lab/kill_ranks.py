"""Kill processes of runs on several GPUs at random moments, and compare with an undisturbed run.

    python lab/kill_ranks.py OUT.json [--gpus 2] [--recipes fsdp "tensor(2)"] [--kills 30]
                                    [--device cuda] [--steps 400] [--minutes 600] [--then-one]

For each recipe `snugfit train --gpus N` trains a small model with dropout whole. The model is a BERT, or a
Llama if ranks share layers, sequences or stages. Then it starts in another folder again and again. At a drawn
moment (while it starts, steps or writes) one rank or the launcher gets a SIGKILL. Some launchers get a
SIGTERM.
After so many kills or minutes it runs to its end. Its losses, norms, rates and weights must equal those of
the whole run, bit for bit. Each end must print its cause in one line, and no process may remain. A refused
recipe is listed with its message.

With `--then-one` another run stops after half of its steps, and resumes on one GPU without the technique for
several. The largest relative difference of its losses to those of the whole run is written.
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

SAVES = 20
"""Number of checkpoints of a whole run."""

LEFT_SECONDS = 40.0
"""Seconds for which ranks may outlive a kill. torch's launcher gives hanging ranks 30 s."""

BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 256,
    "num_attention_heads": 4, "vocab_size": 512, "intermediate_size": 1024, "max_position_embeddings": 128,
    "num_hidden_layers": 4,
}  # fmt: skip
LLAMA = {
    **BERT, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4,
    "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128}
"""Smaller sizes for a CPU, because ranks share its cores."""

DECODERS = ("tensor", "context", "pipeline", "chunked_loss", "lora")
"""Parts of a recipe that are for decoders."""

LONG = 128
"""Tokens of the sequences that ranks share."""

NO_DROPOUT = ("context", "captured")
"""Techniques that refuse dropout of attention's weights."""


def write_job(folder: Path, device: str, recipe: str, steps: int, *, is_comparable: bool = False) -> Path:
    """Write the job file with its model and its data, and return its path. `is_comparable` leaves out dropout
    and schedules, so that losses do not depend on the number of GPUs and steps.
    """
    draw, speaks = random.Random(0), any(part in recipe for part in DECODERS)
    rows = [
        {"input_ids": [draw.randrange(5, 500) for _ in range(draw.randrange(8, 60))], "label": index % 2}
        for index in range(203)
    ]
    config: dict[str, Any] = {**(LLAMA if speaks else BERT), **(SMALL if device == "cpu" else {})}
    if speaks:
        rows = [{"input_ids": row["input_ids"]} for row in rows]
        if "context" in recipe:  # it needs sequences without padding
            rows = [{"input_ids": [draw.randrange(5, 500) for _ in range(LONG)]} for _ in rows]
        drops = not is_comparable and not any(part in recipe for part in NO_DROPOUT)
        config["attention_dropout"] = 0.1 if drops else 0.0
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines: dict[str, Any] = {
        "model": folder / "config.json", "task": "causal-lm" if speaks else "sequence-classification",
        "batch_size": 16, "sequence_length": LONG if "context" in recipe else 64, "clip": 1.0,
        "dataset": folder / "rows.jsonl", "from_scratch": "true", "max_steps": steps,
        "save_steps": steps // SAVES, "device": device,
        **({"lr_scheduler_type": "constant"} if is_comparable else {}),
    }  # fmt: skip
    job = folder / "job.yaml"
    job.write_text("\n".join(f"{key}: {value}" for key, value in lines.items()))
    return job


def command(job: Path, out: Path, recipe: str, gpus: int) -> list[str]:
    """Return the words that start or resume a run."""
    words = [sys.executable, "-m", "snugfit", "train", str(job), "--offline", "--no-predict"]
    return [*words, "--gpus", str(gpus), "--recipe", recipe, "--output-dir", str(out)]


def on_one_gpu(recipe: str) -> str:
    """Return the recipe without the technique for several GPUs."""
    several = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
    return " + ".join(part for part in recipe.split(" + ") if not part.startswith(several)) or "plain"


def resume_on_one(job: Path, folder: Path, recipe: str, given: argparse.Namespace) -> dict[str, Any]:
    """Compare the whole run with one that resumes on one GPU after half of its steps."""
    half, out = folder / "half.yaml", folder / "moved"
    text = job.read_text()
    half.write_text(text.replace(f"max_steps: {given.steps}", f"max_steps: {given.steps // 2}"))
    ends = []
    for file, words, gpus in ((half, recipe, given.gpus), (job, on_one_gpu(recipe), 1)):
        ran = subprocess.run(command(file, out, words, gpus), check=False, capture_output=True, text=True)
        ends.append({"exit_code": ran.returncode, "last_lines": ran.stderr.strip().splitlines()[-3:]})
    whole, moved = figures(folder / "whole"), figures(out)
    distances = [abs(moved[step][0] / whole[step][0] - 1) for step in whole if step in moved]
    return {"resumed_on_one": ends, "steps": len(distances), "largest_distance": max(distances, default=None)}


def figures(out: Path) -> dict[int, tuple[Any, ...]]:
    """Return loss, norm and rate of each step. For a repeated step the last ones count."""
    if not (out / "journal.jsonl").exists():
        return {}
    return {
        event["step"]: (event["loss"], event["norm"], event["learning_rate"])
        for event in read_journal(out)
        if event["event"] == "step"
    }


def start_and_kill(words: list[str], draw: random.Random, longest: float, gpus: int) -> dict[str, Any]:
    """Start a run, kill one of its processes and return its end. A single process is its own launcher."""
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + draw.uniform(0.0, longest)
    ranks: list[psutil.Process] = []
    while time.monotonic() < until and running.poll() is None:
        time.sleep(0.02)
        ranks = psutil.Process(running.pid).children() if running.poll() is None and gpus > 1 else ranks
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


def chain(job: Path, folder: Path, recipe: str, given: argparse.Namespace) -> dict[str, Any]:
    """Compare a whole run with one that was killed several times."""
    whole, out, draw = folder / "whole", folder / "killed", random.Random(given.seed)
    began, deadline = time.monotonic(), time.monotonic() + 60 * given.minutes
    words = command(job, whole, recipe, given.gpus)
    ran = subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    longest, words = time.monotonic() - began, command(job, out, recipe, given.gpus)
    about = {"recipe": recipe, "gpus": given.gpus, "seconds_of_a_whole_run": longest, "ends": [], "left": 0}
    if ran.returncode:
        refused = ran.returncode == 2 and not figures(whole)
        return {**about, "refused": refused, "says": ran.stderr[-1000:]}
    ends = []
    while len(ends) < given.kills and time.monotonic() + 2.5 * longest < deadline:
        ends.append(start_and_kill(words, draw, longest, given.gpus))
    last = subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    about |= {"ends": ends, "left": sum(end["left"] for end in ends)}
    if last.returncode:
        return {**about, "refused": False, "says": last.stderr[-1000:]}
    name = f"checkpoint-{given.steps}"
    first, second = (saved_weights(at / name) for at in (whole, out))
    return {
        **about,
        **(resume_on_one(job, folder, recipe, given) if given.then_one else {}),
        "same_figures": figures(whole) == figures(out),
        "same_weights": first.keys() == second.keys()
        and all(bool((value == second[name]).all()) for name, value in first.items()),
    }


def saved_weights(folder: Path) -> dict[str, Any]:
    """Return the model's weights in a checkpoint, or those of its adapters."""
    files = (folder / f"{name}.safetensors" for name in ("model", "adapter_model"))
    return load_file(next(file for file in files if file.is_file()))


def is_held(one: dict[str, Any]) -> bool:
    """Return True for a chain with the whole run's results, or one refused by name before its first step."""
    return bool(
        one.get("refused") or (one.get("same_figures") and one.get("same_weights") and not one["left"])
    )


def main() -> int:
    """Run the chains and write their results."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("out", type=Path)
    asked.add_argument("--gpus", type=int, default=2)
    asked.add_argument("--recipes", nargs="+", default=["fsdp", "ddp"])
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--steps", type=int, default=400)
    asked.add_argument("--minutes", type=float, default=600.0, help="of each recipe")
    asked.add_argument("--then-one", action="store_true", help="resume another run on one GPU")
    given = asked.parse_args()
    chains = []
    for recipe in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            job = write_job(Path(folder), given.device, recipe, given.steps, is_comparable=given.then_one)
            chains.append(chain(job, Path(folder), recipe, given))
        print({key: value for key, value in chains[-1].items() if key != "ends"}, flush=True)
        write_document(given.out, {"device": given.device, "versions": versions(), "chains": chains})
    return 0 if all(map(is_held, chains)) else 1


if __name__ == "__main__":
    sys.exit(main())
