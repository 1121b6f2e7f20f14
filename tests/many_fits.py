"""Fitted trainers in several processes on the CPU, as torchrun starts them. They use the Trainer's own DDP or
FSDP2 with gloo."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from clean_forks import Forks
from exported_processes import taken_for_gpus
from fitted import classified, losses_of, model_of, spoken, trainer_of
from many_ranks import fill_caches, free_port
from snugfit import fit
from snugfit.errors import SnugfitError
from snugfit.job.batch import IGNORED


def mostly_masked(count: int) -> list[dict[str, Any]]:
    """Return samples with a label per token; in three of four samples no label counts."""
    samples = spoken(count)
    for index, sample in enumerate(samples):
        if index % 4:
            sample["labels"] = [IGNORED] * len(sample["labels"])
    return samples


DATA = {"bert": classified, "gpt2": spoken, "gpt2 masked": mostly_masked}

LAYERS = {"bert": "BertLayer", "gpt2": "GPT2Block"}
"""Classes that FSDP2 wraps, each of which becomes a group."""


def spread(model: str, **config: Any) -> dict[str, Any]:
    """Return arguments of a Trainer that shards this model over its processes."""
    layers = {"version": 2, "transformer_layer_cls_to_wrap": [LAYERS[model.split(maxsplit=1)[0]]]}
    return {"fsdp": True, "fsdp_config": {**layers, **config}, "use_cpu": False}


def fit_of(
    folder: Path, *, rank: int = 0, model: str = "bert", recipe: str | None = "ddp", **asked: Any
) -> Any:
    """Train in this process on samples of uneven length; return the trainer. A `fault` of this rank occurs at
    the end of a step. With `saves` it saves its model at the end, and evaluates once more. `more_runs` start
    again after the previous run. With `adapters` only LoRA's factors train."""
    resume, dropout = asked.pop("resume", None), asked.pop("dropout", 0.0)
    fault, evaluates = asked.pop("fault", None), asked.pop("evaluates", False)
    saves, more_runs = asked.pop("saves", False), asked.pop("more_runs", 0)
    if (config := asked.pop("fsdp", None)) is not None:
        asked |= spread(model, **config)
    micro, samples = tuple(asked.pop("micro", (4, 1))), asked.pop("samples", 48)
    adapters = asked.pop("adapters", False)
    wanted: dict[str, Any] = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 3, "train_sampling_strategy": "random",
        "seed": 5, **asked,
    }  # fmt: skip
    more: dict[str, Any] = {"eval_dataset": DATA[model](10)} if evaluates else {}
    built = model_of(model.split(maxsplit=1)[0], dropout=dropout)
    trainer = trainer_of(
        folder,
        with_adapters(built) if adapters else built,
        DATA[model](samples),
        micro=micro,
        more=more,
        **wanted,
    )
    if fault is not None and fault["rank"] == rank:
        trainer.add_callback(_Fault(**fault))
    told: list[dict[str, Any]] = []
    trainer.told = told
    if recipe is not None:
        fit(trainer, None if recipe == "its own" else recipe, watch=told.append)
    trainer.train(resume_from_checkpoint=resume)
    for _ in range(more_runs):
        trainer.train()
    if saves:
        trainer.save_model(f"{folder}.model")
        trainer.evaluate()
    return trainer


def with_adapters(model: Any) -> Any:
    """Return peft's model around this one, as a user's script makes it."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False))


class _Fault(transformers.TrainerCallback):  # type: ignore[misc]
    """Kills the process, raises a signal, spoils weights or exhausts memory at the end of a step."""

    def __init__(self, step: int, kind: str, rank: int) -> None:
        self.step, self.kind = step, kind

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step != self.step:
            return
        if self.kind == "dies":
            os._exit(9)
        if self.kind == "is_stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.kind == "exhausts":
            model.register_forward_pre_hook(_no_memory)
        if self.kind == "spoils":
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))


def _no_memory(module: Any, inputs: Any) -> None:
    raise MemoryError("no memory")


def one_fit(rank: int, size: int, port: int, folder: str, asked: dict[str, Any]) -> int:
    """Train as one of several processes and write the result beside the folder."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    launched = asked.pop("launched", {})
    os.environ.update(launched)
    try:
        with taken_for_gpus() if launched or "fsdp" in asked else contextlib.nullcontext():
            trainer = fit_of(Path(folder), rank=rank, **asked)
    except SnugfitError as error:
        Path(f"{folder}.rank-{rank}").write_text(f"{type(error).__name__}: {error}")
        return error.exit_code
    except SystemExit as ended:
        return int(ended.code or 0)
    write_result(trainer, Path(f"{folder}.rank-{rank}"))
    return 0


def write_result(trainer: Any, file: Path) -> None:
    """Write a trainer's weights, losses and events."""
    from snugfit.features.distributed.checkpoint.shards import whole_weights

    torch.save(whole_weights(trainer.model), f"{file}.pt")
    log = [line for line in trainer.state.log_history if "eval_loss" in line]
    result = {"losses": losses_of(trainer), "evaluated": [line["eval_loss"] for line in log]}
    file.write_text(json.dumps({**result, "told": trainer.told}, default=str))


def result_in(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the result that `write_result` wrote for a rank."""
    file = f"{folder}.rank-{rank}"
    return json.loads(Path(file).read_text()), torch.load(f"{file}.pt")


def fits(forks: Forks, folder: Path, size: int = 2, **asked: Any) -> list[int]:
    """Return the exit codes of processes that have trained together."""
    port = free_port()
    children = [forks.start(one_fit, rank, size, port, str(folder), asked) for rank in range(size)]
    return [forks.ended(child) for child in children]


def warm() -> None:
    """Import the dependencies of the forks and read the techniques. Each fork would take seconds for that.
    accelerate imports DeepSpeed if it is installed."""
    names = (
        "accelerate",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "transformers.models.bert.modeling_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.trainer",
        *(["deepspeed"] if importlib.util.find_spec("deepspeed") else []),
    )
    with contextlib.redirect_stdout(sys.stderr):
        for name in names:
            importlib.import_module(name)
    fill_caches()
