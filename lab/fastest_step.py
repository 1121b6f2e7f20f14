"""Time the fastest step of one GPU beside the best peers, each in a process of its own on one machine.

    python lab/fastest_step.py OUT.json [JOB ...] [--ours 'RECIPE'] [--no-peers]

One peer is the installed HF Trainer with its fastest flags, measured through `--loop trainer`. It runs its
own step, and none of its logic is copied. Another one is FlashOptim (`peer_flashoptim.py`), if it is
installed. Ours is snugfit's loop. Every contender trains the same model on batches of the same size. A row
holds its seconds, its bytes, and its speed as a multiple of the best peer's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FUSED = "bf16 + adamw_fused"
COMPILED = f"{FUSED} + compiled(what=model, autocast=within)"


@dataclass(frozen=True)
class Contest:
    """A job with its contenders."""

    options: tuple[str, ...]
    """Options of `snugfit measure`."""
    ours: tuple[str, ...]
    """Recipes of snugfit's loop."""
    peers: tuple[str, ...] = (FUSED, COMPILED)
    """Recipes of the Trainer, given as its arguments."""
    flashoptim: dict[str, Any] | None = None
    """The job, for FlashOptim's AdamW in a plain loop."""


CAPTURED = ("bf16 + adamw_fused", f"{FUSED} + captured", "bf16_master + adamw_fused + captured")
BEST = "bf16_master + adamw_fused + captured + fused"
COMPACT = "bf16_master + adamw_compact + captured + fused"
LEAST = "selective(attention) + released"
CONTESTS = {
    "bert-large": Contest(
        ("bert-large-uncased", "--task", "sequence-classification", "--clip", "1"),
        (*CAPTURED, BEST, COMPACT, f"{BEST} + {LEAST}", f"{COMPACT} + {LEAST}"),
        flashoptim={"model": "bert-large-uncased", "task": "sequence-classification", "clip": 1.0},
    ),
    "llama-1b": Contest(
        (
            "meta-llama/Llama-3.2-1B", "--task", "causal-lm", "--batch-size", "2",
            "--sequence-length", "2048", "--clip", "1", "--dtype", "float32",
        ),
        (*CAPTURED, f"{BEST} + chunked_loss", f"{BEST}(recomputed_mlps=7) + chunked_loss"),
        (FUSED, f"{FUSED} + liger", COMPILED),
        {
            "model": "meta-llama/Llama-3.2-1B", "task": "causal-lm", "batch_size": 2,
            "sequence_length": 2048, "clip": 1.0, "dtype": "float32",
        },
    ),
    "qwen-half-b": Contest(
        (
            "Qwen/Qwen2.5-0.5B", "--task", "causal-lm", "--batch-size", "1", "--sequence-length", "512",
            "--clip", "1", "--dtype", "float32",
        ),
        (*CAPTURED, BEST),
        (FUSED, f"{FUSED} + liger", COMPILED),
    ),
    "roberta-padded": Contest(
        (
            "FacebookAI/roberta-large", "--task", "sequence-classification", "--batch-size", "8",
            "--sequence-length", "384", "--padding", "0.25", "--clip", "1",
        ),
        (*CAPTURED, BEST),
    ),
}  # fmt: skip


def measured(options: tuple[str, ...], loop: str, recipe: str) -> dict[str, Any]:
    """Return a row of the table: the figures of `snugfit measure`, or its error."""
    command = [sys.executable, "-m", "snugfit", "measure", *options, "--loop", loop, "--recipe", recipe]
    row: dict[str, Any] = {"loop": loop, "recipe": recipe}
    try:
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "error": "longer than 280 s"}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {**row, "error": done.stderr.strip()[-600:]}
    footprint, timing = answer.get("footprint") or {}, answer.get("timing") or {}
    return {
        **row,
        "outcome": answer.get("outcome"),
        "message": (answer.get("message") or "")[-400:],
        **{name: timing.get(name) for name in ("step_seconds", "samples_per_second", "spread")},
        **{name: footprint.get(name) for name in ("requested_bytes", "reserved_bytes", "nvml_bytes")},
        "startup": answer.get("startup"),
        "versions": answer.get("versions"),
    }


def with_flashoptim(job: dict[str, Any]) -> dict[str, Any]:
    """Return FlashOptim's row."""
    command = [sys.executable, str(Path(__file__).with_name("peer_flashoptim.py")), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        return {"loop": "flashoptim", "recipe": "24 bits", "error": done.stderr.strip()[-600:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def contest(one: Contest, ours: tuple[str, ...], *, peers: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a job after each new one, with their speeds beside that of the fastest peer."""
    rows: list[dict[str, Any]] = []
    races = [("trainer", recipe) for recipe in one.peers if peers]
    if peers and one.flashoptim is not None:
        races.append(("flashoptim", ""))
    for loop, recipe in [*races, *(("plain", recipe) for recipe in ours)]:
        if loop == "flashoptim":
            assert one.flashoptim is not None
            rows.append(with_flashoptim(one.flashoptim))
        else:
            rows.append(measured(one.options, loop, recipe))
        best = min(
            (row["step_seconds"] for row in rows if row["loop"] != "plain" and row.get("step_seconds")),
            default=None,
        )
        seconds = rows[-1].get("step_seconds")
        rows[-1]["times_the_best_peer"] = best / seconds if best and seconds else None
        brief = {
            key: value for key, value in rows[-1].items() if key not in ("startup", "versions", "message")
        }
        print(
            json.dumps(brief), rows[-1].get("message") if rows[-1].get("outcome") != "ok" else "", flush=True
        )
        yield rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("jobs", nargs="*", default=[*CONTESTS])
    parser.add_argument("--ours", action="append", default=[])
    parser.add_argument("--no-peers", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.jobs:
        one = CONTESTS[name]
        print(name, *one.options, flush=True)
        for rows in contest(one, tuple(given.ours) or one.ours, peers=not given.no_peers):
            found[name] = {"options": one.options, "rows": rows}
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
