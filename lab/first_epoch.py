"""Time the guide's epoch from its first step, with all compilation and recording in it.

    python lab/first_epoch.py OUT.json [--steps 128] [--loop trainer] [--loop plain]

The job is BERT-large, 4 x 512, clip 1.0. Each contender runs twice, in a process of its own. The cold run has
empty caches of Triton and Inductor, the warm run has those of the cold one. Seconds count from the beginning
of the first step to the end of the last. Imports and the construction of the model are separate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTENDERS = (
    ("trainer", "bf16 + adamw_fused"),
    ("trainer", "bf16 + adamw_fused + compiled(what=model, autocast=within)"),
    ("plain", "bf16_master + adamw_fused + captured + fused"),
    ("plain", "bf16 + adamw_fused + captured"),
)


def epoch(loop: Any, recipe: str, steps: int) -> dict[str, Any]:
    """Return the seconds of so many steps, and of the longest of them."""
    import torch

    from snugfit.job.job import Job, Task
    from snugfit.job.model import Model
    from snugfit.step.open_step import open_step
    from snugfit.step.step import Observer
    from snugfit.techniques.recipe import Recipe

    times: list[float] = []

    class Watch(Observer):
        def step_begins(self, index: int) -> None:
            if not index:
                torch.cuda.synchronize()
                times.append(time.perf_counter())

        def step_ends(self, index: int) -> None:
            if index in (0, 1, steps - 1):
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    job = Job(model=Model.find("bert-large-uncased"), task=Task.SEQUENCE_CLASSIFICATION, clip=1.0)
    step = open_step(job, Recipe.parse(recipe).setup(), loop, torch.device("cuda", 0))
    step.run(steps, Watch())
    began, first, second = times[:3]
    return {
        "loop": loop, "recipe": recipe, "steps": steps, "seconds": times[-1] - began,
        "first_step": first - began, "second_step": second - first, "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
    }  # fmt: skip


def in_a_process(loop: str, recipe: str, steps: int, cache: str) -> dict[str, Any]:
    """Time the epoch in a process with this folder for the compilers' caches."""
    variables = os.environ | {
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }
    command = [sys.executable, __file__, "-", "--one", json.dumps([loop, recipe, steps])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"loop": loop, "recipe": recipe, "error": done.stderr[-600:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--loop", action="append", choices=("trainer", "plain"), help="[both]")
    parser.add_argument("--one", type=json.loads)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(epoch(*given.one)))
        return
    rows = []
    for loop, recipe in CONTENDERS:
        if given.loop and loop not in given.loop:
            continue
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                row = {"caches": state, **in_a_process(loop, recipe, given.steps, cache)}
                rows.append(row)
                print(json.dumps(row), flush=True)
                given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
