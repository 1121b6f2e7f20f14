"""Compare the training of faster steps with that of plain ones, on one GPU, for the guide's job or another.

    python lab/exact_steps.py OUT.json spread [--recipe 'RECIPE'] ...   losses of 300 steps
    python lab/exact_steps.py OUT.json error [--recipe 'RECIPE'] ...    weights after 50 steps
    python lab/exact_steps.py OUT.json spread|error --adapters 'lora(r=16)' [--model NAME] [...]

`spread` trains three runs in fp32 with one seed for weights and three seeds for dropout. It can read their
losses from an earlier output file instead (`--known`). Each recipe trains with three other seeds. A curve is
a mean of losses over 25 steps. The spread is the largest distance of one fp32 curve from the mean of the
other two. A recipe's curve may not be further than that from the mean of the three.

`error` trains without dropout and compares all weights with those of a run in 64 bits. The error is a share
of the distance that the weights moved in that run. The row also lists weights that the recipe did not move,
as with a gradient of zero.

With `--adapters`, every recipe trains these adapters of a language model in 16 bits. The runs of plain steps
are those of peft under autocast, and the adapters alone are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
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
PLAIN, PLAIN_WITH_ADAPTERS = "adamw_fused", "bf16 + adamw_fused"
WINDOW = 25
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class SeedAfterBuilding(Observer):
    """An observer that seeds dropout after the construction of the model, and stores the first weights."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.before: dict[str, torch.Tensor] = {}

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.before = {name: value.detach().double().cpu() for name, value in trainable(model)}
        torch.manual_seed(self.seed)


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, value) for name, value in model.named_parameters() if value.requires_grad]


def adapters_job(name: str) -> Job:
    """Return the job of a language model with weights in 16 bits, of which a run in 64 bits starts too."""
    return Job(
        model=Model.find(name), task=Task.CAUSAL_LM, dtype="bfloat16", clip=1.0, learning_rate=2e-4,
        batch_size=4, sequence_length=256,
    )  # fmt: skip


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
    if step.runner is not None and step.runner.why_not:
        raise RuntimeError(f"{recipe} was not recorded: {step.runner.why_not}")
    return step, losses, observer


def smooth(losses: list[float]) -> torch.Tensor:
    return torch.tensor(losses).unfold(0, WINDOW, 1).mean(dim=1)


def apart(curve: torch.Tensor, others: list[torch.Tensor]) -> float:
    """Return the largest distance of a curve from the mean of the others."""
    return float((curve - torch.stack(others).mean(dim=0)).abs().max())


def spread(
    job: Job, plain: str, recipes: list[str], steps: int, known: list[list[float]] | None
) -> dict[str, Any]:
    known = known or [trained(job, plain, steps, seed)[1] for seed in (11, 12, 13)]
    curves = [smooth(one[:steps]) for one in known]
    bound = max(apart(curve, [other for other in curves if other is not curve]) for curve in curves)
    found: dict[str, Any] = {"plain": plain, "fp32": known, "fp32_apart": bound, "recipes": {}}
    for recipe in recipes:
        runs = [trained(job, recipe, steps, seed)[1] for seed in (21, 22, 23)]
        away = [apart(smooth(one), curves) for one in runs]
        found["recipes"][recipe] = {"losses": runs, "apart": away, "inside": max(away) <= bound}
        print(recipe, "apart", [round(one, 4) for one in away], plain, round(bound, 4), flush=True)
    return found


def in_64_bits(
    job: Job, adapters: str, steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights before and after so many steps in 64 bits."""
    setup = Recipe.parse(adapters or "plain").setup()
    torch.manual_seed(1)
    model = build_model(job, setup, CUDA).double()
    weights = trainable(model)
    before = {name: value.detach().cpu().clone() for name, value in weights}
    optimizer = torch.optim.AdamW([value for _, value in weights], lr=job.learning_rate)
    for pieces in itertools.islice(micro_batches(job, setup, CUDA, setup.micro_batches), steps):
        loss_of(model(**place(pieces[0], CUDA))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip or 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: value.detach().cpu() for name, value in weights}


def masters_of(step: Any) -> dict[str, torch.Tensor]:
    """Return all trained weights in 64 bits, or their masters if they have any."""
    from snugfit.features.engine.masters.halves import RESIDUAL, join

    values = {}
    for name, weight in trainable(step.model):
        residual = step.optimizer.state.get(weight, {}).get(RESIDUAL)
        value = weight.detach() if residual is None else join(weight.detach(), residual)
        values[name] = value.double().cpu()
    return values


def error(job: Job, plain: str, adapters: str, recipes: list[str], steps: int) -> dict[str, Any]:
    before, exact = in_64_bits(job, adapters, steps)
    moved = sum(float((exact[name] - before[name]).pow(2).sum()) for name in exact) ** 0.5
    found: dict[str, Any] = {"moved": moved, "recipes": {}}
    for recipe in (plain, *recipes):
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
    parser.add_argument("--adapters", default="", help="a part of every recipe")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="with --adapters")
    parser.add_argument("--known", type=Path, help="a file of `spread`, whose runs in fp32 are taken")
    given = parser.parse_args()
    began = time.time()
    recipes = given.recipe or [*RECIPES]
    steps = given.steps or (300 if given.what == "spread" else 50)
    plain = PLAIN
    job = guide_job(**(STILL if given.what == "error" else {}))
    if given.adapters:
        job = adapters_job(given.model)
        plain, *recipes = (f"{given.adapters} + {recipe}" for recipe in (PLAIN_WITH_ADAPTERS, *recipes))
    if given.what == "spread":
        known = json.loads(given.known.read_text())["spread"]["fp32"] if given.known else None
        found = spread(job, plain, recipes, steps, known)
    else:
        found = error(job, plain, given.adapters, recipes, steps)
    about = {"gpu": torch.cuda.get_device_name(CUDA), "torch": torch.__version__, "steps": steps}
    document = {**about, "seconds": round(time.time() - began, 1), given.what: found}
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
