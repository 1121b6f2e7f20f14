"""The content of a run's checkpoint, and its restoration to a run.

- `config.json`, `model.safetensors`: the working weights in the libraries' form, or the adapters'.
- `model_state.json`, `.safetensors`: the model's state that those files omit (`weights.py`).
- `state.json`, `state.safetensors`: all other state of the next step. This includes the optimizer's states
  and groups, schedule, gradient scaler, all random generators, and the progress of the run
  (`packed_state.py`).

A checkpoint is saved in two parts. `snapshot` copies everything to the host between two steps, while the
training waits. `write` writes the copies into a folder, in its own thread, during the next steps. Weights are
never cast, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.model_state import beginning_of, frozen_parameters, set_frozen
from snugfit.training.checkpoint.optimizer_state import (
    optimizer_state,
    parameters_of,
    restore_optimizer,
)
from snugfit.training.checkpoint.packed_state import PAIRS, pack, unpack
from snugfit.training.checkpoint.parts import state_parts, updated_elsewhere
from snugfit.training.checkpoint.weights import ModelWeights, held_parts, weights_of
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.rng import all_rng_states, restore_all_rng_states

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging

STATE, TENSORS = "state.json", "state.safetensors"

RANDOM_OF_OTHERS = "random_of_others"
"""Key of the random generators' states of all ranks after the first."""

_STATE_KEYS = ("optimizer", "scheduler", "scaler", "random", "progress", "frozen")
"""Keys that the saved state of every checkpoint has."""


@dataclass(kw_only=True)
class RunProgress:
    """The counts and best metric of a run so far, written unchanged into `state.json`."""

    step: int = 0
    """Number of finished optimizer steps."""

    skipped: int = 0
    """Number of finished steps that changed no weights: gradient scaler overflows and rejected steps."""

    skipped_in_a_row: int = 0
    """Number of skipped steps at the end of the run so far, in a row."""

    best_metric: float | None = None
    """Best value so far of the metric that selects the best model; None before an evaluation."""

    best_step: int | None = None
    """Number of the step with the best value; None before an evaluation."""

    evaluations_without_gain: int = 0
    """Number of evaluations since the best value, which early stopping counts."""

    unevaluated: bool = False
    """True if a signal ended the evaluation after this step. A resumed run repeats the evaluation first."""

    evaluated: dict[str, Any] | None = None
    """Metrics of the last evaluation, by name; None before one."""

    losses: list[float] = field(default_factory=list)
    """Losses of the last steps, as many as the detection of loss spikes needs (`spikes.py`)."""

    def count(self, updated: bool, *, most_skipped: int) -> None:
        """Count a step, as skipped unless it `updated` the weights. Raises `SnugfitError` after
        `most_skipped` steps in a row without an update.
        """
        self.step += 1
        self.skipped += not updated
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= most_skipped:
            raise SnugfitError(
                f"{self.skipped_in_a_row} steps in a row were skipped because of their losses or "
                "gradients: this run has diverged. Its checkpoints are from before. Use a smaller learning "
                "rate."
            )

    def record_metric(self, value: float, *, higher_is_better: bool, threshold: float) -> bool:
        """Store an evaluation's metric; return True if it is the best so far by more than `threshold`."""
        before = self.best_metric
        # The first value counts as an improvement, unless it is NaN.
        gain = math.inf if before is None else value - before if higher_is_better else before - value
        better = not math.isnan(value) and gain > threshold
        self.evaluations_without_gain = 0 if better else self.evaluations_without_gain + 1
        if better:
            self.best_metric, self.best_step = value, self.step
        return better


