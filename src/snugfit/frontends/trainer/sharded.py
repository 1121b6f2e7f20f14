"""A trainer whose weights are spread over its processes: accelerate's FSDP2, as the Trainer is told of it.

`TrainingArguments(fsdp=True, fsdp_config={"version": 2})` say so, or a file of `accelerate launch`. When
training begins accelerate has torch spread the model (`fully_shard`): each process holds a part of weights,
gradients and optimizer states. Gradients are averaged over the processes as by DDP, and micro-batches are
weighed alike (`ranks.py`). What the recipe may say of it, `fsdp` and its `reshard`, must be what the Trainer
was told.

    checkpoint-N/   shards/            each process's parts (`training/checkpoint/shards.py`), as of
                                       `snugfit train --recipe fsdp`
                    everything else    by the first, as of any fitted trainer (`checkpoints.py`)
                    model.safetensors  in the last one of a run, gathered

Weights that a forward pass has gathered, and no backward pass has dropped again, stand in the place of the
parts until they are dropped; so they are, before anything is kept or put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.frontends.trainer.users_files import weights_folder
from snugfit.step.applier import after_evaluation
from snugfit.techniques.setup import ParallelWish, Setup
from snugfit.techniques.several_gpus import KNOW_SHARDS
from snugfit.training.checkpoint.adapters import is_adapted
from snugfit.training.checkpoint.model_state import beginning_of, load_model_state
from snugfit.training.checkpoint.shards import (
    ShardedSnapshot,
    has_shards,
    holds_parts,
    is_sharded,
    keep_parts,
    load_moment_shards,
    load_weight_shards,
    load_whole_weights,
    shards_of,
)
from snugfit.training.checkpoint.state import refuse_unpackable, restore
from snugfit.training.checkpoint.weights import load_weights

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging
    from snugfit.training.checkpoint.state import TrainState
    from snugfit.training.ranks import Ranks

VERSION = 2
"""Of FSDP, the one that is taken."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Of those that `TrainingArguments` have a name for, torch's that update parts as they update whole weights
(`KNOW_SHARDS`)."""


def is_spread(trainer: Any) -> bool:
    """Whether its processes hold a part of the weights each, once they train."""
    return bool(trainer.is_fsdp_enabled)


def parallel_of(trainer: Any) -> ParallelWish:
    """What the Trainer was told of its processes, as a recipe would wish for it. By itself it takes DDP."""
    if not is_spread(trainer):
        return ParallelWish()
    reshard = "layers" if trainer.accelerator.state.fsdp_plugin.reshard_after_forward else "none"
    return ParallelWish(weights="sharded", reshard=reshard)


def refuse_what_is_not_sharded(trainer: Any) -> None:
    """Raises `UsageError` for what a trainer under FSDP cannot be fitted with."""
    if not is_spread(trainer):
        return
    plugin, args = trainer.accelerator.state.fsdp_plugin, trainer.args
    if plugin.fsdp_version != VERSION:
        raise UsageError(
            f"The trainer uses FSDP{plugin.fsdp_version}; fit takes FSDP2. Write "
            "TrainingArguments(fsdp=True, fsdp_config={'version': 2}), or fsdp_version: 2 in the file of "
            "accelerate launch."
        )
    if args.world_size == 1:
        raise UsageError(
            "The trainer uses fsdp, but this is the only process. Start the script with torchrun "
            "--nproc-per-node N, or leave fsdp out."
        )
    quantized = getattr(trainer.model, "is_quantized", False) or getattr(trainer.model, "hf_quantizer", None)
    unsaid = {
        "weights on the host (cpu_offload): snugfit train does it (fsdp(offload=cpu))": (
            getattr(plugin.cpu_offload, "pin_memory", None) is not None or plugin.cpu_offload is True
        ),
        "activation_checkpointing of fsdp_config: write every_layer in the recipe": (
            plugin.activation_checkpointing
        ),
        "ignored_modules, whose gradients nobody exchanges": plugin.ignored_modules is not None,
        "a mesh of several axes (parallelism_config)": (
            getattr(trainer.accelerator, "torch_device_mesh", None) is not None
        ),
        "a model that is spread already: call fit before train": (
            holds_parts(trainer.model) and getattr(trainer, "snugfit", None) is None
        ),
        "adapters": is_adapted(trainer.model),
        "quantized weights": bool(quantized),
    }
    if used := [name for name, is_used in unsaid.items() if is_used]:
        raise UsageError(
            f"The trainer uses FSDP2 with {'; '.join(used)}. fit keeps no such run. Remove it, or train "
            "without fit."
        )


def refuse_recipe(trainer: Any, setup: Setup, *, optimizer: str | None) -> None:
    """Raises `UsageError` for a recipe, without its sharding, that weights in parts do not go with. Where the
    recipe does not say which `optimizer` it is, it is that of `TrainingArguments` by its name there, or, with
    an empty one, the user's own, which is looked at when it is made."""
    if not is_spread(trainer):
        return
    if setup.scale_gradients:
        raise UsageError(
            "fp16 does not go with FSDP2 in fit: weights are gathered in bf16 or as they are. Try 'bf16'."
        )
    if optimizer is None:
        refuse_optimizer_of_parts(setup.optimizer.factory.path)
    elif optimizer and optimizer not in OPTIMIZERS:
        raise _unknown(f"optim={optimizer!r}")


