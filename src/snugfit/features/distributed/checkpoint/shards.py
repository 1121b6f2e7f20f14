"""Checkpoints of a model that is spread over several processes: each writes its parts in torch's format.

- `shards/__0_0.distcp`, ..., `shards/.metadata`: torch.distributed.checkpoint. Parts of weights and optimizer
  states, by name and offset in the whole. `.metadata` is a pickle of torch's, read without code.
- `state.json`, `.safetensors`: all other state, as of any run (`state.py`), by the first process.
- `model_state.json`, ...: buffers and attributes of modules (`model_state.py`), by the first process.
- `config.json`, `model...`: at the end of a run, the whole weights, in the libraries' form.

A pipeline's process writes its own weights and their states, whole or its part of them. If only the
optimizer's states are spread, each process writes the weights that it updates and their states, whole. Under
DeepSpeed's engine each writes some of the weights, whole. The optimizer's groups and
single numbers are joined from all (`state.json`).

Each part has its offset in the whole, so another number of processes can read its own parts: torch's
resharding. A single process can too. In the other direction, all processes read a whole checkpoint, and each
keeps its part.

Parts are copied to the host between two steps and written during the next ones, over a process group of their
own. The first process names the folder and waits until all have written. Then it computes the checksums,
writes the manifest and renames, as for any checkpoint (`store.py`).

The engine's partitions are flat and cut at any place. They are useless to a run with another number of
processes or without an engine. A checkpoint therefore has each weight whole with its states, as under
`zero1`. All processes gather one weight after the other. Its owner copies it to the host and writes it. The
owners have weights of about equal size in bytes (`features/distributed/engine/owners.py`).

On reading, the weights are loaded into the model on the host, before there is an engine. The states go into
the partitions in batches: each process reads all and keeps its part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.features.distributed.apply.eight_bit_shards import (
    BLOCK,
    SCALES,
    as_rows,
    as_shard,
    has_whole_blocks,
    widen_states,
)
from snugfit.features.distributed.apply.rank_mesh import is_part, own_part
from snugfit.features.distributed.apply.sharded_optimizer import local_optimizer, spreads_states
from snugfit.features.distributed.apply.stages import is_stage
from snugfit.features.distributed.checkpoint.joined_state import (
    state_of_all_stages,
    states_of_all,
    tensors_of_all_stages,
)
from snugfit.features.distributed.checkpoint.torch_checkpoint import list_of_parts, read_parts, write_parts
from snugfit.features.distributed.engine.config import is_of_engine
from snugfit.features.distributed.engine.owners import owners
from snugfit.training.checkpoint.model_state import (
    ModelState,
    load_model_state,
    model_state_of,
    names_kept_beside,
)
from snugfit.training.checkpoint.optimizer_state import parameters_of
from snugfit.training.checkpoint.packed_state import pack
from snugfit.training.checkpoint.parts import updated_elsewhere
from snugfit.training.checkpoint.state import STATE, TENSORS, TrainState, state_of
from snugfit.training.checkpoint.weights import WEIGHTS, ModelWeights, read_weights
from snugfit.training.ranks import ALONE, Ranks, from_first

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging

SHARDS = "shards"
"""Name of the folder in a checkpoint that contains shards, the parts of weights and optimizer states."""

_MODEL, _OPTIMIZER = "model.", "optimizer."
"""Prefixes of tensor names in shards. The weight's name follows, and for an optimizer's state a slash and its
key."""


def holds_parts(model: torch.nn.Module) -> bool:
    """Return True if this process has shards of the model's weights, and not whole ones."""
    return any(is_part(weight) for weight in model.parameters())


def is_sharded(state: TrainState) -> bool:
    """Return True if this process has only parts of the weights, layers or optimizer states."""
    spread = spreads_states(state.optimizer) or is_of_engine(state.optimizer)
    return spread or is_stage(state.model) or holds_parts(state.model)


def has_shards(folder: Path) -> bool:
    """Return True if several processes wrote this checkpoint, each its shards."""
    return (folder / SHARDS).is_dir()


