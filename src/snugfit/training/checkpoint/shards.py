"""Checkpoints of a model that several processes hold parts of: each writes its own, by torch's own format.

    shards/__0_0.distcp ...     torch.distributed.checkpoint: the parts of weights and of optimizer states, by
           .metadata            name and place in the whole (a pickle of torch's, read without code)
    state.json, .safetensors    everything else, as of any run (`state.py`), by the first process
    model_state.json, ...       buffers, and what modules remember (`model_state.py`), by the first process
    config.json, model...       at the end of a run: the whole weights, as libraries load them

Where layers are cut into stages, each process writes its own weights and their states, whole or its part of
them; where all have the model and the optimizer's states alone are spread, the weights that it updates and
their states, whole; under DeepSpeed's engine some of the weights, whole (`engine_parts.py`). The optimizer's
groups and single numbers are put together from all (`state.json`).

Since each part says where it belongs, another number of processes reads what it needs of them, and so does
one alone: torch's resharding. The other way round a whole checkpoint is read by all, and each keeps its part.

Parts are copied to the host between two steps and written while the next ones run, over a group of processes
of their own. The first process names the folder, waits until all have written, takes the checksums, writes
the manifest and renames, as for any checkpoint (`store.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.step.wishes.engine.config import is_of_engine
from snugfit.step.wishes.mesh.sharded_optimizer import (
    local_optimizer,
    spreads_states,
    updated_elsewhere,
)
from snugfit.step.wishes.mesh.stages import is_stage
from snugfit.training.checkpoint.engine_parts import (
    gathered_parts,
    put_parts,
    step_counts,
    whole_model,
)
from snugfit.training.checkpoint.joined_state import (
    state_of_all_stages,
    states_of_all,
    tensors_of_all_stages,
)
from snugfit.training.checkpoint.model_state import (
    ModelState,
    load_model_state,
    model_state_of,
    names_kept_beside,
)
from snugfit.training.checkpoint.optimizer_state import parameters_of
from snugfit.training.checkpoint.packed_state import pack
from snugfit.training.checkpoint.state import STATE, TENSORS, TrainState, state_of
from snugfit.training.checkpoint.torch_checkpoint import list_of_parts, read_parts, write_parts
from snugfit.training.checkpoint.weights import WEIGHTS, ModelWeights, read_weights
from snugfit.training.ranks import ALONE, Ranks, from_first

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging

SHARDS = "shards"
"""The folder within a checkpoint."""

_MODEL, _OPTIMIZER = "model.", "optimizer."
"""How names begin in it: then the weight's name, and of an optimizer's state a slash and its key."""


def is_part(tensor: Any) -> bool:
    """Whether this process holds a part of it, and others the rest: torch's `DTensor`."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def holds_parts(model: torch.nn.Module) -> bool:
    """Whether this process holds parts of the model's weights."""
    return any(is_part(weight) for weight in model.parameters())


def is_sharded(state: TrainState) -> bool:
    """Whether this process holds parts of the model's weights, some of its layers, or some of the optimizer's
    states."""
    spread = spreads_states(state.optimizer) or is_of_engine(state.optimizer)
    return spread or is_stage(state.model) or holds_parts(state.model)


def has_shards(folder: Path) -> bool:
    """Whether a checkpoint was written by several processes, each its part."""
    return (folder / SHARDS).is_dir()


