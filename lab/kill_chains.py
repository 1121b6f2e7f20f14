"""Kill runs at random moments, in chains, and compare their results with those of an undisturbed run.

    python lab/kill_chains.py OUT.json [--kills 250] [--seeds 1 2] [--device cpu] [--only fit] [--bf16]
                                     [--techniques]

Each configuration is drawn:

- the front-end: `train`, `fit` or `accelerate`
- the data: lists, samples with random draws, streams, own generators and counters, workers, user's loaders
- adapters, the optimizer, the schedule, evaluations, micro-batches, bf16 and the interval of checkpoints
- a recipe and a decoder, with `--techniques` (`kill_techniques.py`)

Dropout is on. First the configuration runs whole. Then it starts in another folder and is killed while it
starts, steps, evaluates or writes. Four kills of five are SIGKILL, the others SIGTERM. It starts again until
it runs to its end. Losses, norms, rates, evaluations and weights must then be equal, bit for bit. A
configuration that is refused before its first step counts as refused. All else is a failure and is listed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy
import peft
import torch
import transformers
from kill_techniques import add_average, draw_techniques
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

import snugfit
from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.job.build import instantiate
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.training.journal import read_journal
from snugfit.versions import versions

STEPS = 12
PAUSE_SECONDS = 0.01
"""Pause after each step, so that kills also fall between steps."""

MOST_KILLS = 6
"""Largest number of kills of one chain; then it runs to its end."""

MOST_SECONDS = 120.0
REFUSED = 3

Config = dict[str, Any]
Sample = dict[str, Any]

# ---- draws -----------------------------------------------------------------------------------------------


def samples(count: int = 18) -> list[Sample]:
    """Return samples of uneven length in two classes."""
    draw = random.Random(0)
    return [
        {"input_ids": [draw.randrange(5, 90) for _ in range(draw.randrange(4, 12))], "labels": index % 2}
        for index in range(count)
    ]


def padded(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """Return a batch, padded to its longest sample."""
    longest = max(len(sample["input_ids"]) for sample in batch)
    rows = [[*sample["input_ids"], *[0] * (longest - len(sample["input_ids"]))] for sample in batch]
    mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in batch]
    labels = [sample["labels"] for sample in batch]
    return {key: torch.tensor(value) for key, value in
            (("input_ids", rows), ("attention_mask", mask), ("labels", labels))}  # fmt: skip


def spoken(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """Return a padded batch for a language model, whose labels are its tokens."""
    made = padded(batch)
    return {**made, "labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}


def slowly_padded(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """Return a padded batch slowly, so that evaluations last."""
    time.sleep(0.02)
    return padded(batch)


def slowly_spoken(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """Return a padded batch for a language model slowly."""
    time.sleep(0.02)
    return spoken(batch)


COLLATORS: dict[str, Callable[[list[Sample]], dict[str, torch.Tensor]]] = {"bert": padded, "llama": spoken}
SLOW_COLLATORS = {"bert": slowly_padded, "llama": slowly_spoken}


class Masking:
    """A collator that makes its generator with its first batch."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.generator: torch.Generator | None = None

    def __call__(self, batch: list[Sample]) -> dict[str, torch.Tensor]:
        self.generator = self.generator or torch.Generator().manual_seed(11)
        made = COLLATORS[self.model](batch)
        hidden = torch.rand(made["input_ids"].shape, generator=self.generator) < 0.3
        return {**made, "input_ids": made["input_ids"].masked_fill(hidden, 3)}


class Drawing(Dataset[Any]):
    """Samples with draws from the process's generators."""

    def __len__(self) -> int:
        return 18

    def drawn(self) -> list[int]:
        """Return a token of each generator."""
        return [int(torch.randint(5, 90, ())), random.randrange(5, 90), int(numpy.random.randint(5, 90))]

    def __getitem__(self, index: int) -> Sample:
        sample = samples()[index]
        return {**sample, "input_ids": [*self.drawn(), *sample["input_ids"]]}


class DrawingOwn(Drawing):
    """Samples with draws from the dataset's own generators."""

    def __init__(self) -> None:
        self.numbers, self.choice = numpy.random.default_rng(3), random.Random(4)

    def drawn(self) -> list[int]:
        """Return a token of each generator."""
        return [int(self.numbers.integers(5, 90)), self.choice.randrange(5, 90)]