# ---- written ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ShardedSnapshot:
    """Snapshot of this process's part of a run between two steps, on the host."""

    parts: Mapping[str, torch.Tensor]
    """This process's parts of weights and optimizer states, by the name of the whole tensor."""

    state: ModelState
    """The part of the model's state that is equal in all processes, such as buffers."""

    weights: ModelWeights | None
    """All weights of the model, in the first process at the end of a run; None otherwise."""

    tree: Any
    """Nested containers of all other state. Its tensors are in `tensors`."""

    tensors: Mapping[str, torch.Tensor]
    """The tensors of `tree`, by their names in it."""

    step: int
    """The number of finished optimizer steps."""

    ranks: Ranks
    """The processes that write the checkpoint together."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Further text files of the training loop, as text by file name."""

    processing: Any = None
    """Tokenizer or processor to save with the checkpoint; None for none."""

    _is_told: bool = False

    @property
    def bytes(self) -> int:
        """The estimated checkpoint size in bytes: this process's parts times the number of processes, plus
        the shared state.
        """
        parts = (getattr(part, "_local_tensor", part) for part in self.parts.values())
        own = sum(part.nbytes for part in parts) * self.ranks.size
        whole = [] if self.weights is None else list(self.weights.tensors())
        text_bytes = sum(len(text.encode()) for text in self.files.values())
        return own + text_bytes + sum(tensor.nbytes for tensor in (*self.tensors.values(), *whole))

    def write(self, folder: Path) -> None:
        """Write the checkpoint's files into `folder`. The first process calls it, while the others call
        `write_share`.
        """
        from safetensors.torch import save_file

        # The other processes write their parts meanwhile.
        self._send_folder(folder)
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
        """Write this process's shards into the checkpoint folder that the first process has created."""
        folder = from_first(None, self.ranks.writing)
        if folder is not None:
            self._write_parts(Path(folder))

    def close(self) -> None:
        """Release the other processes if no checkpoint folder was created: they wait for its name from the
        first process.
        """
        # Without an error message, the other processes would wait in `write_share`.
        if not self._is_told:
            self._send_folder(None)

    def _send_folder(self, folder: Path | None) -> None:
        self._is_told = True
        if self.ranks.are_many:
            from_first(None if folder is None else str(folder), self.ranks.writing)

    def _write_parts(self, folder: Path) -> None:
        group, are_many = self.ranks.writing, self.ranks.are_many
        write_parts(dict(self.parts), folder / SHARDS, group=group, are_many=are_many)


def shards_of(
    state: TrainState, staging: Staging, *, random: Sequence[Any], is_last: bool
) -> ShardedSnapshot:
    """Return a snapshot of this process's part of the run, copied to the host.

    With `is_last` the first process has the whole model too. All processes call it between two steps, after
    the previous snapshot is written.
    """
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
    # Copies to the host are asynchronous, and the next step changes the weights.
    if state.device.type == "cuda":
        import torch

        torch.cuda.synchronize(state.device)
    return copied


def _parts_on_host(state: TrainState, staging: Staging) -> dict[str, torch.Tensor]:
    """Return copies of this process's shards on the host, by name. Under DeepSpeed's engine, weights and
    states are gathered one by one, copied and freed.
    """
    if not is_of_engine(state.optimizer):
        return {name: _on_host(part, staging) for name, part in _parts(state).items()}
    copied = {}
    for (name, key), part in gathered_parts(state):
        copied[f"{_OPTIMIZER}{name}/{key}" if key else _MODEL + name] = staging.copy_passing(part)
    return copied


