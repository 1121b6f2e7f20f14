"""A Trainer in distributed training: the supported settings, and the communication between the processes.

torchrun, or `accelerate launch`, starts the user's script in each process. The Trainer itself wraps its model
in DDP, or, if configured, shards it by FSDP2. Each process trains on its part of the batch:
`per_device_train_batch_size` times `gradient_accumulation_steps`. The recipe describes the training in one
process. It may also name the sharding (`ddp`, `fsdp`).

    before the forward pass    counts of items in each process's micro-batches, on the device. A micro-batch
                               is weighted by its share of all of them, times the processes. DDP's and
                               FSDP2's average of gradients is then the gradient of the mean over the global
                               batch. transformers multiplies a loss that is a mean, such as a classifier's,
                               by the processes.
    before the update          losses and tokens, on the host. All stop at a NaN or infinite one.
    after a step               signals, and requests for a checkpoint, on the host. All react to each one.
    in a checkpoint            random generators and positions in the data of all. The first writes them.

Two actions are not supported, because the other processes would wait for a collective. These are repeating a
step with less memory, and abandoning an evaluation after a signal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError
from snugfit.features.loops.trainer.parts import trainer_parts
from snugfit.features.loops.trainer.trainer_hooks import overrides
from snugfit.features.loops.trainer.users_files import SAVES_MODEL
from snugfit.step.clipping import tensor_parts
from snugfit.techniques import roster
from snugfit.techniques.several_gpus import untried_techniques
from snugfit.techniques.technique import Slot
from snugfit.training.ranks import ALONE, Ranks, process_group, world
from snugfit.training.run.items import counted_items

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe

LAUNCH_ADVICE = "In several processes fit trains by the Trainer's own DDP or FSDP2"


def processes_of(trainer: Any) -> int:
    """Return the number of processes in which this trainer trains."""
    return int(trainer.args.world_size)


def refuse_in_several_processes(trainer: Any) -> None:
    """Raise `UsageError` for settings that `fit` does not support in distributed training."""
    from accelerate.utils import DistributedType
    from torch.utils.data import IterableDataset

    if processes_of(trainer) == 1:
        if (process := world()) is not None and process.size > 1:
            raise UsageError(
                f"{process.size} processes were started, but each one's Trainer trains alone. On the CPU "
                "give TrainingArguments(use_cpu=True); else start the script without torchrun."
            )
        return
    accelerator, loading = trainer.accelerator, trainer.accelerator.dataloader_config
    kinds = [DistributedType.MULTI_GPU, DistributedType.MULTI_CPU]
    if is_spread := trainer_parts(trainer).is_spread:
        kinds.append(DistributedType.FSDP)
    has_parts = any(map(tensor_parts().is_part, trainer.model.parameters()))
    its_own = trainer.compute_loss_func is not None or overrides(trainer, "compute_loss", "training_step")
    unset = {
        f"accelerate's {accelerator.distributed_type.value}": accelerator.distributed_type not in kinds,
        "no variables of torch's launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)": world() is None,
        "parallelism_config": getattr(trainer.args, "parallelism_config", None) is not None,
        "a dataset without a length": isinstance(trainer.train_dataset, IterableDataset),
        "split_batches": loading.split_batches,
        "dispatch_batches": loading.dispatch_batches,
        "even_batches=False": not loading.even_batches,
        "a loss of its own (compute_loss, compute_loss_func, training_step)": its_own,
        "weights that are in parts already": not is_spread and has_parts,
        "saving of its own": overrides(trainer, *SAVES_MODEL, "_save_checkpoint"),
    }
    if used := [name for name, is_used in unset.items() if is_used]:
        raise UsageError(
            f"The trainer is one of {processes_of(trainer)} processes and has {', '.join(used)}. "
            f"{LAUNCH_ADVICE} and does not support this. Remove it, train in one process, "
            "or train without fit."
        )


def recipe_in_each(recipe: Recipe, processes: int, refuse_sharding: Callable[[Recipe], None]) -> Recipe:
    """Return the recipe that each process of a distributed Trainer applies: the user's recipe without
    sharding.

    Raises `RecipeError` for a combination that the processes do not support. `refuse_sharding` raises it for
    a recipe that contradicts the Trainer's own configuration.
    """
    if processes == 1:
        if any(technique.needs_several_gpus for technique in recipe.techniques):
            raise RecipeError(
                f"{recipe[Slot.SHARDING]} is for several processes, and this is the only one. Start the "
                "script with torchrun --nproc-per-node N, or leave it out."
            )
        return recipe
    refuse_sharding(recipe)
    for technique in untried_techniques(recipe):
        raise RecipeError(
            f"{technique} cannot be given to a trainer that is one of {processes} processes: it is not "
            "tested there. Leave it out, or train in one process."
        )
    return recipe.with_(roster.plain(Slot.SHARDING))


@contextlib.contextmanager
def ranks_of(trainer: Any) -> Iterator[Ranks]:
    """Context that provides the process group (`Ranks`) in which the trainer trains its model."""
    if processes_of(trainer) == 1:
        yield ALONE
        return
    with process_group(trainer.args.device) as ranks:
        yield ranks


def shares_of_all(batches: Sequence[Any], device: torch.device, ranks: Ranks, **counting: Any) -> Any:
    """Return the loss weights (n,) of this process's micro-batches: their fraction of all labels, times the
    number of processes.

    They stay on the device, without synchronization.
    """
    import torch
    import torch.distributed as dist

    counted = [
        torch.as_tensor(count, device=device, dtype=torch.float64)
        for count in counted_items(batches, **counting)
    ]
    own = torch.stack(counted)
    total = own.sum()
    dist.all_reduce(total)
    return own * ranks.size / total


def with_some_item(batch: Mapping[str, Any], share: torch.Tensor) -> Mapping[str, Any]:
    """Return the micro-batch with at least one counted label.

    A micro-batch without counted labels has share 0, and gets a label. The mean over nothing is NaN, and 0
    times NaN is NaN. A single process skips such a micro-batch. In distributed training all processes must
    run it.
    """
    import torch

    changed: dict[str, Any] = {}
    for name in ("labels", "shift_labels"):
        labels = batch.get(name)
        if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
            continue
        changed[name] = labels.clone()
        # Shifting drops the first label and never the last one. `where` does not make the host wait.
        last = changed[name][..., -1]
        changed[name][..., -1] = torch.where(share > 0, last, torch.zeros_like(last))
    return {**batch, **changed} if changed else batch