# ---- written ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ShardedSnapshot:
    """A run between two steps, as far as this process holds it, on the host."""

    parts: Mapping[str, torch.Tensor]
    """This process's parts of weights and optimizer states, by their names in the whole."""

    state: ModelState
    """Of the model, what all processes hold."""

    weights: ModelWeights | None
    """The whole model, at the end of a run and in the first process."""

    tree: Any
    """Everything else, without its tensors."""

    tensors: Mapping[str, torch.Tensor]
    """The tensors of `tree`, by the names that it has for them."""

    step: int
    """The optimizer steps that are done."""

    ranks: Ranks
    """The processes that write it."""

    files: Mapping[str, str] = field(default_factory=dict)
    """What a front-end keeps beside it: text, by the name of its file."""

    processing: Any = None
    """A tokenizer or processor that is saved beside it, or None."""

    _is_told: bool = False

    @property
    def bytes(self) -> int:
        """How much room this process's parts take, times the processes."""
        parts = (getattr(part, "_local_tensor", part) for part in self.parts.values())
        own = sum(part.nbytes for part in parts) * self.ranks.size
        whole = [] if self.weights is None else list(self.weights.tensors())
        text_bytes = sum(len(text.encode()) for text in self.files.values())
        return own + text_bytes + sum(tensor.nbytes for tensor in (*self.tensors.values(), *whole))

    def write(self, folder: Path) -> None:
        """In the first process: writes the checkpoint's files into `folder`, with all others."""
        from safetensors.torch import save_file

        self._tell(folder)
        self._write_parts(folder)
        if self.weights is not None:
            self.weights.write(folder)
        else:
            self.state.write(folder, {})
        save_file(dict(self.tensors), folder / TENSORS)
        state = json.dumps(self.tree, allow_nan=False) + "\n"
        for name, text in {STATE: state, **self.files}.items():
            (folder / name).write_text(text, encoding="utf-8")
        if self.processing is not None:
            self.processing.save_pretrained(folder)

    def write_share(self) -> None:
        """In the others: writes this process's parts into the folder that the first names."""
        folder = from_first(None, self.ranks.writing)
        if folder is not None:
            self._write_parts(Path(folder))

    def close(self) -> None:
        """In the first: where there is no folder, the others are told so."""
        if not self._is_told:
            self._tell(None)

    def _tell(self, folder: Path | None) -> None:
        self._is_told = True
        if self.ranks.are_many:
            from_first(None if folder is None else str(folder), self.ranks.writing)

    def _write_parts(self, folder: Path) -> None:
        group, are_many = self.ranks.writing, self.ranks.are_many
        write_parts(dict(self.parts), folder / SHARDS, group=group, are_many=are_many)


def shards_of(
    state: TrainState, staging: Staging, *, random: Sequence[Any], is_last: bool
) -> ShardedSnapshot:
    """This process's part of the run as it is, copied to the host; with `is_last` the first has the whole
    model too. All processes call it between two steps, and not before the last one is written."""
    tree, tensors = pack(_tree_of_all(state, random), parameters_of(state.optimizer))
    shared = _shared_by_all(state)
    staging.begin()
    copied = ShardedSnapshot(
        parts=_parts_on_host(state, staging),
        state=shared.with_copies(staging.copy),
        weights=None,
        tree=tree,
        tensors={name: staging.copy(value) for name, value in tensors.items()},
        step=state.progress.step,
        ranks=state.ranks,
    )
    if is_last:
        copied.weights = _whole_model(state, copied.state)
    if state.device.type == "cuda":
        import torch

        torch.cuda.synchronize(state.device)
    return copied


def _parts_on_host(state: TrainState, staging: Staging) -> dict[str, torch.Tensor]:
    """What this process writes, copied. What an engine has is gathered for it, and dropped."""
    if not is_of_engine(state.optimizer):
        return {name: _on_host(part, staging) for name, part in _parts(state).items()}
    copied = {}
    for (name, key), part in gathered_parts(state):
        copied[f"{_OPTIMIZER}{name}/{key}" if key else _MODEL + name] = staging.copy_passing(part)
    return copied


def _parts(state: TrainState) -> dict[str, torch.Tensor]:
    """What this process writes: its parts of weights and states, or whole ones that are its own. Whole
    weights that several have are written by one of them (tensor parallelism leaves some)."""
    weights, moments = dict(_weights(state.model)), dict(_moments(state))
    if is_stage(state.model):
        return {name: one for name, one in {**weights, **moments}.items() if _is_of_owner(one)}
    if spreads_states(state.optimizer):
        elsewhere = {id(weight) for weight in updated_elsewhere(state.optimizer)}
        named = state.model.named_parameters()
        own = {_MODEL + name: one.detach() for name, one in named if id(one) not in elsewhere}
        return own | {name: one for name, one in moments.items() if _is_of_owner(one)}
    return weights | {name: one for name, one in moments.items() if is_part(one)}


