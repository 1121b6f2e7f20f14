"""A trainer with weights sharded over its processes by accelerate's FSDP2, as configured in the Trainer.

`TrainingArguments(fsdp=True, fsdp_config={"version": 2})` or a file of `accelerate launch` configure it. When
training starts, accelerate shards the model by torch (`fully_shard`): each process has a part of weights,
gradients and optimizer states. Gradients are averaged over the processes as in DDP, and micro-batches are
weighted alike (`ranks.py`). `fsdp` and its `reshard` in the recipe must match the Trainer's configuration.

    checkpoint-N/   shards/            each process's parts (`checkpoint/shards.py`), as of `snugfit train
                                       --recipe fsdp`.
                    everything else    by the first, as of any fitted trainer (`checkpoints.py`).
                    model.safetensors  in the last one of a run, gathered.

Adapters are written whole, by the first process, as of a run of one process.

A forward pass gathers whole weights, which replace the parts until a backward pass drops them. They are
dropped before any state is saved or restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError
from snugfit.features.distributed.checkpoint.gathered_adapters import gathered_adapters, load_adapters
from snugfit.features.distributed.checkpoint.shards import (
    has_shards,
    holds_parts,
    is_sharded,
    keep_parts,
    load_moment_shards,
    load_weight_shards,
    load_whole_weights,
    shards_of,
)
from snugfit.features.distributed.fields import PARALLEL, SHARDING, ParallelWish
from snugfit.features.distributed.techniques.several_gpus import KNOW_SHARDS
from snugfit.features.loops.trainer.parts import TrainerParts
from snugfit.features.loops.trainer.users_files import UsersFiles, weights_folder
from snugfit.step.applier import after_evaluation
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.adapters import is_adapted
from snugfit.training.checkpoint.model_state import beginning_of, load_model_state
from snugfit.training.checkpoint.state import refuse_unpackable

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.training.checkpoint.manager import Writable
    from snugfit.training.checkpoint.staging import Staging
    from snugfit.training.checkpoint.state import TrainState
    from snugfit.training.ranks import Ranks

VERSION = 2
"""The supported major version of FSDP."""

TO_SHARD = "TrainingArguments(fsdp=True, fsdp_config={'version': 2, 'reshard_after_forward': True})"
"""`TrainingArguments` that configure a Trainer for FSDP2."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimizer names in `TrainingArguments` that update shards as they update whole weights (`KNOW_SHARDS`)."""


