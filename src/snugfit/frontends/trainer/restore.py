"""A fitted trainer as a run of ours, and back from a checkpoint.

Weights are put into the model that stands, for it is the user's and others hold it. The Trainer itself loads
what it finds and passes by what is missing; here anything missing is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.packed_state import unpack
from snugfit.training.checkpoint.state import STATE, TENSORS, Progress, Running, load_weights, restore
from snugfit.training.generators import restore_random_state


def running_of(trainer: Any) -> Running:
    """The trainer as a run of ours."""
    optimizer = trainer.optimizer
    return Running(
        model=trainer.model,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        scheduler=trainer.lr_scheduler,
        scaler=trainer.accelerator.scaler,
        device=trainer.args.device,
        progress=Progress(step=trainer.state.global_step),
    )


def restore_trainer(trainer: Any, folder: Path) -> None:
    """Optimizer, schedule and scaler as they were kept."""
    restore(running_of(trainer), folder)


def restore_weights(model: Any, folder: Path) -> None:
    """The weights that were kept, into a model that stands. Raises `SnugfitError` when they are another's."""
    from safetensors.torch import load_file
    from transformers import PreTrainedModel

    try:
        if not isinstance(model, PreTrainedModel):
            load_weights(model, folder)
            return
        single = folder / "model.safetensors"
        found = load_file(single) if single.is_file() else {}
        own = model.state_dict()
        tied = {name for name in own if name not in found}
        there = {own[name].data_ptr() for name in found if name in own}
        if set(found) <= set(own) and all(own[name].data_ptr() in there for name in tied):
            model.load_state_dict(found, strict=False)
            return
        # Some architectures are kept under other names than they compute with.
        again = type(model).from_pretrained(
            folder, config=model.config, dtype=model.dtype, local_files_only=True
        )
        model.load_state_dict(again.state_dict(), strict=True)
    except (RuntimeError, KeyError, ValueError, OSError) as fault:
        raise SnugfitError(f"{folder} holds no weights of this model: {fault}") from None


def restore_generators(folder: Path, device: Any) -> None:
    """The random generators as they were when the checkpoint was taken."""
    from safetensors.torch import load_file

    tree = json.loads((folder / STATE).read_text(encoding="utf-8"))
    restore_random_state(unpack(tree, load_file(folder / TENSORS), device)["random"], device)