@dataclass(kw_only=True)
class TrainState:
    """The model, optimizer and other objects that the steps of a run use and change."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    runs: torch.nn.Module | None = None
    """Wrapper of the model that a step calls, if several processes train the model together. None calls the
    model."""
    ranks: Ranks = ALONE
    """Rank of this process, and the exchanges with the other ranks."""
    scheduler: Any
    """Learning rate schedule: torch's, or any object with `step` and `state_dict`."""
    scaler: torch.amp.GradScaler | None
    device: torch.device
    progress: RunProgress = field(default_factory=RunProgress)

    @functools.cached_property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The model's parameters, in order.

        They are cached: a walk through the modules in each step would occupy the host, and let the GPU wait.
        """
        return tuple(self.model.parameters())


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of a run's state on the host, from between two steps."""

    weights: ModelWeights
    """Copies of the model's weights and all its other state."""

    tree: Any
    """All state besides the model's, as JSON values without its tensors."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors of that state, by the names with which `tree` refers to them."""

    step: int
    """Number of finished optimizer steps."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of text files that the front-end adds to the checkpoint, by file name."""

    processing: Any = None
    """Tokenizer or processor that the checkpoint includes; None without one."""

    weights_folder: str = ""
    """Subfolder of the checkpoint for the model's weights; empty for the folder itself."""

    def write(self, folder: Path) -> None:
        """Write the checkpoint's files into `folder`."""
        from safetensors.torch import save_file

        (folder / self.weights_folder).mkdir(exist_ok=True)
        self.weights.write(folder / self.weights_folder)
        save_file(dict(self.tensors), folder / TENSORS)
        for name, text in self._texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if self.processing is not None:
            self.processing.save_pretrained(folder)

    @functools.cached_property
    def _texts(self) -> Mapping[str, str]:
        """Text of all files except the model's and the tokenizer's own, by name."""
        return {STATE: json.dumps(self.tree, allow_nan=False) + "\n", **self.files}

    @property
    def bytes(self) -> int:
        """The size of the snapshot's tensors and text in bytes, without the small headers, config and
        tokenizer.
        """
        tensors = {id(tensor): tensor for tensor in (*self.weights.tensors(), *self.tensors.values())}
        text_bytes = sum(len(text.encode()) for text in self._texts.values())
        return text_bytes + self.weights.widened_bytes + sum(tensor.nbytes for tensor in tensors.values())


def snapshot(
    state: TrainState,
    staging: Staging,
    *,
    files: Mapping[str, str] | None = None,
    processing: Any = None,
    random: Sequence[Any] = (),
) -> Snapshot:
    """Copy the run's state to the host, as a `Snapshot`. Waits for the device.

    It must be called between two steps, after the previous snapshot is written. `random` has the generators
    of all processes, if there are several.
    """
    tree, tensors = pack(state_of(state, random), parameters_of(state.optimizer))
    staging.begin()
    copied = Snapshot(
        weights=weights_of(state.model, state.optimizer).with_copies(staging.copy),
        tree=tree,
        tensors={name: staging.copy(value) for name, value in tensors.items()},
        step=state.progress.step,
        files=files or {},
        processing=processing,
    )
    # Copies to page-locked memory are asynchronous, so they must end before the next step changes their
    # sources.
    if state.device.type == "cuda":
        import torch

        torch.cuda.synchronize(state.device)
    return copied


def check_packable(state: TrainState) -> None:
    """Raise `SnugfitError` for a training state that no checkpoint can contain. Also record the model's
    initial state. Runs call it before the first step and after the first update, to fail early.
    """
    beginning_of(state.model)
    refuse_unpackable("optimizer", state.optimizer, optimizer_state(state.optimizer), state.optimizer)
    refuse_unpackable("scheduler", state.scheduler, state.scheduler.state_dict(), state.optimizer)


