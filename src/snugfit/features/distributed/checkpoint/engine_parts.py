"""The parts of a checkpoint from DeepSpeed's engine: fp32 weights and their optimizer states, by name.

The engine's partitions are flat and cut at any place. They are useless to a run with another number of
processes or without an engine. A checkpoint therefore has each weight whole with its states, as under
`zero1`. All processes gather one weight after the other. Its owner copies it to the host and writes it. The
owners have weights of about equal size in bytes (`features/distributed/engine/owners.py`).

On reading, the weights are loaded into the model on the host, before there is an engine. The states go into
the partitions in batches: each process reads all and keeps its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.engine.owners import owners

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.state import TrainState

READ_BYTES = 1 << 30
"""Bytes of states on the host at a time during reading (chosen).

This is large for one read, and small compared to a model that needs an engine.
"""


def gathered_parts(state: TrainState) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Yield this process's weights and states, one after the other, with the names of weight and state.

    The state's name is empty for the weight itself. All processes must iterate to the end.
    """
    from snugfit.features.distributed.engine.optimizer import whole_states, whole_weight

    optimizer: Any = state.optimizer
    # All processes compute the same owners, so none is exchanged.
    chosen = owners(state.model, state.ranks.size)
    for name, weight in state.model.named_parameters():
        is_own = chosen[name] == state.ranks.rank
        whole = whole_weight(weight)
        if is_own:
            yield (name, ""), whole
        # Freed before the states are gathered, so that one whole tensor exists at a time.
        del whole
        for key, value in whole_states(optimizer, weight):
            if is_own:
                yield (name, key), value


def step_counts(state: TrainState) -> dict[int, dict[str, torch.Tensor]]:
    """Return the number of updates of each weight by its index in the optimizer, as torch's AdamW stores it.

    Each weight has a tensor of its own, because each is incremented separately.
    """
    optimizer: Any = state.optimizer
    count = optimizer.step_count()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {} if count is None else {number: {"step": count.clone()} for number in range(len(weights))}


def whole_model(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the model's `state_dict` on the host with fp32 weights, in the first process.

    The others return an empty dict. All processes call it.
    """
    from snugfit.features.distributed.engine.optimizer import whole_weight

    weights = {id(weight) for weight in state.model.parameters()}
    copies: dict[int, torch.Tensor] = {}
    named = state.model.state_dict(keep_vars=True)
    for value in named.values():
        if id(value) not in copies:  # a tied weight is one tensor under two names
            gathered = whole_weight(value) if id(value) in weights else value.detach()
            copies[id(value)] = gathered.to("cpu", copy=True) if state.ranks.is_first else value
    return {name: copies[id(value)] for name, value in named.items()} if state.ranks.is_first else {}


def put_parts(
    state: TrainState,
    known: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]],
) -> None:
    """Put optimizer states from shards into the engine's partitions.

    `known` has the metadata of each state under `weight/state`. `read` returns some of the states, whole. The
    numbers of updates must be in the optimizer's `state` already.
    """
    optimizer: Any = state.optimizer
    counts = [float(values["step"]) for values in optimizer.state.values() if "step" in values]
    optimizer.state.clear()
    weights = dict(state.model.named_parameters())
    places = {name: name.rpartition("/") for name in known if name.rpartition("/")[0] in weights}
    if not places:
        return
    optimizer.begin_states({key for _, _, key in places.values()}, max(counts, default=0.0))
    for some in _batches({name: known[name] for name in places}):
        for name, value in read(some).items():
            weight, _, key = places[name]
            optimizer.put_state(weights[weight], key, value)


def _batches(known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts in batches that are read at once."""
    some: dict[str, Any] = {}
    total = 0
    for name, part in known.items():
        size = math.prod(part.size) * part.properties.dtype.itemsize
        if some and total + size > READ_BYTES:
            yield some
            some, total = {}, 0
        some[name] = part
        total += size
    if some:
        yield some
