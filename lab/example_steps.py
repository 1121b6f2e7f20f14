"""Measure steps of own code on a GPU, beside their predictions.

    python lab/example_steps.py --out FILE.json [--only NAME] [--batch-size N]

Each case runs in a fresh process. The first cases are a GAN with two optimizers, a language model with
bfloat16 autocast, and a convolutional network. In the others, `torch.compile` compiles each layer of a model,
with and without a cache of keys and values. The file has the peaks of the third to fifth step and the
prediction for the same GPU model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from snugfit.documents import write_document
from snugfit.versions import versions

STEPS = 5
GPU = "h200"


def gan_of(noise: int, width: int, numbers: int) -> Callable[[int, torch.device], Callable[[], Any]]:
    """Return a function that builds two networks of these widths with an optimizer each, and returns their
    step.
    """

    def example(batch_size: int, device: torch.device) -> Callable[[], Any]:
        maker = nn.Sequential(nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, numbers), nn.Tanh())
        judge = nn.Sequential(nn.Linear(numbers, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)).to(device)
        of_maker = torch.optim.Adam(maker.to(device).parameters(), lr=2e-4)
        of_judge = torch.optim.SGD(judge.parameters(), lr=2e-4, momentum=0.9)
        criterion = nn.BCEWithLogitsLoss()

        def step() -> None:
            real = torch.rand(batch_size, numbers).to(device)
            fake = maker(torch.randn(batch_size, noise, device=device))
            ones, zeros = torch.ones(batch_size, 1, device=device), torch.zeros(batch_size, 1, device=device)
            of_judge.zero_grad()
            (criterion(judge(real), ones) + criterion(judge(fake.detach()), zeros)).backward()
            of_judge.step()
            of_maker.zero_grad()
            criterion(judge(fake), ones).backward()
            of_maker.step()

        return step

    return example


class LanguageModel(nn.Module):
    """A language model on torch's own encoder layers, whose head shares the embedding."""

    def __init__(self, rows: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def language_model(batch_size: int, device: torch.device) -> Callable[[], Any]:
    """Return the step of a language model with bfloat16 autocast, clipping and a loader."""
    rows = 8000
    model = LanguageModel(rows, 512, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = iter(torch.utils.data.DataLoader(torch.randint(rows, (STEPS * batch_size, 256)), batch_size))

    def step() -> None:
        tokens = next(loader).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.view(-1, rows), tokens.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Block(nn.Module):
    """A block of a residual network (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.other_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images' features."""
        inner = functional.relu(self.norm(self.first(images)), inplace=True)
        return functional.relu(self.other_norm(self.second(inner)) + self.shortcut(images), inplace=True)


def vision(batch_size: int, device: torch.device) -> Callable[[], Any]:
    """Return the step of a residual network whose optimizer exists before the model is moved."""
    sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1), *(Block(*size) for size in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(512, 1000),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.to(device)

    def step() -> None:
        images, labels = torch.randn(batch_size, 3, 224, 224), torch.randint(1000, (batch_size,))
        functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


EXAMPLES: dict[str, tuple[Callable[..., Any], int]] = {
    "gan": (gan_of(128, 2048, 12288), 256),
    "language model": (language_model, 16),
    "vision": (vision, 128),
}
"""Functions of examples, with a batch size."""

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
}  # fmt: skip

COMPILED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2, compiled layers with a cache": (GPT2, "compiled(cache=true)"),
    "gpt2, compiled layers": (GPT2, "compiled"),
    "gpt2, uncompiled layers": (GPT2, "plain"),
    "llama, compiled layers with a cache": (LLAMA, "compiled(cache=true)"),
}
"""Configs of models of 12 layers, with the recipe that predicts the step of `compiled_layers`."""

COMPILED_BATCH, LENGTH = 4, 512


def compiled_layers(
    config: dict[str, Any], recipe: str, batch_size: int, device: torch.device
) -> Callable[[], Any]:
    """Return the step of a script that compiles each layer by `layer.compile()`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from snugfit.step.checkpointing import layer_stacks

    values = dict(config)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.config.use_cache = recipe != "compiled"
    for layer in [layer for stack in layer_stacks(model) for layer in stack] if recipe != "plain" else []:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()

    def step() -> None:
        tokens = torch.randint(model.config.vocab_size, (batch_size, LENGTH)).to(device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, batch_size: int | None) -> dict[str, Any]:
    """Return the peaks and the seconds of a case on the GPU, and the prediction of the same step."""
    from torch._dynamo.utils import counters

    from snugfit import Job, Model, predict, rehearse
    from snugfit.job.config import check_facts

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name in EXAMPLES:
        example, size = EXAMPLES[name]
        step = example(size := batch_size or size, device)
    else:
        step = compiled_layers(*COMPILED[name], size := batch_size or COMPILED_BATCH, device)
    real: dict[str, Any] = {"batch_size": size}
    for number in range(STEPS):
        began = time.perf_counter()
        if number == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        real["step_seconds"] = time.perf_counter() - began
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        for figure in ("requested", "allocated", "reserved"):
            real[f"{figure}_bytes"] = stats[f"{figure}_bytes.all.peak"]
    real["compiled_graphs"] = counters["stats"]["unique_graphs"]
    if name in EXAMPLES:
        predicted = rehearse(EXAMPLES[name][0], batch_size=size, gpu=GPU)
    else:
        config, recipe = COMPILED[name]
        model = Model.from_config(check_facts(config, where=name), name=name)
        job = Job(model=model, task="causal-lm", batch_size=size, sequence_length=LENGTH)  # type: ignore[arg-type]
        predicted = predict(job, recipe, gpu=GPU)
    told = predicted.to_json()
    figures = ("requested_bytes", "allocated_bytes", "reserved_bytes")
    foreseen = {key: told["footprint"][key] for key in figures}
    return {
        "case": name,
        "real": real,
        "predicted": {**foreseen, "step_seconds": told["timing"]["step_seconds"], "doubts": told["doubts"]},
    }


def _work(connection: Any, name: str, batch_size: int | None) -> None:
    try:
        connection.send(measure(name, batch_size))
    except Exception:
        connection.send({"case": name, "error": traceback.format_exc()[-2000:]})


def main() -> None:
    """Measure each case in a process of its own, and write the file after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=[*COMPILED, *EXAMPLES])
    parser.add_argument("--batch-size", type=int)
    given = parser.parse_args()
    cases = []
    for name in [given.only] if given.only else [*EXAMPLES, *COMPILED]:
        context = multiprocessing.get_context("spawn")
        connection, there = context.Pipe()
        child = context.Process(target=_work, args=(there, name, given.batch_size))
        child.start()
        there.close()
        try:
            cases.append(connection.recv())
        except EOFError:
            cases.append({"case": name, "error": "the process ended"})
        child.join()
        print(json.dumps(cases[-1]))
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        write_document(
            given.out,
            {"schema": 1, "what": "example-steps", "gpu": gpu, "versions": versions(), "cases": cases},
        )


if __name__ == "__main__":
    main()
