"""Join optimizer states and weights from all processes, for the parts of a checkpoint that are not
sharded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.ranks import Ranks, from_first, talking

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.state import TrainState


def _gather(own: Any, state: TrainState) -> list[Any]:
    """Gather `own` (optimizer states) from all processes. Return a list by rank in the first process, and an
    empty list in the others.

    Tensors are sent from the host: otherwise unpickling would allocate them on their original GPU.
    """
    tree, tensors = pack(own)
    packed = state.ranks.gather((tree, {name: value.cpu() for name, value in tensors.items()}))
    return [unpack(tree, tensors, state.device) for tree, tensors in packed]


def states_of_all(own: Mapping[int, Any], state: TrainState) -> dict[int, Any]:
    """Return the states of all weights by index in the first process, and an empty dict in the others.

    Each process has the states of some weights. All processes call it.
    """
    states = {number: values for one in _gather(own, state) for number, values in one.items()}
    return dict(sorted(states.items()))


def state_of_all_stages(own: Mapping[str, Any], names: Sequence[str], state: TrainState) -> dict[str, Any]:
    """In the first process, return the joined optimizer state of all pipeline stages, with the weights'
    names.

    The others return their own state. The state of a weight that several processes have comes from the first
    of them. All processes call it.
    """
    names_before: set[str] = set()
    stages = []
    for of_stage, optimized in _gather((own, list(names)), state):
        new_names, part = own_part(of_stage, optimized, set(optimized) - names_before)
        names_before.update(new_names)
        if new_names:
            stages.append((part, new_names))
    return _join_stages(stages) if stages else {"optimizer": dict(own), "optimized": list(names)}


def _join_stages(stages: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, Any]:
    """Return the joined optimizer state of several stages, group by group, in the order of the layers."""
    first = stages[0][0]
    groups: list[dict[str, Any]] = []
    states: dict[int, Any] = {}
    optimized: list[str] = []
    begins = [0] * len(stages)  # index of each parameter group's first weight, by stage
    for number, settings in enumerate(first["groups"]):
        counts = [state["groups"][number]["params"] for state, _ in stages]
        joined = []
        for stage, (state, names) in enumerate(stages):
            own = range(begins[stage], begins[stage] + counts[stage])
            layers = _layers_of([names[index] for index in own])
            joined += [(layers[at], names[index], state["states"].get(index)) for at, index in enumerate(own)]
            begins[stage] += counts[stage]
        # The sort is stable, so weights of one layer stay in the model's order.
        for _, name, values in sorted(joined, key=lambda one: one[0]):
            if values is not None:
                states[len(optimized)] = values
            optimized.append(name)
        groups.append({**settings, "params": sum(counts)})
    return {"optimizer": {**first, "groups": groups, "states": states}, "optimized": optimized}


def _layers_of(names: Sequence[str]) -> list[float]:
    """Return the layer number of each named weight of a pipeline stage. Weights before the layers (embedding)
    get minus infinity, weights after them plus infinity.
    """
    layers: list[float] = []
    for name in names:
        number = re.search(r"\.layers\.(\d+)\.", name)
        outside = -math.inf if not layers or layers[-1] < 0 else math.inf
        layers.append(float(number[1]) if number else outside)
    return layers


def tensors_of_all_stages(own: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """In the first process, return the tensors of all pipeline stages, received over gloo.

    The others return their own tensors. All processes call it.
    """
    import torch
    import torch.distributed as dist

    named = {name: (tuple(value.shape), value.dtype) for name, value in own.items()}
    whole = dict(own)
    lists = ranks.gather(named)
    senders: list[Any] = [None]
    if ranks.is_first:
        names_before = set(own)
        senders = [[]]
        for rank, one in enumerate(lists):
            senders[0] += [(rank, name, *one[name]) for name in one if name not in names_before]
            names_before.update(one)
    # All processes go through one list, so that each send has its receive.
    for rank, name, shape, dtype in from_first(senders[0], ranks.host) if ranks.are_many else ():
        with talking():
            if ranks.is_first:
                whole[name] = torch.empty(shape, dtype=dtype)
                dist.recv(whole[name], rank, group=ranks.host)
            elif ranks.rank == rank:
                dist.send(own[name].contiguous(), 0, group=ranks.host)
    return whole


def own_part(
    saved: Mapping[str, Any], optimized: Sequence[str], names: Iterable[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names and the optimizer states of the weights in `names`, selected from the state of all
    weights in `optimized`.
    """
    wanted_names = set(names)
    groups: list[dict[str, Any]] = []
    states: dict[int, Any] = {}
    own_names: list[str] = []
    index = 0
    for group in saved["groups"]:
        before = len(own_names)
        for _ in range(group["params"]):
            if optimized[index] in wanted_names:
                if index in saved["states"]:
                    states[len(own_names)] = saved["states"][index]
                own_names.append(optimized[index])
            index += 1
        groups.append({**group, "params": len(own_names) - before})
    return own_names, {**saved, "groups": groups, "states": states}