def _shared_by_all(state: TrainState) -> ModelState:
    """Of the model, what is no part and nobody's own."""
    model = state.model
    shared = model_state_of(model, set(model.state_dict()))
    is_owned = is_stage(model) or spreads_states(state.optimizer) or is_of_engine(state.optimizer)
    owned = {name for name, _ in model.named_parameters()} if is_owned else set()
    rest = {n: value for n, value in shared.tensors.items() if not is_part(value) and n not in owned}
    return replace(shared, tensors=rest)


def _tree_of_all(state: TrainState, random: Sequence[Any]) -> Any:
    """Everything but the model, without what is written by parts; in the first process with what others have
    of the optimizer. All processes call it."""
    tree = state_of(state, random)
    rest = _without(_is_of_owner, tree["optimizer"])
    if is_of_engine(state.optimizer):
        tree["optimizer"] = {**rest, "states": step_counts(state)}
    elif is_stage(state.model):
        tree |= state_of_all_stages(rest, tree["optimized"], state)
    elif spreads_states(state.optimizer):
        tree["optimizer"] = {**rest, "states": states_of_all(rest["states"], state)}
    return _without(is_part, tree)


def _whole_model(state: TrainState, shared: ModelState) -> ModelWeights | None:
    """In the first process the whole model, whose weights are copied to the host. All processes call it."""
    import torch

    if is_of_engine(state.optimizer):
        whole = whole_model(state)
    elif spreads_states(state.optimizer):
        whole = whole_weights(state.model) if state.ranks.is_first else {}
    else:
        whole = tensors_of_all_stages(whole_weights(state.model), state.ranks)
    if not state.ranks.is_first:
        return None
    dtype = torch.float32 if is_of_engine(state.optimizer) else None
    return ModelWeights(model=state.model, files={WEIGHTS: whole}, configs={}, state=shared, dtype=dtype)


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's `state_dict` (a tensor by each name), gathered one after the other, on the host. All
    processes call it."""
    gathered: dict[int, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:  # a tied weight is one tensor under two names
            all_of_it = value.detach().full_tensor() if is_part(value) else value.detach()
            gathered[id(value)] = all_of_it.to("cpu", copy=True)
        whole[name] = gathered[id(value)]
    return whole


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in model.named_parameters():
        yield _MODEL + name, weight.detach()


def _moments(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the optimizer's states, by the weight that each belongs to."""
    names = {id(weight): name for name, weight in state.model.named_parameters()}
    for weight, values in local_optimizer(state.optimizer).state.items():
        for key, value in values.items():
            yield f"{_OPTIMIZER}{names[id(weight)]}/{key}", value


def _without(is_kept: Callable[[Any], bool], tree: Any) -> Any:
    """The state without what is kept otherwise: what is written by parts."""
    if isinstance(tree, dict):
        return {key: _without(is_kept, value) for key, value in tree.items() if not is_kept(value)}
    return tree


def _is_of_owner(value: Any) -> bool:
    """Whether a weight or a state is written by the process that has it; single numbers are not."""
    import torch

    return isinstance(value, torch.Tensor) and value.dim() > 0


def _on_host(part: Any, staging: Staging) -> torch.Tensor:
    """The same part of the whole, with a copy of what this process has of it."""
    from torch.distributed.tensor import DTensor

    if not is_part(part):
        return staging.copy(part)
    return DTensor(staging.copy(part.to_local()), part._spec, requires_grad=False)


# ---- put back --------------------------------------------------------------------------------------------


def load_shards(state: TrainState, folder: Path) -> None:
    """Puts weights and optimizer states that were written by parts into a run that stands, whole or in other
    parts. Raises `SnugfitError` when they are another model's."""
    known = _known_shards(state.model, folder)
    _load_into({**dict(_weights(state.model)), **_room_for_moments(state, known)}, folder, state.ranks)


