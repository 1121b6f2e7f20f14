"""What a checkpoint of a run holds, and how it becomes a run again.

    config.json, model.safetensors      the working weights, as `from_pretrained` loads them;
                                        with adapters: adapter_config.json, adapter_model.safetensors
    state.json, state.safetensors       everything else that the next step depends on: the optimizer's states
                                        and groups, schedule, gradient scaler, all random generators, and how
                                        far the run is (`packed_state.py`)

A checkpoint is taken in two parts. `snapshot` copies everything to the host, between two steps, and is all
that training waits for; `write` puts the copies into a folder, in a thread of its own, while the next steps
run. Weights are never cast: what was trained is what is kept, and a resumed run goes on bit for bit.

The optimizer's states are taken and put back as they are. torch's own `load_state_dict` casts each to its
parameter's dtype, which would round the moments that Adafactor keeps in fp32 beside bf16 weights, and
bitsandbytes' `state_dict` wraps them for FSDP.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.bars import without_bars
from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.generators import random_state, restore_random_state

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging

STATE, TENSORS, WEIGHTS = "state.json", "state.safetensors", "model.safetensors"
ADAPTER = "adapter_model.safetensors"


@dataclass(kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimizer steps that are done."""

    skipped: int = 0
    """Of them, how many updated nothing: the gradient scaler found an overflow."""

    skipped_in_a_row: int = 0
    """The last ones of these."""

    best_metric: float | None = None
    """The best value of the metric that chooses the best model, so far."""

    best_step: int | None = None
    """The step after which it was seen."""

    evaluations_without_gain: int = 0
    """Since then; early stopping counts them."""

    losses: list[float] = field(default_factory=list)
    """Of the last steps that were made, as many as a jump is seen by (`spikes.py`)."""

    def took(self, updated: bool, *, most_skipped: int) -> None:
        """Counts a step. Raises `SnugfitError` when so many in a row have updated nothing."""
        self.step += 1
        self.skipped += not updated
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= most_skipped:
            raise SnugfitError(
                f"{self.skipped_in_a_row} steps in a row were not made, for their losses or gradients: this"
                " run has diverged; its checkpoints are of before. Take a smaller learning rate."
            )

    def judge(self, value: float, *, higher_is_better: bool, threshold: float) -> bool:
        """Takes in an evaluation after this step; whether it is the best so far, by more than `threshold`."""
        before = self.best_metric
        gain = math.inf if before is None else value - before if higher_is_better else before - value
        better = not math.isnan(value) and gain > threshold
        self.evaluations_without_gain = 0 if better else self.evaluations_without_gain + 1
        if better:
            self.best_metric, self.best_step = value, self.step
        return better


@dataclass(kw_only=True)
class Running:
    """What a run has built and works with."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    """torch's learning-rate scheduler."""
    scaler: torch.amp.GradScaler | None
    device: torch.device
    progress: Progress = field(default_factory=Progress)

    @functools.cached_property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The model's, in its order. A step that walked through the modules for them would keep the host, and
        with it a GPU that waits for the host."""
        return tuple(self.model.parameters())


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run between two steps, on the host; nothing in it changes any more."""

    model: torch.nn.Module
    """Whose weights these are: it knows how its kind is saved."""

    weights: Mapping[str, torch.Tensor]
    """By their names in the model's `state_dict`; a tied weight is one tensor under two names."""

    tree: Any
    """Everything else, without its tensors."""

    tensors: Mapping[str, torch.Tensor]
    """These."""

    step: int

    def write(self, folder: Path) -> None:
        """Writes the checkpoint's files into `folder`."""
        from safetensors.torch import save_file

        _write_weights(self.model, dict(self.weights), folder)
        save_file(dict(self.tensors), folder / TENSORS)
        (folder / STATE).write_text(json.dumps(self.tree, allow_nan=False) + "\n", encoding="utf-8")

    @property
    def bytes(self) -> int:
        """What the files will hold, their heads apart."""
        tensors = {id(tensor): tensor for tensor in (*self.weights.values(), *self.tensors.values())}
        return sum(tensor.nbytes for tensor in tensors.values())