class Stream(IterableDataset[Any]):
    """A stream of all samples but one, each with a drawn token."""

    def __iter__(self) -> Iterator[Sample]:
        for sample in samples()[:17]:
            yield {**sample, "input_ids": [random.randrange(5, 90), *sample["input_ids"]]}


class Counting(IterableDataset[Any]):
    """A stream whose order depends on the number of its iterations."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Sample]:
        self.epoch += 1
        yield from random.Random(self.epoch).sample(samples(), 16)


def hub_stream() -> Any:
    """Return a stream of `datasets`, shuffled by epoch."""
    return datasets.Dataset.from_list(samples()).to_iterable_dataset(num_shards=2).shuffle(5, buffer_size=8)


DATA: dict[str, Callable[[], Any]] = {
    "list": samples, "drawing": Drawing, "drawing from its own": DrawingOwn, "stream": Stream,
    "stream of datasets": hub_stream, "counting stream": Counting, "masking collator": samples,
    "own loader": Drawing, "workers": Drawing,
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    "adam amsgrad": lambda weights: torch.optim.Adam(weights, lr=1e-3, amsgrad=True),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=1e-3),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=1e-3),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=1e-3),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2),
    "adadelta": lambda weights: torch.optim.Adadelta(weights, lr=0.5),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, momentum=0.5, centered=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=0.05, t0=4),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=1e-3),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}
RECIPE_OPTIMIZERS = ("adamw", "adamw_loop", "adafactor", "adafactor_torch", "sgd(momentum=0.9)", "adamw_8bit")
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=STEPS + 2, cycle_momentum=False
    ),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3],
    ),
}  # fmt: skip
TRAINER_SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "warmup_stable_decay",
)  # fmt: skip

ADAPTERS: dict[str, Callable[..., Any]] = {
    "lora": lambda targets, **of: peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, **of),
    "rslora": lambda targets, **of: peft.LoraConfig(r=2, target_modules=targets, use_rslora=True, **of),
    "dora": lambda targets, **of: peft.LoraConfig(r=2, target_modules=targets, use_dora=True, **of),
    "ia3": lambda targets, **of: peft.IA3Config(target_modules=targets, feedforward_modules=[], **of),
    "loha": lambda targets, **of: peft.LoHaConfig(r=2, target_modules=targets, **of),
    "lokr": lambda targets, **of: peft.LoKrConfig(r=2, target_modules=targets, **of),
    "vera": lambda targets, **of: peft.VeraConfig(r=2, target_modules=targets, **of),
    "oft": lambda targets, **of: peft.OFTConfig(r=0, oft_block_size=4, target_modules=targets, **of),
    "prompt": lambda targets, **of: peft.PromptTuningConfig(num_virtual_tokens=3, **of),
    "prefix": lambda targets, **of: peft.PrefixTuningConfig(num_virtual_tokens=3, **of),
}
TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}
WAYS = ("named mine", "second", "embeddings train too", "mixin")
"""Ways to add adapters, beside an adapter called "default"."""

NOT_INJECTED = ("vera", "prompt", "prefix")
"""Adapters that transformers' own `add_adapter` refuses."""


def draw_config(draw: random.Random, only: str | None, techniques: bool = False) -> Config:
    """Draw one configuration, with a recipe if `techniques` is set."""
    config = {"model": "bert", "parts": [], **draw_plainly(draw, only)}
    if not techniques:
        return config
    config |= draw_techniques(draw, config["front_end"])
    config["bf16"] &= bool(config["optim"])
    in_recipe = any(part.startswith("lora") for part in config["parts"])
    if in_recipe or (config["adapters"] != "none" and draw.random() < 0.4):
        config["adapters"], config["way"] = "none", "default"
    if config["front_end"] == "train":
        config["optimizer"] = "adamw"
    if "released" in config["parts"] and draw.random() < 0.9:
        config["micro_batches"] = 1
    return config


