"""Compare the losses of recipes after thousands of steps, on one GPU.

    python lab/long_run.py OUT.json [--steps N] --recipe 'RECIPE' --recipe ...

GPT-2's twelve layers learn a language that this script makes. Each token has sixteen drawn followers, with
chances of 1 to 1/16. One token in four instead repeats the token eight places before it. No sample is seen
twice, so the losses of the last steps are those of held-out data. Runs with one seed start with the same
weights. They have the same samples and the same learning rate, so recipes are compared seed by seed. The
distance between seeds shows the weight of a difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

CUDA = torch.device("cuda", 0)
VOCABULARY, FOLLOWERS, BACK, COPIES = 4_096, 16, 8, 0.25
SAMPLES, LENGTH = 16, 256
LAST = 500
"""Last steps, whose mean loss is the result."""

SEEDS = (1, 2, 3)


def job() -> Job:
    config = Model.find("openai-community/gpt2").config
    small = {**config, "vocab_size": VOCABULARY, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    model = Model.from_config(small, name="gpt2-of-a-made-language")
    return Job(
        model=model, task=Task.CAUSAL_LM, batch_size=SAMPLES, sequence_length=LENGTH, clip=1.0,
        learning_rate=3e-4,
    )  # fmt: skip


def sentences(seed: int, steps: int) -> torch.Tensor:
    """Return token ids (steps, samples, length) on the host. The language is the same for every seed."""
    language = torch.Generator("cuda").manual_seed(0)
    followers = torch.randint(VOCABULARY, (VOCABULARY, FOLLOWERS), generator=language, device=CUDA)
    chances = 1 / torch.arange(1, FOLLOWERS + 1, device=CUDA, dtype=torch.float32)
    drawn = torch.Generator("cuda").manual_seed(seed)
    rows = steps * SAMPLES
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=drawn, device=CUDA)
    for at in range(1, LENGTH):
        which = torch.multinomial(chances, rows, replacement=True, generator=drawn)
        following = followers[tokens[:, at - 1], which]
        if at >= BACK:
            copies = torch.rand(rows, generator=drawn, device=CUDA) < COPIES
            following = torch.where(copies, tokens[:, at - BACK], following)
        tokens[:, at] = following
    return tokens.view(steps, SAMPLES, LENGTH).cpu()


def trained(recipe: str, seed: int, steps: int) -> list[float]:
    """Return the losses of a run."""
    torch.manual_seed(seed)
    tokens = sentences(seed, steps)
    step: Any = open_step(job(), Recipe.parse(recipe).setup(), "plain", CUDA, keep_losses=True)

    def batches() -> Generator[list[dict[str, torch.Tensor]], None, None]:
        for rows in tokens:
            yield [{"input_ids": rows, "labels": rows}]

    step._batches = batches
    losses: list[float] = step.run(steps, Observer())
    if step.runner is not None and step.runner.why_not:
        raise RuntimeError(f"{recipe} was not recorded: {step.runner.why_not}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", action="append", default=[], required=True)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--seed", type=int, action="append", help=f"default: {SEEDS}")
    given = parser.parse_args()
    about = {"gpu": torch.cuda.get_device_name(CUDA), "torch": torch.__version__, "steps": given.steps}
    runs: list[dict[str, Any]] = []
    for seed in given.seed or SEEDS:
        for recipe in given.recipe:
            began = time.time()
            losses = trained(recipe, seed, given.steps)
            learned = sum(losses[-LAST:]) / LAST
            means = torch.tensor(losses).view(-1, 50).mean(dim=1).tolist()
            runs.append({"recipe": recipe, "seed": seed, "last": learned, "means_of_50": means})
            print(f"{recipe}, seed {seed}: {learned:.4f} in {time.time() - began:.0f} s", flush=True)
            torch.cuda.empty_cache()
            given.out.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