def load_weight_shards(model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
    """Puts weights alone that were written by parts into a model that stands, whole or in other parts. Raises
    `SnugfitError` when they are another model's. All processes call it."""
    _known_shards(model, folder)
    _load_into(dict(_weights(model)), folder, ranks)


def load_moment_shards(state: TrainState, folder: Path) -> None:
    """Puts optimizer states alone that were written by parts into an optimizer whose weights are there
    already. Raises `SnugfitError` when they are another model's. All processes call it."""
    _load_into(_room_for_moments(state, _known_shards(state.model, folder)), folder, state.ranks)


def load_states_of_engine(state: TrainState, folder: Path) -> None:
    """Puts the optimizer states of any checkpoint into the partitions of DeepSpeed's engine, whose weights
    are there already: those that were written by parts, or those that `restore` has read whole. All processes
    call it."""
    optimizer: Any = state.optimizer
    if not has_shards(folder):
        optimizer.take_states()
        return
    known = {
        name.removeprefix(_OPTIMIZER): part
        for name, part in _known_shards(state.model, folder).items()
        if name.startswith(_OPTIMIZER)
    }

    def read(some: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        rooms = {name: torch.empty(part.size, dtype=part.properties.dtype) for name, part in some.items()}
        _load_into({_OPTIMIZER + name: room for name, room in rooms.items()}, folder, ALONE)
        return rooms

    put_parts(state, known, read)


def _known_shards(model: torch.nn.Module, folder: Path) -> Mapping[str, Any]:
    """What was written by parts, by its name. Raises `SnugfitError` when it is another model's."""
    known = list_of_parts(folder / SHARDS)
    values = dict(_weights(model))
    lost = sorted(values.keys() - known.keys())
    if not lost and not is_stage(model):
        lost = sorted(name for name in known if name.startswith(_MODEL) and name not in values)
    if lost:
        name = lost[0].removeprefix(_MODEL)
        raise SnugfitError(f"{folder} has the weights of another model: {name} is in one of them alone.")
    return known


def _load_into(values: dict[str, torch.Tensor], folder: Path, ranks: Ranks) -> None:
    import torch

    with torch.no_grad():
        read_parts(values, folder / SHARDS, group=ranks.host, are_many=ranks.are_many)


def load_whole_weights(model: torch.nn.Module, folder: Path) -> None:
    """Puts weights that were written whole into a model that this process holds parts of: each keeps its part
    of what it reads. Raises `SnugfitError` when they are another model's, or are written under other names
    than it computes with. All processes call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    saved: dict[str, Any] = dict(read_weights(folder))
    beside = names_kept_beside(folder)
    if left := sorted(saved.keys() - model.state_dict().keys()):
        raise SnugfitError(
            f"{folder} has {left[0]}, which is not a weight of this model by that name. Continue that run as "
            "it began, with whole weights in each process."
        )
    options = StateDictOptions(full_state_dict=True, strict=False)
    missing = set(set_model_state_dict(model, saved, options=options).missing_keys) - beside
    given = {id(model.get_parameter(name)) for name in saved if name in dict(model.named_parameters())}
    tied = {n for n, value in model.named_parameters(remove_duplicate=False) if id(value) in given}
    if lost := sorted(missing - tied):
        raise SnugfitError(f"{folder} has no weights of this model: {lost[0]} is missing.")
    load_model_state(model, folder)


def _room_for_moments(state: TrainState, known: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A tensor for each state that was written, in the optimizer's states, by its name."""
    import torch

    weights = dict(state.model.named_parameters())
    optimizer = local_optimizer(state.optimizer)
    elsewhere = {id(weight) for weight in updated_elsewhere(state.optimizer)}
    rooms: dict[str, torch.Tensor] = {}
    for name in known:
        if name.startswith(_OPTIMIZER):
            weight, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
            if weight not in weights or id(weights[weight]) in elsewhere:  # another process has it
                continue
            dtype = known[name].properties.dtype
            rooms[name] = torch.zeros_like(weights[weight].detach(), dtype=dtype)
            optimizer.state[weights[weight]][key] = rooms[name]
    return rooms


def keep_parts(optimizer: torch.optim.Optimizer) -> None:
    """After states were put back that had been kept whole: this process keeps its part of each whose weight
    it holds a part of, where that is. Nothing is exchanged, for each process has them whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    held: Any
    for held, values in optimizer.state.items():
        for key, value in values.items():
            if is_part(held) and held.dim() and getattr(value, "shape", None) == held.shape:
                part = distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
                local = part.to_local().to(held.to_local().device)
                values[key] = DTensor(local, part._spec, requires_grad=False)
