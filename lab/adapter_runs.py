"""Compare 1,000 steps of LoRA with those of peft under autocast, seed by seed, on one GPU or the CPU.

    python lab/adapter_runs.py OUT.json [--steps 1000] [--layers 2] [--recipe 'RECIPE'] ...

A small Llama first learns one language of drawn followers in full. Then its adapters learn another language.
peft's runs are a loop of this script: eager, under autocast, with torch's AdamW. Runs with one seed start
from the same adapters and have the same samples. The spread is the distance between peft's largest and
smallest loss over seeds. A recipe is inside if no loss is further than that from peft's loss of its seed.
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

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
VOCABULARY, FOLLOWERS, RANK, ALPHA = 512, 16, 16, 8
SEEDS = (1, 2, 3)
RATE, CLIP = 1e-3, 1.0
ADAPTERS = f"lora(r={RANK}, targets=all-linear)"
RECIPES = (
    f"{ADAPTERS} + bf16 + adamw_fused + fused + captured",
    f"{ADAPTERS} + bf16_pure + adamw_fused + fused + captured",
)
FIRST, SECOND = 0, 1
"""Seeds of both languages."""


def sentences(language: int, seed: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return token ids (steps, samples, length); each token has 16 drawn followers, of chances 1 to 1/16."""
    rules = torch.Generator(DEVICE).manual_seed(language)
    followers = torch.randint(VOCABULARY, (VOCABULARY, FOLLOWERS), generator=rules, device=DEVICE)
    chances = 1 / torch.arange(1, FOLLOWERS + 1, device=DEVICE, dtype=torch.float32)
    drawn = torch.Generator(DEVICE).manual_seed(1_000 + seed)
    steps, samples, length = shape
    tokens = torch.randint(VOCABULARY, (steps * samples, length), generator=drawn, device=DEVICE)
    for at in range(1, length):
        kinds = torch.multinomial(chances, len(tokens), replacement=True, generator=drawn)
        tokens[:, at] = followers[tokens[:, at - 1], kinds]
    return tokens.view(shape).cpu()


def job(given: argparse.Namespace) -> Job:
    """Return the job of a Llama of a few layers."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY,
        "hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_hidden_layers": given.layers, "max_position_embeddings": given.length,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return Job(
        model=Model.from_config(config, name="llama-of-two-languages"), task=Task.CAUSAL_LM,
        batch_size=given.samples, sequence_length=given.length, clip=CLIP, learning_rate=RATE,
    )  # fmt: skip


def trained_plainly(model: Any, tokens: torch.Tensor) -> list[float]:
    """Train a model eagerly under autocast, and return its losses."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, fused=CUDA)
    losses = []
    for rows in tokens:
        batch = rows.to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


class GivenStart(Observer):
    """An observer that loads weights into a model after its construction."""

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        self.start = start

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        model.load_state_dict(self.start)


def trained(task: Job, recipe: str, start: dict[str, torch.Tensor], tokens: torch.Tensor) -> list[float]:
    """Train under a recipe from these weights, and return the losses."""
    step: Any = open_step(task, Recipe.parse(recipe).setup(), "plain", DEVICE, keep_losses=True)

    def batches() -> Generator[list[dict[str, torch.Tensor]], None, None]:
        for rows in tokens:
            yield [{"input_ids": rows, "labels": rows}]

    step._batches = batches
    losses: list[float] = step.run(len(tokens), GivenStart(start))
    if step.runner is not None and step.runner.why_not:
        raise RuntimeError(f"{recipe} was not recorded: {step.runner.why_not}")
    return losses


def adapted(config: Any, base: dict[str, torch.Tensor], seed: int) -> Any:
    """Return peft's model on the device, with a base's weights and adapters drawn by this seed."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(base)
    options: Any = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options)).to(DEVICE)


def compare(given: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Yield each run with its losses, peft's first for each seed."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    task = job(given)
    config = LlamaConfig(**task.model.config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    losses = trained_plainly(model, sentences(FIRST, 0, (given.before, given.samples, given.length)))
    base = {name: value.cpu() for name, value in model.state_dict().items()}
    yield {"kind": "base", "recipe": "the whole model, the first language", "seed": 0, "losses": losses}
    for seed in SEEDS:
        tokens = sentences(SECOND, seed, (given.steps, given.samples, given.length))
        model = adapted(config, base, seed)
        start = {name: value.detach().clone() for name, value in model.state_dict().items()}
        losses = trained_plainly(model.train(), tokens)
        yield {"kind": "peft", "recipe": "peft under autocast, eager", "seed": seed, "losses": losses}
        for recipe in given.recipe or RECIPES:
            losses = trained(task, recipe, start, tokens)
            yield {"kind": "recipe", "recipe": recipe, "seed": seed, "losses": losses}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return peft's spread over seeds, and each recipe's distances from peft's runs of the same seeds."""
    peft = {run["seed"]: run for run in runs if run["kind"] == "peft"}
    last = [run["last"] for run in peft.values()]
    found: dict[str, Any] = {"peft": last, "spread": max(last) - min(last), "recipes": {}}
    for run in runs:
        if run["kind"] != "recipe":
            continue
        row = found["recipes"].setdefault(run["recipe"], {"last": [], "apart": []})
        row["last"].append(run["last"])
        row["apart"].append(abs(run["last"] - peft[run["seed"]]["last"]))
        row["inside"] = max(row["apart"]) <= found["spread"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", action="append", default=[], help=f"default: {RECIPES}")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--before", type=int, default=300, help="steps in which the base learns")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    about: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(DEVICE) if CUDA else "none", "torch": torch.__version__,
        "options": {name: value for name, value in vars(given).items() if name != "out"},
    }  # fmt: skip
    runs: list[dict[str, Any]] = []
    began = time.time()
    for run in compare(given):
        losses = torch.tensor(run.pop("losses"))
        tenth = max(1, len(losses) // 10)
        means = [float(part.mean()) for part in losses.split(max(1, len(losses) // 20))]
        run |= {"first": float(losses[0]), "last": float(losses[-tenth:].mean()), "means": means}
        run["seconds"], began = time.time() - began, time.time()
        runs.append(run)
        print(
            f"{run['recipe']}, seed {run['seed']}: {run['first']:.4f} to {run['last']:.4f} "
            f"in {run['seconds']:.0f} s",
            flush=True,
        )
        given.out.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    compared = summary(runs)
    print(json.dumps(compared, indent=1))
    given.out.write_text(json.dumps({**about, "compared": compared, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