def _parts(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the tensors that this process writes into a checkpoint: its shards of weights and optimizer
    states, or its share of whole ones.

    Whole weights of several processes are written by one of them (tensor parallelism leaves some whole).
    """
    weights, moments = dict(_weights(state.model)), dict(_moments(state))
    if is_stage(state.model):
        return {name: one for name, one in {**weights, **moments}.items() if _is_of_owner(one)}
    if spreads_states(state.optimizer):
        elsewhere = {id(weight) for weight in updated_elsewhere(state.optimizer)}
        named = state.model.named_parameters()
        own = {_MODEL + name: one.detach() for name, one in named if id(one) not in elsewhere}
        return own | {name: one for name, one in moments.items() if _is_of_owner(one)}
    # Scalars are saved whole, in the tree of other state.
    return weights | {name: one for name, one in moments.items() if is_part(one)}


def _shared_by_all(state: TrainState) -> ModelState:
    """Return the model's state (buffers, attributes) without sharded tensors, and without tensors that
    another process writes.
    """
    model = state.model
    shared = model_state_of(model, set(model.state_dict()))
    is_owned = is_stage(model) or spreads_states(state.optimizer) or is_of_engine(state.optimizer)
    owned = {name for name, _ in model.named_parameters()} if is_owned else set()
    rest = {n: value for n, value in shared.tensors.items() if not is_part(value) and n not in owned}
    return replace(shared, tensors=rest)


def _tree_of_all(state: TrainState, random: Sequence[Any]) -> Any:
    """Return the state of the run (a nested dict) without the model and without sharded tensors.

    In the first process it includes the other processes' optimizer states. All processes call it.
    """
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
    """Gather the whole model with weights on the host in the first process. All processes call it."""
    import torch

    is_engine, is_first = is_of_engine(state.optimizer), state.ranks.is_first
    if is_engine:
        from snugfit.features.distributed.engine.optimizer import whole_weight

        whole = whole_weights(state.model, whole_weight, is_kept=is_first)
    elif spreads_states(state.optimizer):
        whole = whole_weights(state.model, is_kept=is_first)
    else:
        whole = tensors_of_all_stages(whole_weights(state.model), state.ranks)
    if not is_first:
        return None
    # An engine's gathered weights are in fp32, even if the model computes in bf16.
    dtype = torch.float32 if is_engine else None
    return ModelWeights(model=state.model, files={WEIGHTS: whole}, configs={}, state=shared, dtype=dtype)


def _gather_whole(value: Any) -> torch.Tensor:
    """Return a whole tensor, gathered from all processes if it is sharded."""
    whole: torch.Tensor = value.detach()
    return whole.full_tensor() if is_part(value) else whole  # type: ignore[attr-defined]


def whole_weights(
    model: torch.nn.Module, gather: Callable[[Any], torch.Tensor] = _gather_whole, *, is_kept: bool = True
) -> dict[str, torch.Tensor]:
    """Gather the model's `state_dict` on the host, one tensor after the other. All processes call it. The
    result is empty in a process that does not keep it.
    """
    copies: dict[int, torch.Tensor] = {}
    named = model.state_dict(keep_vars=True)
    for value in named.values():
        if id(value) not in copies:  # a tied weight is one tensor under two names
            whole = gather(value)
            copies[id(value)] = whole.to("cpu", copy=True) if is_kept else value
    return {name: copies[id(value)] for name, value in named.items()} if is_kept else {}


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in model.named_parameters():
        yield _MODEL + name, weight.detach()


def _moments(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the optimizer's states with names of the form `weight/key`."""
    names = {id(weight): name for name, weight in state.model.named_parameters()}
    for weight, values in local_optimizer(state.optimizer).state.items():
        for key, value in values.items():
            # Blocks of one row are saved in one row, so that shards of any number of processes have them.
            in_rows = key in SCALES and value.dim() == 1 and has_whole_blocks(weight.shape)
            yield f"{_OPTIMIZER}{names[id(weight)]}/{key}", as_rows(value, weight) if in_rows else value


def _without(is_kept: Callable[[Any], bool], tree: Any) -> Any:
    """Return a copy of a nested dict of state with only the values for which the function `is_kept` returns
    True.
    """
    if isinstance(tree, dict):
        return {key: _without(is_kept, value) for key, value in tree.items() if not is_kept(value)}
    return tree


def _is_of_owner(value: Any) -> bool:
    """Return True for a tensor that only one process writes into a checkpoint; False for a scalar, which is
    saved with the other state.
    """
    import torch

    return isinstance(value, torch.Tensor) and value.dim() > 0


def _on_host(part: Any, staging: Staging) -> torch.Tensor:
    """Return a copy on the host of a tensor, or of this process's local shard of a `DTensor`."""
    from torch.distributed.tensor import DTensor

    if not is_part(part):
        return staging.copy(part)
    return DTensor(staging.copy(part.to_local()), part._spec, requires_grad=False)


# ---- put back --------------------------------------------------------------------------------------------


def load_shards(state: TrainState, folder: Path) -> None:
    """Load weights and optimizer states from shards into an existing run, which may be sharded differently.

    Raises `SnugfitError` if the shards are of another model.
    """
    known = _known_shards(state.model, folder)
    _load_into({**dict(_weights(state.model)), **_room_for_moments(state, known)}, folder, state.ranks)


def load_weight_shards(model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
    """Load weights alone from shards into an existing model, which may be sharded differently.

    Raises `SnugfitError` if the shards are of another model. All processes call it.
    """
    _known_shards(model, folder)
    _load_into(dict(_weights(model)), folder, ranks)


def load_moment_shards(state: TrainState, folder: Path) -> None:
    """Load optimizer states alone from shards; the weights are loaded already.

    Raises `SnugfitError` if the shards are of another model. All processes call it.
    """
    _load_into(_room_for_moments(state, _known_shards(state.model, folder)), folder, state.ranks)


def load_states_of_engine(state: TrainState, folder: Path) -> None:
    """Load the optimizer states of any checkpoint into the partitions of DeepSpeed's engine.

    The weights are loaded already. The states come from shards, or from the optimizer's `state`, into which
    `restore` has put whole ones. All processes call it.
    """
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
        # Each process reads the files itself, so nothing is exchanged.
        _load_into({_OPTIMIZER + name: room for name, room in rooms.items()}, folder, ALONE)
        return rooms

    put_parts(state, known, read)


def _known_shards(model: torch.nn.Module, folder: Path) -> Mapping[str, Any]:
    """Return the metadata of a checkpoint's shards by name. Raises `SnugfitError` if the shards are of
    another model.
    """
    known = list_of_parts(folder / SHARDS)
    values = dict(_weights(model))
    lost = sorted(values.keys() - known.keys())
    # A stage has fewer weights than the checkpoint.
    if not lost and not is_stage(model):
        lost = sorted(name for name in known if name.startswith(_MODEL) and name not in values)
    if lost:
        name = lost[0].removeprefix(_MODEL)
        raise SnugfitError(
            f"{folder} has the weights of another model: {name} is in one of them alone. Resume with "
            "the model that wrote it, or start a new run."
        )
    return known


def _load_into(values: dict[str, torch.Tensor], folder: Path, ranks: Ranks) -> None:
    import torch

    with torch.no_grad():
        read_parts(values, folder / SHARDS, group=ranks.host, are_many=ranks.are_many)


def load_whole_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load whole weights into a sharded model: each process reads them and keeps its shards.

    Raises `SnugfitError` for another model's weights, or for names that differ from the live model's. All
    processes call it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    saved: dict[str, Any] = dict(read_weights(folder))
    beside = names_kept_beside(folder)
    if left := sorted(saved.keys() - model.state_dict().keys()):
        raise SnugfitError(
            f"{folder} has {left[0]}, which is not a weight of this model by that name. Continue that run as "
            "it began, with whole weights in each process."
        )
    # snugfit reports missing and unexpected names itself, below.
    options = StateDictOptions(full_state_dict=True, strict=False)
    missing = set(set_model_state_dict(model, saved, options=options).missing_keys) - beside
    given = {id(model.get_parameter(name)) for name in saved if name in dict(model.named_parameters())}
    # A tied weight may be saved under only one of its names.
    tied = {n for n, value in model.named_parameters(remove_duplicate=False) if id(value) in given}
    if lost := sorted(missing - tied):
        raise SnugfitError(
            f"{folder} does not have {lost[0]}, a weight of this model. Resume with the model that wrote it, "
            "or start a new run."
        )
    load_model_state(model, folder)


def _room_for_moments(state: TrainState, known: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Create an empty tensor for each saved optimizer state (such as AdamW's moments) in the optimizer, and
    return these tensors by name.
    """
    weights = dict(state.model.named_parameters())
    optimizer = local_optimizer(state.optimizer)
    elsewhere = {id(weight) for weight in updated_elsewhere(state.optimizer)}
    rooms: dict[str, torch.Tensor] = {}
    for name in known:
        if name.startswith(_OPTIMIZER):
            weight, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
            if weight not in weights or id(weights[weight]) in elsewhere:  # another process has this weight
                continue
            held = weights[weight].detach()
            states = optimizer.state[weights[weight]]
            rooms[name], states[key] = _room_for_moment(name, key, held, known[name])
    return rooms


def _room_for_moment(name: str, key: str, held: torch.Tensor, known: Any) -> tuple[Any, Any]:
    """Return an empty tensor for a saved optimizer state of the weight `held`, and the same memory as the
    optimizer has it. Raises `SnugfitError` for 8-bit states that the weight's shards cannot have.
    """
    import torch

    size, dtype = known.size, known.properties.dtype
    local = own_part(held)
    if size == held.shape:
        # For a `DTensor`, this creates a `DTensor` with the same shards.
        room = torch.zeros_like(held, dtype=dtype)
        return room, room
    if key in SCALES and is_part(held):
        if not has_whole_blocks(held.shape):
            raise SnugfitError(
                f"The checkpoint's state {name} has 8 bits, and its blocks of {BLOCK} elements cross the "
                "rows of the weight, which FSDP2 shards. Resume with zero1 or ddp."
            )
        room = as_shard(torch.zeros(len(local) * size[1], dtype=dtype, device=local.device), held)
        return room, room
    room = torch.zeros(size, dtype=dtype, device=local.device)
    return room, room.view(-1)


def keep_parts(optimizer: torch.optim.Optimizer) -> None:
    """Replace whole optimizer states by this process's shards, on the device of their weights. Nothing is
    exchanged, because each process has read the whole states.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    held: Any
    for held, values in optimizer.state.items():
        if not (is_part(held) and held.dim()):
            continue
        if not has_whole_blocks(held.shape):
            widen_states(values)
        for key, value in values.items():
            if key in SCALES or getattr(value, "shape", None) == held.shape:
                whole = as_rows(value, held) if key in SCALES else value
                part = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
                local = part.to_local().to(held.to_local().device)
                values[key] = DTensor(local, part._spec, requires_grad=False)


# ---- deepSpeed's parts ------------------------------------------------------------------------------------


READ_BYTES = 1 << 30
"""Bytes of optimizer states that the host holds at a time during reading (chosen).

This is large for one read, and small compared to a model that needs DeepSpeed's engine.
"""


def gathered_parts(state: TrainState) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Yield this process's weights and states, each gathered whole before the next, with the names of weight
    and state.

    The state's name is empty for the weight itself. All processes must iterate to the end.
    """
    from snugfit.features.distributed.engine.optimizer import whole_states, whole_weight

    optimizer: Any = state.optimizer
    # All processes compute the same owner of each weight, so owners are not exchanged.
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
    """Return the number of updates of each weight by its index in the optimizer, as in the key `step` of
    torch's AdamW.

    Each weight has a tensor of its own, because each is incremented separately.
    """
    optimizer: Any = state.optimizer
    count = optimizer.step_count()
    numbers = range(len(parameters_of(optimizer)))
    return {} if count is None else {number: {"step": count.clone()} for number in numbers}


def put_parts(
    state: TrainState,
    known: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]],
) -> None:
    """Copy optimizer states from a checkpoint's shards into DeepSpeed's flat partitions.

    `known` has the metadata of each state under `weight/state`. `read` is a function that returns some of the
    states, whole. The numbers of updates must be in the optimizer's `state` already.
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
    """Yield the metadata of saved optimizer states in groups small enough to be read at once."""
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