class DdpTrainer(TrainerParts):
    """Operations on a Trainer's model and checkpoints under DDP: each process has whole weights. The
    checkpoints that it reads may be sharded.
    """

    @property
    def configured(self) -> ParallelWish:
        """Return the Trainer's DDP configuration as a value of the field `parallel`."""
        return ParallelWish()

    def refuse_sharding(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for techniques for several GPUs that differ from the Trainer's own
        configuration.
        """
        refuse_other_sharding(recipe, self.configured)

    def load_weights(self, model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
        """Load the weights of a checkpoint into the model; either may be whole or sharded."""
        if has_shards(folder):
            load_weight_shards(model, folder, ranks)
            load_model_state(model, folder)
        elif holds_parts(model) and is_adapted(model):
            load_adapters(model, weights_folder(folder))
        elif holds_parts(model):
            load_whole_weights(model, weights_folder(folder))
        else:
            super().load_weights(model, folder, ranks)

    def restore(self, state: TrainState, folder: Path) -> None:
        """Restore a run's state from a whole or a sharded checkpoint."""
        super().restore(state, folder)
        # The restored states may be whole, while each process needs only its shards.
        if is_sharded(state):
            keep_parts(state.optimizer)
        if has_shards(folder):
            load_moment_shards(state, folder)


class ShardedTrainer(DdpTrainer):
    """Operations on a Trainer's model and checkpoints if FSDP2 shards its weights."""

    word = "fsdp"
    is_spread = True

    @property
    def configured(self) -> ParallelWish:
        """Return the Trainer's FSDP configuration as a value of the field `parallel`."""
        reshard = "layers" if self.trainer.accelerator.state.fsdp_plugin.reshard_after_forward else "none"
        return ParallelWish(weights="sharded", reshard=reshard)

    def refuse_settings(self) -> None:
        """Raise `UsageError` for unsupported settings of FSDP."""
        trainer = self.trainer
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
        model = trainer.model
        quantized = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None)
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
                # Only `fit` itself may have sharded the model.
                holds_parts(trainer.model) and getattr(trainer, "snugfit", None) is None
            ),
            "adapters over weights that one process loads (cpu_ram_efficient_loading)": (
                is_adapted(trainer.model) and plugin.cpu_ram_efficient_loading
            ),
            "adapters, and a class that saves them itself": (
                is_adapted(trainer.model) and UsersFiles(trainer, Path()).any
            ),
            "quantized weights": bool(quantized),
        }
        if used := [name for name, is_used in unsaid.items() if is_used]:
            raise UsageError(
                f"The trainer uses FSDP2 with {'; '.join(used)}. fit does not support such a run. "
                f"Remove it, or train "
                "without fit."
            )
        # Checksums of frozen weights are of whole ones, so they are computed before the weights are sharded.
        beginning_of(model)

    def refuse_recipe(self, setup: Setup, *, optimizer: str | None) -> None:
        """Raise `UsageError` for fp16, whose loss is scaled, and for optimizers that are not tested with
        sharded weights.
        """
        if setup.scale_gradients:
            raise UsageError(
                "fp16 cannot be combined with FSDP2 in fit: weights are gathered in bf16 or as they "
                "are. Try 'bf16'."
            )
        if optimizer is None:
            refuse_optimizer_of_parts(setup.optimizer_path)
        elif optimizer and optimizer not in OPTIMIZERS:
            raise _unknown(f"optim={optimizer!r}")

    def spread_model(self) -> None:
        """Shard the model over the processes by accelerate, unless it is sharded already."""
        from torch.distributed.fsdp import FSDPModule

        trainer = self.trainer
        if isinstance(trainer.model, FSDPModule):
            return
        # accelerate prepares a model for FSDP2 only together with its optimizer.
        trainer.create_optimizer()
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        # The Trainer refers to its model in three places.
        trainer.model_wrapped = trainer.callback_handler.model = trainer.model

    def drop_gathered(self) -> None:
        """Replace gathered whole weights, left by a forward pass, with this process's shards."""
        after_evaluation(Setup().with_fields(parallel=self.configured), self.trainer.model)

    def check(self, state: TrainState) -> None:
        """Raise `UsageError` if the Trainer's optimizer or schedule is not tested with sharded weights."""
        kind = type(state.optimizer)
        home = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
        refuse_optimizer_of_parts(f"{home}:{kind.__name__}")
        beginning_of(state.model)
        refuse_unpackable("scheduler", state.scheduler, state.scheduler.state_dict(), state.optimizer)

    def snapshot(
        self,
        state: TrainState,
        staging: Staging,
        *,
        random: Sequence[Any],
        files: Mapping[str, str],
        processing: Any,
        is_stopped: bool,
    ) -> Writable | None:
        """Return a copy of this process's shards of the run's state. At the run's end, unless a signal
        stopped it, the first process also saves the whole model. Adapters are copied whole, by the first
        process alone.
        """
        trainer = self.trainer
        # A forward pass may have left whole weights in place of the shards.
        self.drop_gathered()
        if is_adapted(trainer.model):
            copied = gathered_adapters(state, staging, random=random)
            return copied and replace(copied, files=files, processing=processing)
        ends = trainer.state.global_step >= trainer.state.max_steps
        ends |= trainer.control.should_training_stop and not is_stopped
        # All processes get the same decision, because gathering the whole model needs each of them.
        is_last = state.ranks.first_answers(lambda: bool(ends))
        taken = shards_of(state, staging, random=random, is_last=is_last)
        taken.files, taken.processing = files, processing
        return taken


def refuse_optimizer_of_parts(path: str) -> None:
    """Raise `UsageError` for an optimizer class that is not tested with sharded weights (`DTensor`), given by
    its import path.
    """
    if path not in KNOW_SHARDS:
        raise _unknown(path.partition(":")[2])


def _unknown(optimizer: str) -> UsageError:
    return UsageError(
        f"Under FSDP2 fit takes torch's AdamW and SGD, and {optimizer} is not known to update parts of "
        "weights. Try 'adamw', 'adamw_fused' or 'sgd' in the recipe, or optim='adamw_torch' or 'sgd'."
    )


def refuse_other_sharding(recipe: Recipe, configured: ParallelWish) -> None:
    """Raise `RecipeError` for a recipe that names another sharding than the Trainer's configuration."""
    setup = recipe.setup()
    wish = PARALLEL.of(setup)
    # The dtype does not belong to the sharding that the Trainer configures.
    if SHARDING.of(setup) is not None or (wish is not None and replace(wish, dtype=None) != configured):
        raise RecipeError(_disagreement(recipe[Slot.SHARDING], configured, wish))


def _disagreement(sharding: object, configured: ParallelWish, wish: ParallelWish | None) -> str:
    """Return an error text for a recipe's sharding technique that contradicts the Trainer's configuration,
    with a remedy.
    """
    if configured.weights != "sharded":
        shards = wish is not None and wish.weights == "sharded"
        more = f" For fsdp configure the Trainer too: {TO_SHARD}." if shards else ""
        return (
            f"{sharding} cannot be given to this trainer: it trains by the Trainer's own DDP, where each "
            f"process has all of the model. Write 'ddp' in its place, or leave it out.{more} snugfit train "
            "takes several techniques of that slot."
        )
    reshards = configured.reshard == "layers"
    own = "fsdp" if reshards else f"fsdp(reshard={configured.reshard})"
    return (
        f"The recipe has '{sharding}', but the Trainer's FSDP2 has reshard_after_forward={reshards}, which "
        f"is '{own}'. Write '{own}' in its place, leave it out, or change the Trainer's fsdp and fsdp_config."
    )