def refuse_unpackable(part: str, owner: Any, value: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise `SnugfitError` if `value`, a part of the training state, has a type that no checkpoint can
    contain.
    """
    try:
        pack(value, parameters_of(optimizer))
    except SnugfitError as fault:
        raise SnugfitError(
            f"No checkpoint could be saved with the {part} {type(owner).__name__}: {fault} Use another, or "
            "train without snugfit."
        ) from None


def tensor_bytes(state: TrainState) -> list[int]:
    """Return the size in bytes of each tensor of a snapshot, with the optimizer's future states.

    Each trainable weight counts two moments of its size, or of twice its size if the optimizer stores its low
    half. Weights that another process updates are left out. Raises `SnugfitError` for a model that cannot be
    saved.
    """
    if (sizes := state_parts().tensor_bytes(state)) is not None:
        return sizes
    tensors = map(_local, weights_of(state.model, state.optimizer).tensors())
    elsewhere = {weight.data_ptr() for weight in updated_elsewhere(state.optimizer)}
    by_pointer = {value.data_ptr(): value for value in tensors}
    weights = [value.nbytes for address, value in by_pointer.items() if address not in elsewhere]
    optimized = parameters_of(state_parts().local_optimizer(state.optimizer))
    parts = held_parts(state.optimizer)
    trained = [_local(weight).nbytes * (2 if weight in parts else 1) for weight in optimized]
    return [*weights, *trained, *trained]


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's local shard of a tensor, or an ordinary tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def release_unused_memory(device: torch.device) -> None:
    """Free the memory of unused tensors, so that another recipe begins on an empty device."""
    import gc

    import torch

    # Models and optimizers contain reference cycles, which only the garbage collector frees.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def state_of(state: TrainState, random: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the run's state without the model: optimizer, schedule, scaler, counts and generators. `random`
    has the generators of all processes, by rank.
    """
    return {
        "optimizer": optimizer_state(state.optimizer),
        "optimized": _optimized_names(state),
        "frozen": frozen_parameters(state.model),
        "scheduler": state.scheduler.state_dict(),
        "scaler": state.scaler.state_dict() if state.scaler else None,
        "random": random[0] if random else all_rng_states(state.device),
        **({RANDOM_OF_OTHERS: list(random[1:])} if random[1:] else {}),
        "progress": asdict(state.progress),
    }


def _optimized_names(state: TrainState) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its states' indices."""
    names = {id(weight): name for name, weight in state.model.named_parameters()}
    return [names.get(id(weight), "") for weight in parameters_of(state.optimizer)]


@contextlib.contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """Context that turns errors of reading a checkpoint into a `SnugfitError`: another program wrote its
    content.

    The checksums are checked before, so such content is not damaged.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (
        LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError,
        SafetensorError,
    ) as fault:  # fmt: skip
        raise SnugfitError(
            f"{folder} has correct checksums, but its files are not as snugfit writes them "
            f"({type(fault).__name__}: {fault}). Use an earlier checkpoint, or start a new run."
        ) from None


def restore(state: TrainState, folder: Path) -> int:
    """Restore the state of a new run, whose weights were already loaded from `folder`.

    Returns the number of processes with saved random generators; generators of further processes keep their
    state. Raises `SnugfitError` if the checkpoint is another model's or another optimizer's.
    """
    import torch

    with as_written(folder):
        tree, tensors = _read(folder)
        device = torch.device("cpu") if state_parts().loads_on_host(state.optimizer) else state.device
        saved = unpack(tree, tensors, device, parameters_of(state.optimizer))
        names = _optimized_names(state)
        optimized = saved["optimized"]
        random = [saved["random"], *saved.get(RANDOM_OF_OTHERS, ())]
        saved = {name: saved[name] for name in _STATE_KEYS}
        optimized, saved["optimizer"] = state_parts().own_states(
            state.model, saved["optimizer"], optimized, names
        )
    for before, now in zip(optimized, names):
        if before != now:
            raise SnugfitError(
                f"{folder} has an optimizer of other parameters, or in another order: {before} was in the "
                f"place of {now}. Make the model, and then the optimizer, as at the start of that run."
            )
    restore_optimizer(state.optimizer, saved["optimizer"])
    set_frozen(state.model, saved["frozen"])
    try:
        state.scheduler.load_state_dict(saved["scheduler"])
    except (KeyError, TypeError, IndexError, AttributeError) as fault:
        raise SnugfitError(
            f"{folder} has another schedule than this run's {type(state.scheduler).__name__} "
            f"({type(fault).__name__}: {fault}). Use the schedule that it was written with."
        ) from None
    if state.scaler is not None and saved["scaler"] is not None:
        state.scaler.load_state_dict(saved["scaler"])
    state.progress = RunProgress(**saved["progress"])
    # A process that did not exist in the earlier run draws random numbers from its own seed.
    if state.ranks.rank < len(random):
        restore_all_rng_states(random[state.ranks.rank], state.device)
    return len(random)


def restore_frozen(model: torch.nn.Module, folder: Path) -> None:
    """Set `requires_grad` of each parameter as in the checkpoint, and load nothing else."""
    with as_written(folder):
        frozen = dict(_read(folder)[0][PAIRS])["frozen"]
    set_frozen(model, frozen)


def restore_rng(folder: Path, device: torch.device, rank: int = 0) -> None:
    """Restore only the random generators of the process `rank`. Raises `SnugfitError` if it had none."""
    tree, tensors = _read(folder)
    parts = dict(tree[PAIRS])
    with as_written(folder):
        if rank:
            states = unpack(parts[RANDOM_OF_OTHERS], tensors, device)[rank - 1]
        else:
            states = unpack(parts["random"], tensors, device)
    restore_all_rng_states(states, device)


def _read(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Read the saved state in `folder`: return its JSON tree and its tensors, the arguments of `unpack`."""
    from safetensors.torch import load_file

    return json.loads((folder / STATE).read_text(encoding="utf-8")), load_file(folder / TENSORS)
