"""What a checkpoint has of a run whose steps are DeepSpeed's: weights in fp32 and their states, by name.

The engine's partitions are flat and cut anywhere, so they say nothing to whoever has another number of
processes or no engine. In a checkpoint each weight is whole, with its states, as under `zero1`: all
processes gather one after the other, and the one whose it is copies it to the host and writes it. Processes
have weights of about as many bytes (`step/wishes/engine/owners.py`).

Read, the weights are the model's before there is an engine, on the host. The states go into the partitions
some at a time, each process reading all and keeping its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.step.wishes.engine.owners import owners

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.state import TrainState

READ_BYTES = 1 << 30
"""Of states that are on the host at a time while they are read (chosen): much for one read, and little beside
a model for which somebody needs an engine."""


def gathered_parts(state: TrainState) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """What this process writes, one after the other: each by the weight's name and that of its state, which
    is empty for the weight itself. All processes go through it to its end."""
    from snugfit.step.wishes.engine.optimizer import whole_states, whole_weight

    optimizer: Any = state.optimizer
    chosen = owners(state.model, state.ranks.size)
    for name, weight in state.model.named_parameters():
        is_own = chosen[name] == state.ranks.rank
        whole = whole_weight(weight)
        if is_own:
            yield (name, ""), whole
        del whole
        for key, value in whole_states(optimizer, weight):
            if is_own:
                yield (name, key), value


def step_counts(state: TrainState) -> dict[int, dict[str, torch.Tensor]]:
    """How many updates each weight has had, by its place among those of the optimizer: the single number of a
    weight's states, as torch's AdamW has it. Each has one of its own, for each is counted on by itself."""
    optimizer: Any = state.optimizer
    count = optimizer.step_count()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {} if count is None else {number: {"step": count.clone()} for number in range(len(weights))}


def whole_model(state: TrainState) -> dict[str, torch.Tensor]:
    """In the first process the model's `state_dict` (a tensor by each name) on the host, its weights in fp32;
    nothing in the others. All processes call it."""
    from snugfit.step.wishes.engine.optimizer import whole_weight

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
    """Puts states that were written by parts into the engine's partitions. `known` is told of each by the
    weight's name, a slash and its own, and `read` gives some of them, whole. The counts of updates were put
    into the optimizer's `state` already."""
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
    """The parts, so many at a time as are read at once."""
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