def draw_plainly(draw: random.Random, only: str | None) -> Config:
    """Draw a configuration without techniques, and leave out options that its front-end does not have."""
    front_end = only or draw.choice(["train", "fit", "accelerate"])
    config: Config = {
        "front_end": front_end, "seed": draw.randrange(1000), "save_steps": draw.choice([1, 1, 2, 3]),
        "micro_batches": draw.choice([1, 1, 2]), "bf16": draw.random() < 0.2,
    }  # fmt: skip
    if front_end == "train":
        config |= {
            "data": draw.choice(["list", "list", "workers"]), "optimizer": draw.choice(RECIPE_OPTIMIZERS),
            "schedule": draw.choice(TRAINER_SCHEDULES), "adapters": draw.choice(["none", "none", "lora"]),
            "evaluation": draw.choice(["no", "steps", "epoch"]),
        }  # fmt: skip
        return config
    config |= {
        "data": draw.choice([*(name for name in DATA if name != "workers"), "drawing", "stream"]),
        "optimizer": draw.choice([*OPTIMIZERS]),
        "schedule": draw.choice([*SCHEDULES] if front_end == "accelerate" else TRAINER_SCHEDULES),
        "adapters": draw.choice(["none", "none", *ADAPTERS]),
        "evaluation": "no" if front_end == "accelerate" else draw.choice(["no", "steps", "epoch"]),
    }  # fmt: skip
    if draw.random() < 0.05:
        config["data"] = "workers"
    config["way"] = draw.choice(["default", *WAYS]) if config["adapters"] != "none" else "default"
    if config["way"] == "mixin" and config["adapters"] in NOT_INJECTED:
        config["way"] = "named mine"
    return config


# ---- one run ---------------------------------------------------------------------------------------------


TASKS = {"bert": Task.SEQUENCE_CLASSIFICATION, "llama": Task.CAUSAL_LM}


def job_of(config: Config) -> Job:
    """Return the job of a BERT or a Llama of two layers, with dropout."""
    name = config["model"]
    facts = {
        "model_type": name, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96,
        "intermediate_size": 48, "max_position_embeddings": 32, "num_hidden_layers": 2,
        **({"attention_dropout": 0.1, "num_key_value_heads": 2} if name == "llama" else {}),
    }  # fmt: skip
    model = Model.from_config(facts, name=name)
    return Job(
        model=model, task=TASKS[name], batch_size=4, sequence_length=16, clip=1.0, learning_rate=1e-3,
    )  # fmt: skip


def model_of(config: Config) -> Any:
    """Return the model with its adapters."""
    torch.manual_seed(config["seed"])
    model: Any = instantiate(job_of(config), dtype="float32", attention="sdpa").train()
    if config.get("average"):
        add_average(model)
    if config["adapters"] == "none":
        return model
    kind = "SEQ_CLS" if config["model"] == "bert" else "CAUSAL_LM"
    make = partial(ADAPTERS[config["adapters"]], TARGETS[config["model"]], task_type=kind)
    way = config["way"]
    if way == "mixin":
        model.add_adapter(make())
        return model
    name = "mine" if way == "named mine" else "default"
    wrapped: Any = peft.get_peft_model(model, make(), adapter_name=name)
    if way == "second":
        wrapped.add_adapter("second", make())
        wrapped.set_adapter("second")
    if way == "embeddings train too":
        model.get_input_embeddings().weight.requires_grad_(True)
    return wrapped


def collator_of(config: Config, plain: dict[str, Any]) -> Any:
    """Return the model's plain collator, or one with random draws."""
    model = config["model"]
    return Masking(model) if config["data"] == "masking collator" else plain[model]


def recipe_of(config: Config) -> str:
    """Return the recipe of a `fit` or of a custom loop, in one line."""
    parts = list(config["parts"]) or (["bf16"] if config["bf16"] else [])
    parts += [f"micro_batches({config['micro_batches']})"] if config["micro_batches"] > 1 else []
    return " + ".join(parts) or "plain"


def optimizer_of(config: Config, model: Any) -> Any:
    """Return the user's own optimizer over the trainable weights."""
    return OPTIMIZERS[config["optimizer"]]([w for w in model.parameters() if w.requires_grad])


def loader_of(config: Config) -> DataLoader[Any]:
    """Return the loader of a custom loop, or of a user's own trainer."""
    data = DATA[config["data"]]()
    own = torch.Generator().manual_seed(8) if config["data"] == "own loader" else None
    shuffle = None if isinstance(data, IterableDataset) else True
    return DataLoader(
        data, batch_size=4 // (config["micro_batches"] if config["front_end"] == "fit" else 1),
        shuffle=shuffle, generator=own, num_workers=2 if config["data"] == "workers" else 0,
        collate_fn=collator_of(config, COLLATORS),
    )  # fmt: skip


