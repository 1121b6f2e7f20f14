"""Build model and optimizer from a Setup, in the Setup's order: build, adapt, checkpoint, optimizer.

Every loop builds through these functions, so a technique changes the model in the same way in each loop. The
handlers of the fields are in `wishes/`, the order and its reasons in `techniques/setup.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError, UsageError
from snugfit.job.build import OnLoaded, instantiate
from snugfit.step.applier import adapt_model, built_on, model_arguments, optimizer_of_part, wrap_model
from snugfit.step.wishes.handler import STAYS
from snugfit.step.wishes.optimizer import make_optimizer
from snugfit.techniques import roster
from snugfit.techniques.registry import tensors_beside
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


def build_model(
    job: Job,
    setup: Setup,
    device: torch.device,
    *,
    on_host: bool = False,
    stays: bool = False,
    weights: Path | None = None,
    on_loaded: OnLoaded = lambda loaded: None,
) -> torch.nn.Module:
    """Return the model, built, adapted and wrapped for the Setup, on `device`. Its weights are random or
    those of the folder `weights`; `on_loaded` receives the names that the folder is missing.

    If a model is built on the host and then moved, its device tensors are allocated in the order of its
    modules. A simulation has no host: it builds while its recorder is off, and then moves. A feature's own
    kind of weights is created on the device.

    Three kinds of models are built on the host and not moved here. If the host keeps the weights, the model
    stays there until it is distributed to its processes. If it `stays`, the code that shards it also moves
    it. A model for pipeline stages is split on the host.
    """
    # Such weights are created on the device, and not copied to it.
    on_host = on_host and "construct" not in model_arguments(setup)
    places = built_on(setup, job)
    stays = stays or STAYS in places
    if on_host or stays or job.build_on == "host" or places:
        with _host(device):
            model = _instantiate(job, setup, weights, on_loaded)
        model = model if stays else _move(model, device)
    else:
        with device:
            model = _instantiate(job, setup, weights, on_loaded)
        if job.model.module is None:
            # Code of some models creates tensors on the CPU regardless of the device (XLNet's
            # `torch.FloatTensor`, wav2vec 2.0's `masked_spec_embed`).
            tensors = [*model.parameters(), *model.buffers()]
            model = _move(model, device, [one for one in tensors if one.device.type == device.type])
        else:
            _refuse_left_on_the_host(job, model, device)
    model.train(job.trains)
    if job.trains:
        wrap_model(setup, model)

    def build() -> torch.nn.Module:
        with device:
            return instantiate(job, **model_arguments(setup))

    finished: torch.nn.Module = job.added_task.finish(job, setup, model, build)
    return finished


def _instantiate(job: Job, setup: Setup, weights: Path | None, on_loaded: OnLoaded) -> torch.nn.Module:
    built = instantiate(job, weights=weights, on_loaded=on_loaded, **model_arguments(setup))
    return adapt_model(setup, built)


def _refuse_left_on_the_host(job: Job, model: torch.nn.Module, device: torch.device) -> None:
    """Raise `JobError` for a user's module with parameters that a copy on the device does not have there."""
    left = [name for name, parameter in model.named_parameters() if parameter.device.type != device.type]
    if left:
        raise JobError(
            f"{job.model.name}: a copy of it has {left[0]} on the host, as of a module of torch.jit. Take "
            "the module from which it was scripted."
        )


def could_be_spread_from_the_host(job: Job, setup: Setup) -> bool:
    """Return True if the model, built on the host, is sharded or split before any process has it on its
    device.
    """
    on_host = replace(job, build_on="host")
    return STAYS not in built_on(setup, job) and STAYS in built_on(setup, on_host)


@contextlib.contextmanager
def _host(device: torch.device) -> Iterator[None]:
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if device.type != "meta":
        with torch.device("cpu"):
            yield
        return
    # The recorder of a simulation is a dispatch mode, which must not record tensors of the host.
    with _disable_current_modes(), torch.device("meta"):
        yield


def _move(
    model: torch.nn.Module, device: torch.device, present: Iterable[torch.Tensor] = ()
) -> torch.nn.Module:
    """Move the model to the device, as `model.to(device)`. Its tensors in `present` are there already.

    On `meta` that would do nothing, so each tensor is created again in the order of `Module._apply`. A tied
    weight, which `_apply` visits twice, is created once. Tensors that a feature stores next to a weight are
    created before it.
    """
    import torch

    if device.type != "meta":
        return model.to(device)
    storages = {tensor.untyped_storage()._cdata for tensor in present}

    def remake(tensor: torch.Tensor) -> torch.Tensor:
        # On `meta` every data pointer is 0, and only `_cdata` identifies a storage.
        if tensor.untyped_storage()._cdata in storages:
            return tensor
        for owner, name in tensors_beside(tensor):
            setattr(owner, name, torch.empty_like(getattr(owner, name), device=device))
        new = torch.empty_like(tensor, device=device)
        storages.add(new.untyped_storage()._cdata)
        return new

    return model._apply(remake)  # type: ignore[no-any-return]


def build_optimizer(
    job: Job, setup: Setup, model: torch.nn.Module, *, weight_decay: float | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer over the trainable parameters, in one group or in the job's decay groups.

    Without a `weight_decay` the optimizer uses its own default, and 0.01 for the groups that decay. Raises
    `UsageError` if no parameter is trainable, or if a weight decay is given for an optimizer without one.
    """
    wish = setup.optimizer
    groups: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not groups:
        raise UsageError(
            "No parameter of this model is trainable. Freeze fewer parts, choose other targets for the "
            f"adapters, or use {roster.plain(Slot.ADAPTERS).name!r}."
        )
    if weight_decay and not wish.weight_decay:
        raise UsageError(
            f"{wish.factory.path} has no weight decay, but weight_decay is {weight_decay}. Set "
            "weight_decay to 0, or choose another optimizer."
        )
    more = {"weight_decay": weight_decay} if weight_decay is not None and wish.weight_decay else {}
    if job.decay_groups and wish.weight_decay:
        groups = decay_groups(model, **more)
    numbers = {"lr": job.learning_rate, **more}
    of_part = optimizer_of_part(setup, wish, model, groups, **numbers)
    return make_optimizer(wish, model, groups, **numbers) if of_part is None else of_part


NEVER_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Regular expressions of the names of parameters without weight decay: biases and norms."""


def decay_groups(model: torch.nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Return two parameter groups: one with decay, and one without it for biases and normalisations.

    The rule is the HF Trainer's own (`Trainer.get_decay_parameter_names`). Its import takes half a second, so
    the rule is repeated here; `tests/test_trainer_rules.py` compares the two.
    """
    import torch
    from transformers.trainer_pt_utils import get_parameter_names

    decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], [*NEVER_DECAYED]))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for name, p in named if name in decaying], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
    ]