def refuse_optimizer_of_parts(path: str) -> None:
    """Raises `UsageError` for an optimizer, by the import path of its class, that is not known to update
    parts of weights."""
    if path not in KNOW_SHARDS:
        raise _unknown(path.partition(":")[2])


def _unknown(optimizer: str) -> UsageError:
    return UsageError(
        f"Under FSDP2 fit takes torch's AdamW and SGD, and {optimizer} is not known to update parts of "
        "weights. Try 'adamw', 'adamw_fused' or 'sgd' in the recipe, or optim='adamw_torch' or 'sgd'."
    )


def drop_gathered(trainer: Any) -> None:
    """Whole weights that a forward pass has left give their place to this process's parts."""
    if not is_spread(trainer):
        return
    after_evaluation(Setup(parallel=parallel_of(trainer)), trainer.model)


# ---- kept ------------------------------------------------------------------------------------------------


def check_sharded(state: TrainState) -> None:
    """Before the first step. Raises `UsageError` for an optimizer that is not known to update parts."""
    kind = type(state.optimizer)
    home = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    refuse_optimizer_of_parts(f"{home}:{kind.__name__}")
    beginning_of(state.model)
    refuse_unpackable("scheduler", state.scheduler, state.scheduler.state_dict(), state.optimizer)


def snapshot_of_parts(
    trainer: Any,
    state: TrainState,
    staging: Staging,
    *,
    random: Sequence[Any],
    files: Mapping[str, str],
    processing: Any,
    is_stopped: bool,
) -> ShardedSnapshot:
    """What this process keeps of a boundary; at the run's end, which is not where a signal has stopped it,
    the first keeps the whole model too. All processes call it."""
    drop_gathered(trainer)
    ends = trainer.state.global_step >= trainer.state.max_steps
    ends |= trainer.control.should_training_stop and not is_stopped
    is_last = state.ranks.first_answers(lambda: bool(ends))
    taken = shards_of(state, staging, random=random, is_last=is_last)
    taken.files, taken.processing = files, processing
    return taken


# ---- put back --------------------------------------------------------------------------------------------


def load_kept_weights(model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
    """Puts the weights of a checkpoint, whole or in parts, into a model that stands, whole or in parts.
    Raises `SnugfitError` when they are another model's. All processes call it."""
    if has_shards(folder):
        load_weight_shards(model, folder, ranks)
        load_model_state(model, folder)
    elif holds_parts(model):
        load_whole_weights(model, weights_folder(folder))
    else:
        load_weights(model, weights_folder(folder))


def restore_kept(state: TrainState, folder: Path) -> None:
    """Makes a run, whose weights are put back already, the one that was kept, whole or in parts."""
    restore(state, folder)
    if is_sharded(state):
        keep_parts(state.optimizer)
    if has_shards(folder):
        load_moment_shards(state, folder)