def run_train(config: Config, folder: Path, watch: Any, device: str) -> tuple[Any, Any]:
    """Run our own loop. Return the model and the result of its evaluation."""
    parts = [config["optimizer"] if config["optimizer"] != "adamw" else "plain", *config["parts"]]
    targets = "|".join(TARGETS[config["model"]])
    parts += [f"lora(r=2, targets={targets})"] if config["adapters"] == "lora" else []
    parts += [f"micro_batches({config['micro_batches']})"] if config["micro_batches"] > 1 else []
    parts += ["bf16"] if config["bf16"] else []
    parts += ["workers"] if config["data"] == "workers" else []
    parts = [part for part in parts if part != "plain"] or ["plain"]
    evaluation = config["evaluation"]
    done = snugfit.train(
        job_of(config), " + ".join(parts), samples(), output_dir=folder, collate=COLLATORS[config["model"]],
        device=device, watch=watch,
        max_steps=STEPS, seed=config["seed"], save_steps=config["save_steps"], eval_strategy=evaluation,
        eval_steps=3 if evaluation == "steps" else None,
        evaluation=samples(8) if evaluation != "no" else None,
        lr_scheduler_type=config["schedule"], lr_scheduler_kwargs=stable(config), foresee=False,
    )  # fmt: skip
    if done.exit_code:
        raise SystemExit(done.exit_code)
    return done.model, str(done.evaluated)


def stable(config: Config) -> dict[str, Any]:
    """Return the extra arguments of one of the schedules."""
    return {"num_decay_steps": 4} if config["schedule"] == "warmup_stable_decay" else {}


class OwnLoader(transformers.Trainer):  # type: ignore[misc]
    """A trainer with the user's loader."""

    config: Config

    def get_train_dataloader(self) -> Any:
        """Return the user's loader, not accelerate's."""
        return loader_of(self.config)


def run_fit(config: Config, folder: Path, watch: Any, device: str) -> tuple[Any, Any]:
    """Run a Trainer. Return the model and its log."""
    named = recipe_of(config) if config.get("optim") == "" else None  # else by the Trainer's arguments
    model, micro = model_of(config), 1 if named else config["micro_batches"]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4 // micro, report_to="none",
        gradient_accumulation_steps=micro, learning_rate=1e-3, logging_steps=2, disable_tqdm=True,
        save_strategy="steps", save_steps=config["save_steps"], save_total_limit=3, seed=config["seed"],
        eval_strategy=config["evaluation"], eval_steps=3, lr_scheduler_type=config["schedule"],
        lr_scheduler_kwargs=stable(config), remove_unused_columns=False, bf16=config["bf16"] and not named,
        use_cpu=device == "cpu", dataloader_num_workers=2 if config["data"] == "workers" else 0,
        **({"optim": config["optim"]} if config.get("optim") else {}),
    )  # fmt: skip
    kind = OwnLoader if config["data"] == "own loader" else transformers.Trainer
    makes = config.get("makes_optimizer", True)
    trainer = kind(
        model=model, args=arguments, train_dataset=DATA[config["data"]](), eval_dataset=samples(8),
        data_collator=collator_of(config, SLOW_COLLATORS),
        optimizers=(optimizer_of(config, model) if makes else None, None),
    )  # fmt: skip
    trainer.config = config
    trainer.remove_callback(transformers.PrinterCallback)
    snugfit.fit(trainer, named, watch=watch)
    resumes = any(path.name.startswith("checkpoint-") for path in folder.glob("checkpoint-*[0-9]"))
    trainer.train(resume_from_checkpoint=resumes or None)
    timed = ("runtime", "per_second", "train_loss", "total_flos")
    log = [
        {name: value for name, value in line.items() if not any(part in name for part in timed)}
        for line in trainer.state.log_history
    ]
    return trainer.model, log


