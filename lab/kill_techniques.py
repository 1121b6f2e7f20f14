"""Draw the techniques of a chain of kills beside its data (`kill_chains.py --techniques`).

A recipe has a drawn technique in some slots, in the form of each front-end. The form is a part of the recipe,
the `optim` of a Trainer, or a setting of peft. An unsupported combination is refused before the first step,
and counts as refused.
"""

from __future__ import annotations

import random
from typing import Any

import torch

LIKELY = 0.4
"""Probability that a slot has another technique than its default."""

SLOTS: dict[str, tuple[str, ...]] = {
    "precision": ("bf16", "bf16", "bf16_master", "bf16_master", "bf16_pure", "fp32"),
    "checkpointing": (
        "every_layer", "every_nth_layer(n=2)", "first_layers(k=1)", "segments(k=1)", "segments(k=2)",
        "selective(products)", "selective(every_other_product)",
    ),
    "offload": ("host(all)", "host(all, layers=1)", "host(checkpoints)"),
    "gradients": ("released",),
    "attention": ("eager", "padding_free"),
    "kernels": ("fused",),
    "engine": ("captured", "compiled(backend=aot_eager)", "compiled(what=model, backend=eager)"),
    "allocator": ("expandable",),
    "optimizer": (
        "adamw_fused", "adamw_loop", "adamw_compact", "adamw_compact", "adamw_compact(master_bits=24)",
        "adamw_4bit", "adamw_8bit", "adamw_8bit(embeddings=8)", "adamw_stochastic", "adafactor",
        "adafactor_torch", "apollo(rank=4, renew=3)", "galore(rank=4, update_proj_gap=3)",
        "galore(rank=4, update_proj_gap=3, proj_type=full)", "host_adamw", "lion", "lion_8bit", "muon",
        "paged_adamw", "paged_adamw(bits=8)", "paged_lion", "sgd",
    ),
}  # fmt: skip
"""Parts of a recipe that run on a CPU too, if only as plain code."""

ADAPTERS = (
    "lora(r=2, targets={targets}, dropout=0.1)", "lora(r=2, targets={targets}, dora=true)",
    "lora(r=2, targets={targets}, rslora=true)", "lora(r=2, targets=all-linear)",
)  # fmt: skip
"""Adapters named by recipes, in `train` and `fit`. A custom loop has peft's."""

TRAINER_OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "lion_32bit", "lion_8bit", "paged_adamw_32bit",
    "ademamix", "ademamix_8bit", "rmsprop", "rmsprop_bnb", "adagrad", "sgd", "adafactor", "stable_adamw",
    "schedule_free_adamw", "grokadamw", "galore_adamw", "apollo_adamw", "lomo", "adalomo",
)  # fmt: skip
"""Values of `TrainingArguments(optim=...)`. Values whose packages are missing are refused."""


SELDOM = {"engine": 0.5, "allocator": 0.2}
"""Factors of `LIKELY` by slot."""

MEETINGS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("precision", "bf16_master", "optimizer", ("", "adamw_fused", "adamw_compact(master_bits=24)")),
    ("precision", "bf16_pure", "optimizer", ("adamw_stochastic", "sgd", "muon", "lion_8bit", "")),
    ("gradients", "released", "optimizer", ("", "adamw_fused", "adamw_compact", "sgd")),
    ("engine", "compiled", "kernels", ("",)),
    ("engine", "compiled", "offload", ("",)),
)
"""Supported neighbours of a part of a recipe. One time of ten another may be drawn, which is refused."""


def draw_techniques(draw: random.Random, front_end: str) -> dict[str, Any]:
    """Draw the model, the parts of its recipe and its surroundings, as entries of a configuration."""
    model = draw.choice(["bert", "llama"])
    drawn = {
        slot: draw.choice(parts) if draw.random() < LIKELY * SELDOM.get(slot, 1.0) else ""
        for slot, parts in SLOTS.items()
    }
    drawn["head"] = "chunked_loss(tokens=8)" if model == "llama" and draw.random() < LIKELY else ""
    if drawn.get("attention") == "padding_free":
        drawn["precision"] = "bf16"
    if drawn["offload"] == "host(checkpoints)" and not drawn["checkpointing"]:
        drawn["checkpointing"] = "every_layer"
    for slot, value, meets, fitting in MEETINGS:
        if drawn[slot].startswith(value) and draw.random() < 0.9:
            drawn[meets] = draw.choice(fitting)
    if front_end != "train" and draw.random() < 0.9:  # these front-ends refuse both
        drawn["gradients"] = ""
        drawn["precision"] = drawn["precision"].replace("bf16_master", "bf16")
    if drawn["kernels"] and drawn["attention"] == "eager" and draw.random() < 0.9:
        drawn["attention"] = ""
    if drawn["optimizer"] == "adamw_compact(master_bits=24)" and drawn["precision"] != "bf16_master":
        drawn["optimizer"] = "adamw_compact"
    config: dict[str, Any] = {"model": model, "average": front_end != "train" and draw.random() < 0.15}
    asks = draw.choice(["own", "recipe", "recipe", "optim"]) if front_end == "fit" else "recipe"
    if front_end == "accelerate" and draw.random() < 0.3:
        asks = "own"
    if asks != "recipe":
        drawn["optimizer"] = ""
    config["optim"] = draw.choice(TRAINER_OPTIMIZERS) if asks == "optim" else ""
    if front_end != "accelerate" and draw.random() < 0.3:
        targets = "query|value" if model == "bert" else "q_proj|v_proj"
        drawn["adapters"] = draw.choice(ADAPTERS).format(targets=targets)
    config["makes_optimizer"] = asks == "own" and "adapters" not in drawn
    config["parts"] = sorted(part for part in drawn.values() if part and asks != "optim")
    return config


class Average(torch.nn.Module):
    """A running mean of a model's weights in buffers, which each training pass moves."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        for index, weight in enumerate(model.parameters()):
            self.register_buffer(f"mean_{index}", weight.detach().clone())

    def move(self, model: torch.nn.Module) -> None:
        """Move each mean towards its weight."""
        weights = (weight for name, weight in model.named_parameters())
        for mean, weight in zip(self.buffers(), weights, strict=True):
            mean.lerp_(weight.detach().to(mean.dtype), 1 - self.decay)


def add_average(model: torch.nn.Module) -> None:
    """Add a running mean of its weights (EMA) to the model."""
    average = Average(model)
    model.add_module("average_of_weights", average)

    def move(module: torch.nn.Module, given: Any) -> None:
        if module.training and torch.is_grad_enabled():
            average.move(module)

    model.register_forward_pre_hook(move)