def snapshot(running: Running, staging: Staging) -> Snapshot:
    """The run as it is, copied to the host. Waits for the device; call it between two steps, and not before
    the last snapshot is written."""
    tree, tensors = pack(_state_of(running))
    staging.begin()
    copies = _Copies(staging)
    made = Snapshot(
        model=running.model,
        weights={name: copies.of(value) for name, value in _weights_of(running.model).items()},
        tree=tree,
        tensors={name: copies.of(value) for name, value in tensors.items()},
        step=running.progress.step,
    )
    wait_for(running.device)
    return made


def bytes_of(running: Running) -> list[int]:
    """How large the tensors of a snapshot will be once the optimizer has its states: each weight that trains
    comes with two moments, at most, of its own size."""
    weights = [value.nbytes for value in _weights_of(running.model).values()]
    trained = [each.nbytes for group in running.optimizer.param_groups for each in group["params"]]
    return [*weights, *trained, *trained]


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was asked."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_unused(device: torch.device) -> None:
    """Gives back what no tensor holds any more, so that another recipe begins on an empty device."""
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Copies:
    """Host copies; of what shares its memory (tied weights), one."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.device.type, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._made or not tensor.numel():
            self._made[key] = self._staging.copy(tensor)
        return self._made[key]


def _state_of(running: Running) -> dict[str, Any]:
    return {
        "optimizer": _optimizer_state(running.optimizer),
        "scheduler": running.scheduler.state_dict(),
        "scaler": running.scaler.state_dict() if running.scaler else None,
        "random": random_state(running.device),
        "progress": asdict(running.progress),
    }


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By the parameters' places in the groups, one after the other."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {
        "states": {
            index: dict(optimizer.state[each])
            for index, each in enumerate(parameters)
            if each in optimizer.state
        },
        "groups": [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
    }


def restore(running: Running, folder: Path) -> None:
    """Makes a run that was just built (its weights from `folder` already) the one that was kept there.

    Raises `SnugfitError` when it is another model's or another optimizer's.
    """
    from safetensors.torch import load_file

    tree = json.loads((folder / STATE).read_text(encoding="utf-8"))
    state = unpack(tree, load_file(folder / TENSORS), running.device)
    _restore_optimizer(running.optimizer, state["optimizer"])
    running.scheduler.load_state_dict(state["scheduler"])
    if running.scaler is not None and state["scaler"] is not None:
        running.scaler.load_state_dict(state["scaler"])
    running.progress = Progress(**state["progress"])
    restore_random_state(state["random"], running.device)


def _restore_optimizer(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    counts, before = (
        [_count(group) for group in groups] for groups in (optimizer.param_groups, kept["groups"])
    )
    if counts != before:
        raise SnugfitError(
            f"The checkpoint's optimizer has groups of {before} parameters, this run's has {counts}: it was"
            " written by another job or recipe."
        )
    optimizer.state.clear()
    for index, held in kept["states"].items():
        optimizer.state[parameters[index]] = held
    for group, saved in zip(optimizer.param_groups, kept["groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})


def _count(group: Mapping[str, Any]) -> int:
    parameters = group["params"]
    return parameters if isinstance(parameters, int) else len(parameters)


def _is_adapted(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _weights_of(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """What trains and what a step changes: of an adapted model the adapters alone, its base never changes."""
    if not _is_adapted(model):
        return model.state_dict()
    from peft import get_peft_model_state_dict

    found: Mapping[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def _write_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import PreTrainedModel

    if _is_adapted(model):
        model.peft_config["default"].save_pretrained(str(folder))  # type: ignore[union-attr, index]
        save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
    elif isinstance(model, PreTrainedModel):
        with without_bars():
            model.save_pretrained(folder, state_dict=weights)
    else:
        save_file({name: value.clone() for name, value in weights.items()}, folder / WEIGHTS)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Puts the weights that were kept in `folder` into a model that was built without them: adapters, or a
    module from Python. A transformers model is built from the folder instead (`Model.build`)."""
    from safetensors.torch import load_file

    if _is_adapted(model):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(folder / ADAPTER))
    else:
        model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