def run_accelerate(config: Config, folder: Path, watch: Any, device: str) -> tuple[Any, Any]:
    """Run a custom loop. Return the model."""
    model = model_of(config).to(device)
    optimizer, loader = optimizer_of(config, model), loader_of(config)
    run = snugfit.accelerate(
        model, optimizer, loader, recipe_of(config), output_dir=folder, clip=1.0, watch=watch,
        scheduler=SCHEDULES[config["schedule"]], save_total_limit=3,
    )  # fmt: skip
    with run:
        run.resume()
        for _ in run.epochs(100):
            for batch in run:
                if run.steps == STEPS:
                    return run.model, None
                run.step({name: value.to(device) for name, value in batch.items()})
                if run.steps % config["save_steps"] == 0:
                    run.save()
    raise AssertionError("100 epochs are over")


RUNS = {"train": run_train, "fit": run_fit, "accelerate": run_accelerate}


def child(config: Config, folder: Path, device: str, stepped: int) -> int:
    """Run one start, write its results and return its exit code. The caller is a process of its own."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(config["seed"])

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            os.write(stepped, b".")
            time.sleep(PAUSE_SECONDS)

    try:
        model, log = RUNS[config["front_end"]](config, folder, watch, device)
    except (SnugfitError, ImportError) as refusal:  # ImportError: `optim` without its package
        (folder.parent / "refused.txt").write_text(f"{type(refusal).__name__}: {refusal}", encoding="utf-8")
        return REFUSED
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if torch.is_tensor(value):
            digest.update(
                name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    result = {"weights": digest.hexdigest(), "log": log}
    (folder.parent / "result.json").write_text(json.dumps(result, default=str), encoding="utf-8")
    return 0


# ---- chains ----------------------------------------------------------------------------------------------


def exit_code_of(config: Config, folder: Path, device: str, stepped: int) -> int:
    """Run one start in this process and return its exit code."""
    try:
        return child(config, folder, device, stepped)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()


class Start:
    """One start of a run, which may be killed."""

    def __init__(self, config: Config, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stepped, write = os.pipe()
        self.began = time.monotonic()
        sys.stdout.flush()
        self.process = os.fork()
        if self.process:
            os.close(write)
            return
        code = 1
        try:
            with (folder.parent / "output.txt").open("a", encoding="utf-8") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                if device != "cpu":  # CUDA does not survive a fork
                    os.set_inheritable(write, True)
                    given = json.dumps([config, str(folder), device, write])
                    os.execv(sys.executable, [sys.executable, __file__, "--start", given])
                code = exit_code_of(config, folder, device, write)
        finally:
            os._exit(code)

    def wait_for_step(self, seconds: float) -> None:
        """Wait until the first step, at most for so long."""
        select.select([self._stepped], [], [], seconds)

    def end(self, most: float = MOST_SECONDS) -> int | None:
        """Return the exit code, or minus the signal. Return None if the process does not end."""
        deadline = time.monotonic() + most
        while time.monotonic() < deadline:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                os.close(self._stepped)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        return None


def steps_of(folder: Path) -> dict[int, list[Any]]:
    """Return the figures of each step in the journal. For a repeated step the last ones count."""
    if not (folder / "journal.jsonl").exists():
        return {}
    return {
        event["step"]: [event["loss"], event["norm"], event["learning_rate"]]
        for event in read_journal(folder)
        if event["event"] == "step"
    }


def outcome_of(folder: Path) -> Any:
    """Return the results of a finished run: figures of each step, evaluations, weights."""
    steps = steps_of(folder)
    result = json.loads((folder.parent / "result.json").read_text(encoding="utf-8"))
    return {"steps": {str(step): figures for step, figures in sorted(steps.items())}, **result}


def differences(whole: Any, killed: Any) -> list[str]:
    """Describe the differences of two outcomes."""
    steps = [step for step in whole["steps"] if killed["steps"].get(step) != whole["steps"][step]]
    found = [f"steps {', '.join(steps)}"] if steps or len(whole["steps"]) != len(killed["steps"]) else []
    return found + [name for name in ("log", "weights") if whole[name] != killed[name]]


def chain(config: Config, draw: random.Random, device: str, wanted: int) -> dict[str, Any]:
    """Run one configuration whole, then kill it again and again, at most `wanted` times."""
    with tempfile.TemporaryDirectory() as place:
        whole_at, killed_at = Path(place) / "whole" / "out", Path(place) / "killed" / "out"
        start = Start(config, whole_at, device)
        start.wait_for_step(MOST_SECONDS)
        starting = time.monotonic() - start.began
        code, stepping = start.end(), time.monotonic() - start.began - starting
        if code == REFUSED:
            steps = steps_of(whole_at)
            outcome = "refused after a step" if steps else "refused"
            return {"outcome": outcome, "says": _said(whole_at), "kills": 0}
        if code != 0:
            return {"outcome": f"the whole run ended with {code}", "says": _said(whole_at), "kills": 0}
        kills: list[str] = []
        while True:
            start = Start(config, killed_at, device)
            if len(kills) < min(MOST_KILLS, wanted):
                signal_number = signal.SIGKILL if draw.random() < 0.8 else signal.SIGTERM
                if draw.random() < 0.15:
                    time.sleep(draw.uniform(0, starting))
                else:
                    start.wait_for_step(MOST_SECONDS)
                    time.sleep(draw.uniform(0, stepping * 1.1))
                os.kill(start.process, signal_number)
                kills.append(signal_number.name)
            code = start.end()
            if code == 0:
                break
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 75, 143):
                if code is None:
                    os.kill(start.process, signal.SIGKILL)
                name = "refused when it was resumed" if code == REFUSED else f"ended with {code}"
                return {"outcome": name, "says": _said(killed_at), "kills": len(kills)}
        wrong = differences(outcome_of(whole_at), outcome_of(killed_at))
        return {"outcome": "another" if wrong else "same", "says": "; ".join(wrong), "kills": len(kills)}


def _said(folder: Path) -> str:
    """Return the refusal, or the last printed line, without the path of the machine's own folder."""
    refusal, output = folder.parent / "refused.txt", folder.parent / "output.txt"
    text = (refusal if refusal.exists() else output).read_text(encoding="utf-8").strip()
    last = text if refusal.exists() else text.rpartition("\n")[2]
    return last.replace(str(folder), "OUT")[-1200:]


