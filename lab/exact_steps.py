"""Whether faster steps are still the same training: on one GPU, of the guide's job or another.

    python lab/exact_steps.py OUT.json spread [--recipe 'RECIPE'] ...   losses of 300 steps
    python lab/exact_steps.py OUT.json error [--recipe 'RECIPE'] ...    weights after 50 steps

`spread` trains from one seed in fp32 with three seeds for dropout, or reads the losses of such runs from a
file that it wrote before (`--known`), and each recipe with three others. A curve of losses is a mean over 25
steps. Of the three in fp32, each is some way from the mean of the other two: no curve of a recipe may be
further from the mean of the three than the furthest of them. `error` trains
without dropout, and says how far all weights are from those of a run in 64 bits, as a share of how far that
has moved them; and which weights a recipe has not moved, as a gradient of zero would have it."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.batches import micro_batches, place
from snugfit.step.build import build_model
from snugfit.step.loss import loss_of
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

CUDA = torch.device("cuda", 0)
RECIPES = ("bf16 + adamw_fused", "bf16_master + adamw_fused + captured")
WINDOW = 25
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class SeedAfterBuilding(Observer):
    """Weights of one seed, and dropout of another."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.before: dict[str, torch.Tensor] = {}

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.before = {name: value.detach().double().cpu() for name, value in model.named_parameters()}
        torch.manual_seed(self.seed)


def guide_job(**facts: Any) -> Job:
    model = Model.find("bert-large-uncased")
    if facts:
        model = Model.from_config({**model.config, **facts}, name="bert-large-still")
    return Job(model=model, task=Task.SEQUENCE_CLASSIFICATION, clip=1.0, learning_rate=5e-5)


def trained(
    job: Job, recipe: str, steps: int, dropout_seed: int
) -> tuple[Any, list[float], SeedAfterBuilding]:
    torch.manual_seed(1)
    observer = SeedAfterBuilding(dropout_seed)
    step: Any = open_step(job, Recipe.parse(recipe).setup(), "plain", CUDA, keep_losses=True)
    losses = step.run(steps, observer)
    if step.captured is not None and step.captured.why_not:
        raise RuntimeError(f"{recipe} was not recorded: {step.captured.why_not}")
    return step, losses, observer


def smooth(losses: list[float]) -> torch.Tensor:
    return torch.tensor(losses).unfold(0, WINDOW, 1).mean(dim=1)


def apart(curve: torch.Tensor, others: list[torch.Tensor]) -> float:
    """The most by which a curve leaves the mean of others."""
    return float((curve - torch.stack(others).mean(dim=0)).abs().max())


def spread(recipes: list[str], steps: int, known: list[list[float]] | None) -> dict[str, Any]:
    job = guide_job()
    known = known or [trained(job, "adamw_fused", steps, seed)[1] for seed in (11, 12, 13)]
    curves = [smooth(one[:steps]) for one in known]
    bound = max(apart(curve, [other for other in curves if other is not curve]) for curve in curves)
    found: dict[str, Any] = {"fp32": known, "fp32_apart": bound, "recipes": {}}
    for recipe in recipes:
        runs = [trained(job, recipe, steps, seed)[1] for seed in (21, 22, 23)]
        away = [apart(smooth(one), curves) for one in runs]
        found["recipes"][recipe] = {"losses": runs, "apart": away, "inside": max(away) <= bound}
        print(recipe, "apart", [round(one, 4) for one in away], "fp32", round(bound, 4), flush=True)
    return found


def in_64_bits(job: Job, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after so many steps in 64 bits."""
    setup = Recipe.parse("plain").setup()
    torch.manual_seed(1)
    model = build_model(job, setup, CUDA).double()
    before = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    for pieces in itertools.islice(micro_batches(job, setup, CUDA), steps):
        loss_of(model(**place(pieces[0], CUDA))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip or 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: value.detach().cpu() for name, value in model.named_parameters()}


def masters_of(step: Any) -> dict[str, torch.Tensor]:
    """All weights in 64 bits; of those that have masters, the masters."""
    from snugfit.step.wishes.masters.halves import join
    from snugfit.step.wishes.masters.marks import RESIDUAL

    values = {}
    for name, weight in step.model.named_parameters():
        residual = step.optimizer.state.get(weight, {}).get(RESIDUAL)
        value = weight.detach() if residual is None else join(weight.detach(), residual)
        values[name] = value.double().cpu()
    return values


def error(recipes: list[str], steps: int) -> dict[str, Any]:
    job = replace(guide_job(**STILL))
    before, exact = in_64_bits(job, steps)
    moved = sum(float((exact[name] - before[name]).pow(2).sum()) for name in exact) ** 0.5
    found: dict[str, Any] = {"moved": moved, "recipes": {}}
    for recipe in ("adamw_fused", *recipes):
        step, losses, observer = trained(job, recipe, steps, 11)
        ours = masters_of(step)
        away = sum(float((ours[name] - exact[name]).pow(2).sum()) for name in exact) ** 0.5
        still = [name for name, value in ours.items() if torch.equal(value, observer.before[name])]
        found["recipes"][recipe] = {"error": away / moved, "unmoved": still, "last_loss": losses[-1]}
        print(recipe, "error", round(away / moved, 5), "unmoved", still[:3], flush=True)
        del step
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("spread", "error"))
    parser.add_argument("--recipe", action="append", default=[])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--known", type=Path, help="a file of `spread`, whose runs in fp32 are taken")
    given = parser.parse_args()
    began = time.time()
    recipes = given.recipe or [*RECIPES]
    steps = given.steps or (300 if given.what == "spread" else 50)
    if given.what == "spread":
        known = json.loads(given.known.read_text())["spread"]["fp32"] if given.known else None
        found = spread(recipes, steps, known)
    else:
        found = error(recipes, steps)
    about = {"gpu": torch.cuda.get_device_name(CUDA), "torch": torch.__version__, "steps": steps}
    document = {**about, "seconds": round(time.time() - began, 1), given.what: found}
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
