"""A trainer with weights sharded over its processes by accelerate's FSDP2, as configured in the Trainer.

`TrainingArguments(fsdp=True, fsdp_config={"version": 2})` or a file of `accelerate launch` configure it. When
training starts, accelerate shards the model by torch (`fully_shard`): each process has a part of weights,
gradients and optimizer states. Gradients are averaged over the processes as in DDP, and micro-batches are
weighted alike (`ranks.py`). `fsdp` and its `reshard` in the recipe must match the Trainer's configuration.

    checkpoint-N/   shards/            each process's parts (`checkpoint/shards.py`), as of `snugfit train
                                       --recipe fsdp`.
                    everything else    by the first, as of any fitted trainer (`checkpoints.py`).
                    model.safetensors  in the last one of a run, gathered.

A forward pass gathers whole weights, which replace the parts until a backward pass drops them. They are
dropped before any state is saved or restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.features.distributed.checkpoint.shards import (
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
from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.techniques.several_gpus import KNOW_SHARDS
from snugfit.frontends.trainer.users_files import weights_folder
from snugfit.step.applier import after_evaluation
from snugfit.techniques.setup import Setup
from snugfit.training.checkpoint.adapters import is_adapted
from snugfit.training.checkpoint.model_state import beginning_of, load_model_state
from snugfit.training.checkpoint.state import refuse_unpackable, restore
from snugfit.training.checkpoint.weights import load_weights

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging
    from snugfit.training.checkpoint.state import TrainState
    from snugfit.training.ranks import Ranks

VERSION = 2
"""The supported version of FSDP."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Names in `TrainingArguments` of torch's optimizers that update parts like whole weights (`KNOW_SHARDS`)."""


def is_spread(trainer: Any) -> bool:
    """Return True if each process has a part of the weights during training."""
    return bool(trainer.is_fsdp_enabled)


def parallel_of(trainer: Any) -> ParallelWish:
    """Return the Trainer's configuration of its processes in a recipe's terms, by default DDP."""
    if not is_spread(trainer):
        return ParallelWish()
    reshard = "layers" if trainer.accelerator.state.fsdp_plugin.reshard_after_forward else "none"
    return ParallelWish(weights="sharded", reshard=reshard)


def refuse_what_is_not_sharded(trainer: Any) -> None:
    """Raise `UsageError` for unsupported settings of a trainer under FSDP."""
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
    """Raise `UsageError` for a recipe, without its sharding, that sharded weights do not support.

    `optimizer` is None for the recipe's own, or a name in `TrainingArguments`. An empty name is the user's
    own, which is checked after its creation.
    """
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
    """Raise `UsageError` for an optimizer, by its class's import path, without proven updates of sharded
    weights."""
    if path not in KNOW_SHARDS:
        raise _unknown(path.partition(":")[2])


def _unknown(optimizer: str) -> UsageError:
    return UsageError(
        f"Under FSDP2 fit takes torch's AdamW and SGD, and {optimizer} is not known to update parts of "
        "weights. Try 'adamw', 'adamw_fused' or 'sgd' in the recipe, or optim='adamw_torch' or 'sgd'."
    )


def drop_gathered(trainer: Any) -> None:
    """Replace whole weights left by a forward pass with this process's parts."""
    if not is_spread(trainer):
        return
    after_evaluation(Setup().with_fields(parallel=parallel_of(trainer)), trainer.model)


# ---- saving ----------------------------------------------------------------------------------------------


def check_sharded(state: TrainState) -> None:
    """Check the optimizer and the schedule before the first step.

    Raises `UsageError` for an optimizer without proven updates of sharded weights.
    """
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
    """Return this process's parts for a checkpoint; all processes call it.

    At the run's end, unless a signal stopped it, the first process also saves the whole model.
    """
    drop_gathered(trainer)
    ends = trainer.state.global_step >= trainer.state.max_steps
    ends |= trainer.control.should_training_stop and not is_stopped
    is_last = state.ranks.first_answers(lambda: bool(ends))
    taken = shards_of(state, staging, random=random, is_last=is_last)
    taken.files, taken.processing = files, processing
    return taken


# ---- restoring -------------------------------------------------------------------------------------------


def load_kept_weights(model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
    """Load the weights of a checkpoint into an existing model; both may be whole or sharded.

    Raises `SnugfitError` for another model's weights. All processes call it.
    """
    if has_shards(folder):
        load_weight_shards(model, folder, ranks)
        load_model_state(model, folder)
    elif holds_parts(model):
        load_whole_weights(model, weights_folder(folder))
    else:
        load_weights(model, weights_folder(folder))


def restore_kept(state: TrainState, folder: Path) -> None:
    """Restore a run's whole or sharded state; its weights are already loaded."""
    restore(state, folder)
    if is_sharded(state):
        keep_parts(state.optimizer)
    if has_shards(folder):
        load_moment_shards(state, folder)