def main() -> None:
    """Draw configurations until enough kills are done, and write the results."""
    if sys.argv[1:2] == ["--start"]:
        config, folder, device, stepped = json.loads(sys.argv[2])
        os._exit(exit_code_of(config, Path(folder), device, stepped))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--kills", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="a process for each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--bf16", action="store_true", help="every configuration, not a fifth of them")
    parser.add_argument("--techniques", action="store_true", help="draw a recipe too")
    parser.add_argument("--minutes", type=float, default=600.0)
    given = parser.parse_args()
    each = -(-given.kills // len(given.seeds))
    parts = {seed: given.output.with_suffix(f".seed-{seed}") for seed in given.seeds}
    processes = []
    for seed, part in parts.items():
        process = os.fork()
        if not process:
            draw_chains(seed, each, given, part)
            os._exit(0)
        processes.append(process)
    for process in processes:
        os.waitpid(process, 0)
    lines = [line for part in parts.values() for line in part.read_text(encoding="utf-8").splitlines()]
    write_document(given.output, document_of([json.loads(line) for line in lines], given))
    for part in parts.values():
        part.unlink()


def draw_chains(seed: int, wanted: int, given: argparse.Namespace, part: Path) -> None:
    """Draw chains of so many kills, and write each as a line of the file when it ends."""
    draw, deadline, kills = random.Random(seed), time.monotonic() + 60 * given.minutes, 0
    part.write_text("", encoding="utf-8")
    while kills < wanted and time.monotonic() < deadline:
        config = draw_config(draw, given.only, given.techniques)
        if given.bf16:
            config["bf16"] = True
        done = chain(config, random.Random(draw.randrange(1 << 30)), given.device, wanted - kills)
        kills += done["kills"]
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"config": config, **done}) + "\n")
        shown = " ".join(str(value) for value in config.values())
        print(f"{seed}: {kills:4} {done['outcome']:10} {shown} {done['says']}", flush=True)


def document_of(chains: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    """Return the document of the chains so far."""
    by_front_end = Counter(dict.fromkeys(RUNS, 0))
    for entry in chains:
        by_front_end[entry["config"]["front_end"]] += entry["kills"]
    return {
        "what": "kill chains",
        "date": datetime.date.today().isoformat(),
        "seeds": given.seeds,
        "techniques": given.techniques,
        "device": given.device,
        "versions": versions(),
        "kills": sum(by_front_end.values()),
        "kills_by_front_end": dict(by_front_end),
        "outcomes": dict(Counter(entry["outcome"] for entry in chains)),
        "chains": chains,
    }


if __name__ == "__main__":
    main()
