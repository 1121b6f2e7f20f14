"""Checkpoints of adapters whose model is sharded: gathered and written by the first process.

Adapters are small beside their frozen weights. So each checkpoint has them whole, with their optimizer
states, in the files of a run of one process. Frozen weights are not saved: a resumed run builds them again
(`training/checkpoint/model_state.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.eight_bit_shards import SCALES
from snugfit.features.distributed.checkpoint.shards import step_counts
from snugfit.features.distributed.engine.config import is_of_engine
from snugfit.training.checkpoint.model_state import beginning_of
from snugfit.training.checkpoint.optimizer_state import optimizer_state, parameters_of
from snugfit.training.checkpoint.packed_state import SAVED_ON, pack
from snugfit.training.checkpoint.state import Snapshot, TrainState, state_of
from snugfit.training.checkpoint.weights import ModelWeights, load_weights, weights_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from snugfit.training.checkpoint.staging import Staging

Weights = dict[int, Any]
"""Whole trained weights in the first process, by the `id` of the model's own."""

States = dict[int, dict[str, Any]]
"""Whole optimizer states in the first process, by the weight's index in the optimizer."""


def gathered_adapters(state: TrainState, staging: Staging, *, random: Sequence[Any]) -> Snapshot | None:
    """Gather trained weights and optimizer states on the first process's host, and return its snapshot. The
    others return None.

    All processes call it between two steps, after the previous snapshot is written.
    """
    tree = state_of(state, random)
    trained, moments = (_of_engine if is_of_engine(state.optimizer) else _of_shards)(state)
    if not state.ranks.is_first:
        return None
    tree["optimizer"]["states"] = moments
    packed, tensors = pack(tree, parameters_of(state.optimizer))
    staging.begin()
    copied = Snapshot(
        weights=_whole_weights(state, trained).with_copies(staging.copy),
        tree=packed,
        tensors={name: staging.copy(value) for name, value in tensors.items()},
        step=state.progress.step,
    )
    if state.device.type == "cuda":
        import torch

        # Copies of buffers to the host are asynchronous.
        torch.cuda.synchronize(state.device)
    return copied


def load_adapters(model: torch.nn.Module, folder: Path) -> None:
    """Load whole adapters into a model whose weights FSDP2 has sharded. Each process reads them and keeps its
    shards. Raises `SnugfitError` for another model's adapters.
    """
    import torch
    from torch.distributed.tensor import distribute_tensor

    # `load_weights` replaces these values by the saved ones, of all trained weights.
    whole = {
        id(shard): torch.empty(shard.shape, dtype=shard.dtype)
        for shard in model.parameters()
        if shard.requires_grad
    }
    shards: list[Any] = [shard for shard in model.parameters() if id(shard) in whole]
    with _in_place_of_shards(model, whole):
        load_weights(model, folder)
    with torch.no_grad():
        for shard in shards:
            part = distribute_tensor(
                whole[id(shard)].to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None
            )
            shard.to_local().copy_(part.to_local())


def _of_shards(state: TrainState) -> tuple[Weights, States]:
    """Gather FSDP2's trained weights, and the optimizer states of each. All processes call it."""

    def whole(value: Any) -> Any:
        return _on_host(value.detach().full_tensor(), state) if hasattr(value, "full_tensor") else value

    weights = {id(one): whole(one) for one in parameters_of(state.optimizer)}
    states = optimizer_state(state.optimizer)["states"]
    return weights, {
        index: {key: _flat(key, whole(value)) for key, value in of_weight.items()}
        for index, of_weight in states.items()
    }


def _flat(key: str, value: Any) -> Any:
    """Return the scales of 8-bit states in one dimension, as one process has them; other states unchanged."""
    if key not in SCALES or value is None:
        return value
    flat = value.flatten()
    setattr(flat, SAVED_ON, getattr(value, SAVED_ON))
    return flat


def _of_engine(state: TrainState) -> tuple[Weights, States]:
    """Gather the trained fp32 weights of DeepSpeed's engine, and the optimizer states of each. All processes
    call it.
    """
    from snugfit.features.distributed.engine.optimizer import whole_states, whole_weight

    optimizer: Any = state.optimizer
    parameters = parameters_of(optimizer)
    weights = {id(one): _on_host(whole_weight(one), state) for one in parameters}
    states: States = {index: dict(counts) for index, counts in step_counts(state).items()}
    for index, weight in enumerate(parameters):
        for key, value in whole_states(optimizer, weight):
            states[index][key] = _on_host(value, state)
    return weights, states


def _on_host(whole: torch.Tensor, state: TrainState) -> Any:
    """Return a copy on the host in the first process, and None in the others.

    A run of one process has such a tensor on its device.
    """
    if not state.ranks.is_first:
        return None
    copied = whole.detach().to("cpu", copy=True)
    setattr(copied, SAVED_ON, state.device.type)
    return copied


def _whole_weights(state: TrainState, trained: Mapping[int, torch.Tensor]) -> ModelWeights:
    """Return the model's weights for a checkpoint, from whole `trained` tensors by the `id` of their shards.

    No step changes frozen weights, so their checksums are those of the run's beginning.
    """
    model, before = state.model, beginning_of(state.model).frozen
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    with _in_place_of_shards(model, trained):
        weights = weights_of(model)
    tensors = {name: value for name, value in weights.state.tensors.items() if name not in frozen}
    unchanged = {name: bits for name, bits in before.items() if name in frozen}
    checksums = {**weights.state.frozen, **unchanged}
    return replace(weights, state=replace(weights.state, tensors=tensors, frozen=checksums))


@contextlib.contextmanager
def _in_place_of_shards(model: torch.nn.Module, trained: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Context in which the model has whole trained weights, and empty tensors in place of frozen ones."""
    import torch

    whole: dict[int, torch.nn.Parameter] = {}  # a tied weight stays one parameter
    shards = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None
    ]
    try:
        for module, name, weight in shards:
            value = trained.get(id(weight))
            if id(weight) not in whole:
                data = torch.empty(0, dtype=weight.dtype) if value is None else value
                whole[id(weight)] = torch.nn.Parameter(data, requires_grad=weight.requires_grad)
            module._parameters[name] = whole[id(weight)]
        yield
    finally:
        for module, name, weight in shards:
            module._parameters[name] = weight
