"""The part of a model's state that a resumed run needs, and that the files of transformers and peft omit.

- `model_state.json`: the file and name of each tensor in adapters' files and in `model_state.safetensors`.
  It also has checksums of frozen tensors that are not saved, extra state of modules, and their plain
  attributes.
- `model_state.safetensors`: tensors that are in no other file. These are buffers that are in no `state_dict`.
  From adapted models come also trainable or changed tensors that are not in peft's files.

Frozen weights of a model with adapters are not saved, because a resumed run builds them again. Their
checksums prove that they are the same. A frozen tensor that has changed during the run is saved, such as a
weight with merged adapters, or a running mean.

The set of trainable parameters may change during a run. A step may also depend on plain attributes of
modules, which no `state_dict` has. For example, a rotary embedding that grows with its sequences stores its
size as a number. Numbers are saved if they differ from their value at the start of the run. Tensors in
attributes are always saved. Exceptions are parameters and buffers with a second name, and tensors with an
autograd graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint import adapters
from snugfit.training.checkpoint.adapters import address_of
from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.checkpoint.parts import state_parts

if TYPE_CHECKING:
    import torch

MODEL_STATE, MODEL_TENSORS = "model_state.json", "model_state.safetensors"

_WEIGHT, _EXTRA = "weight.", "extra."
"""Prefixes of tensor names in the file: for parameters and buffers, and for extra state of modules."""


@dataclass(frozen=True, kw_only=True)
class ModelBeginning:
    """Properties of a model at the start of its run, which are compared with its later state to
    find changes.
    """

    frozen: Mapping[str, int]
    """Checksums of frozen tensors by name; empty for models without adapters."""

    numbers: Numbers
    """Values of numeric attributes of the model's modules."""


# With weak keys, the record does not keep the model alive.
_BEGINNINGS: WeakKeyDictionary[torch.nn.Module, ModelBeginning] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """The part of a model's state that the files of transformers and peft omit, for a checkpoint."""

    tensors: Mapping[str, torch.Tensor]
    """Saved parameters and buffers by name."""

    transient: Sequence[str]
    """Names of the saved buffers that a `state_dict` omits."""

    frozen: Mapping[str, int]
    """Checksums of the frozen tensors that are not saved, by name."""

    active: Sequence[str]
    """Names of the adapters that the forward pass uses."""

    extra: Any
    """Extra state of modules and adapters as JSON values, without its tensors."""

    extra_tensors: Mapping[str, torch.Tensor]
    """Tensors of the extra state, by the names with which `extra` refers to them."""

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the model's state that are saved."""
        yield from self.tensors.values()
        yield from self.extra_tensors.values()

    def with_copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> ModelState:
        """Return a copy of the state in which `copy` was applied to each tensor."""
        return replace(
            self,
            tensors={name: copy(value) for name, value in self.tensors.items()},
            extra_tensors={name: copy(value) for name, value in self.extra_tensors.items()},
        )

    def write(self, folder: Path, written: Mapping[int, tuple[str, str] | None]) -> None:
        """Write the model's tensors that no other file of the checkpoint has, and its remaining state.

        `written` has the name and file of each tensor that another file has, by the tensor's `id`. None means
        that the other file is loaded as a whole.
        """
        from safetensors.torch import save_file

        places, rest, kept_in = dict(written), {}, {}
        for name, value in self.tensors.items():
            if id(value) not in places:
                rest[_WEIGHT + name] = value
                places[id(value)] = (MODEL_TENSORS, _WEIGHT + name)
            if location := places[id(value)]:
                kept_in[name] = location
        # A plain model has no state besides its weight files, so no further file is written.
        if not kept_in and not self.frozen and not self.extra:
            return
        tensors = {**rest, **{_EXTRA + name: value for name, value in self.extra_tensors.items()}}
        save_file(tensors, folder / MODEL_TENSORS)
        document = {
            "kept_in": kept_in,
            "transient": self.transient,
            "frozen": dict(self.frozen),
            "active": self.active,
            "extra": self.extra,
        }
        (folder / MODEL_STATE).write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")


def model_state_of(
    model: torch.nn.Module, persistent: set[str], among: Sequence[torch.Tensor] | None = None
) -> ModelState:
    """Return the part of a model's state that other files omit; `persistent` are the names in its
    `state_dict`.

    With `among`, frozen tensors are included only under one of three conditions. They share their memory with
    a tensor of `among`, belong to an adapter, or have changed since the run began. Raises `SnugfitError` for
    extra state that no checkpoint can contain.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    frozen: dict[str, int] = {}
    if among is not None:
        # Tied weights have several names for the same address.
        addresses = {adapters.address_of(tensor) for tensor in among}
        left_out = {
            name: value
            for name, value in _frozen_tensors(model, persistent).items()
            if adapters.address_of(value) not in addresses and not adapters.is_of_adapter(model, name)
        }
        before, now = beginning_of(model).frozen, _checksums(left_out)
        # A frozen tensor that is unchanged since the start need not be saved: a resumed run builds it again.
        frozen = {name: now[name] for name in left_out if now[name] == before.get(name)}
        tensors = {name: value for name, value in tensors.items() if name not in frozen}
    extra, extra_tensors = _extra_state(model)
    return ModelState(
        tensors={name: value.detach() for name, value in tensors.items()},
        transient=[name for name, _ in model.named_buffers() if name not in persistent],
        frozen=frozen,
        active=adapters.active_adapters(model) if among is not None else [],
        extra=extra,
        extra_tensors=extra_tensors,
    )


def _extra_state(model: torch.nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    from torch import nn

    states = {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    allocators = adapters.allocator_states(model)
    attributes = attributes_to_keep(model, beginning_of(model).numbers)
    if not states and not allocators and not attributes:
        return None, {}
    try:
        # `pack` raises an error for values that neither JSON nor safetensors can contain.
        return pack({"modules": states, "allocators": allocators, "attributes": attributes})
    except SnugfitError as fault:
        raise SnugfitError(f"get_extra_state of {', '.join(states)}: {fault}") from None


def _frozen_tensors(model: torch.nn.Module, persistent: set[str]) -> dict[str, torch.Tensor]:
    """Return the weights that do not train, and the buffers of the `state_dict`."""
    weights = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def beginning_of(model: torch.nn.Module) -> ModelBeginning:
    """Return a model's properties as recorded at the first call: before its weights are loaded, or before its
    first step.
    """
    if model not in _BEGINNINGS:
        # Only checkpoints of models with adapters omit frozen weights.
        frozen = _frozen_tensors(model, set(model.state_dict())) if adapters.is_adapted(model) else {}
        _BEGINNINGS[model] = ModelBeginning(frozen=_checksums(frozen), numbers=numbers_of(model))
    return _BEGINNINGS[model]


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's bits as integers, reduced on its device with one synchronization for
    all.
    """
    import torch

    sums = [_sum_of_bits(tensor.detach()) for tensor in tensors.values()]
    on_one_device = [value.to(sums[0].device) for value in sums]
    return dict(zip(tensors, torch.stack(on_one_device).tolist() if sums else [], strict=True))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, a scalar of int64; 0 if the bits cannot be read, as with some
    quantized tensors.
    """
    import torch

    try:
        flat = tensor.contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        # Viewing bytes as integers needs an aligned address and a whole number of elements.
        is_aligned = flat.nbytes % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0
        bits = flat.view(torch.int32 if is_aligned else torch.uint8)
        return bits.sum(dtype=torch.int64) if not tensor.is_meta else torch.zeros((), dtype=torch.int64)
    except (RuntimeError, NotImplementedError, TypeError):
        return torch.zeros((), dtype=torch.int64)


# ---- put back --------------------------------------------------------------------------------------------


def has_model_state(folder: Path) -> bool:
    """Return True if a checkpoint has a model state; older ones do not."""
    return (folder / MODEL_STATE).is_file()


def names_kept_beside(folder: Path) -> set[str]:
    """Return the names of a model's tensors that a checkpoint stores outside of `model.safetensors` and
    peft's files.
    """
    return set(_read(folder)["kept_in"]) if has_model_state(folder) else set()


def _read(folder: Path) -> Any:
    return json.loads((folder / MODEL_STATE).read_text(encoding="utf-8"))


def load_model_state(model: torch.nn.Module, folder: Path) -> None:
    """Load the files of `ModelState.write` into an existing model, if the folder has them.

    Raises `SnugfitError`, before any change, if adapters or frozen weights differ.
    """
    from safetensors.torch import load_file

    # Checksums must be those of the model before loading.
    beginning_of(model)
    if not has_model_state(folder):
        return
    document = _read(folder)
    # Each file is read once, even if it contains many of the tensors.
    files = {file: load_file(folder / file) for file in {file for file, _ in document["kept_in"].values()}}
    values = {name: files[file][key] for name, (file, key) in document["kept_in"].items()}
    if document["frozen"] or adapters.is_adapted(model):
        _refuse_another_base(model, folder, values, document)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        if name in own:
            _put(model, own[name], name, value)
        elif state_parts().lacks_layers(model):
            continue  # another pipeline stage has it
        elif name in document["transient"]:
            _make_buffer(model, name, value)
        else:
            raise KeyError(f"{name} was saved, but this model does not have it")
    if document["extra"] is not None:
        beside = load_file(folder / MODEL_TENSORS)
        tensors = {name.removeprefix(_EXTRA): value for name, value in beside.items()}
        device = next(model.parameters()).device
        extra = unpack(document["extra"], tensors, device)
        for name, state in extra["modules"].items():
            model.get_submodule(name).set_extra_state(state)
        adapters.restore_allocators(model, extra["allocators"])
        restore_attributes(model, extra.get("attributes", {}))


def _put(model: torch.nn.Module, target: torch.Tensor, name: str, value: torch.Tensor) -> None:
    """Copy a saved value into the model's parameter or buffer of this name. A buffer of another size is
    replaced by a new one.
    """
    import torch

    if target.shape == value.shape:
        # The tensor is overwritten in place, because optimizers and tied weights refer to it.
        with torch.no_grad():
            target.copy_(value)
        return
    if isinstance(target, torch.nn.Parameter):
        raise ValueError(f"{name} has the shape {tuple(target.shape)}, {tuple(value.shape)} was saved")
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value.to(target.device))


def _make_buffer(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Register a saved buffer that a forward pass created, for the next forward pass.

    The buffer is ignored if the model's class, in another version of its library, lacks the module.
    """
    path, _, leaf = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None:
        return
    placed = value.to(next(model.parameters()).device)
    # A buffer that was None in the constructor is registered already.
    if leaf in module._buffers:
        setattr(module, leaf, placed)
    elif not hasattr(module, leaf):
        module.register_buffer(leaf, placed, persistent=False)


def _refuse_another_base(
    model: torch.nn.Module, folder: Path, values: Mapping[str, torch.Tensor], document: Mapping[str, Any]
) -> None:
    """Raise `SnugfitError` if the model's adapters or frozen weights differ from those of the checkpoint."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    due = (*values, *document["frozen"])
    lost = [name for name, weight in model.named_parameters() if weight.requires_grad and name not in values]
    unknown = [name for name in due if name not in own and name not in document["transient"]]
    before, active = beginning_of(model).frozen, adapters.active_adapters(model)
    # A weight whose checksum the present run does not have is not compared.
    changed = [name for name, bits in document["frozen"].items() if before.get(name, bits) != bits]
    faults = {
        f"it does not contain {_first(lost)}, which train in this run": lost,
        f"it contains {_first(unknown)}, which this model does not have": unknown,
        f"its run started with other frozen weights: {_first(changed)}": changed,
        f"the active adapters were {document['active']} and are {active}": active != document["active"],
    }
    if wrong := [text for text, applies in faults.items() if applies]:
        raise SnugfitError(
            f"{folder} has the weights of another model: {'; '.join(wrong)}. Resume with the model that "
            "wrote it, or start a new run."
        )


def _first(names: Sequence[str]) -> str:
    return "".join(names[:1]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


# ---- plain attributes of modules --------------------------------------------------------------------------


Numbers = Mapping[tuple[str, str], Any]
"""Numeric attributes of modules, by the names of module and attribute."""

_SWITCHES = frozenset({"training", "gradient_checkpointing"})
"""Attributes of modules that training loops set themselves, so that checkpoints omit them."""

_MARKS = ("_is_", "_hf_", "ds_", "applied_pre_backward_", "_output_capturing_")
"""Prefixes of attributes with which accelerate, transformers and DeepSpeed mark a model. Checkpoints omit
them.

A restored `_is_accelerate_prepared` in another process would keep accelerate from wrapping the model in
autocast. A restored `_output_capturing_hooks_installed` would keep transformers from its hooks on layers.
"""


def _is_memory(name: str) -> bool:
    """Return True if a module's attribute of this name may be state that a step changes, so that a checkpoint
    must contain it.
    """
    return name not in _SWITCHES and not name.startswith(_MARKS)


def numbers_of(model: torch.nn.Module) -> Numbers:
    """Return all numbers and flags in the attributes of a model's modules, by module and attribute."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # Exact types, because a subclass such as an enum would be restored as a plain number.
        if type(value) in (bool, int, float) and _is_memory(name)
    }


def attributes_to_keep(model: torch.nn.Module, before: Numbers) -> dict[str, dict[str, Any]]:
    """Return module attributes to save: the numbers that differ from `before`, and tensors, by module and
    attribute.
    """
    attributes: dict[str, dict[str, Any]] = {}
    for (path, name), value in numbers_of(model).items():
        if (path, name) not in before or before[path, name] != value:
            attributes.setdefault(path, {})[name] = value
    for path, name, tensor in _plain_tensors(model):
        attributes.setdefault(path, {})[name] = tensor
    return attributes


def _plain_tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    import torch

    # A parameter with a second name would be restored twice.
    addresses = {address_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # A tensor with an autograd graph is a cached result of the last forward pass, not state.
            is_left_out = type(value) is not torch.Tensor or not value.is_leaf or value.is_meta
            if not is_left_out and value.layout == torch.strided and value.data_ptr() not in addresses:
                yield path, name, value


def restore_attributes(model: torch.nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set module attributes to their saved values, as `attributes_to_keep` returned them.

    A module that another version of its library lacks is ignored, because nothing in the model reads its
    attributes.
    """
    import torch

    modules = dict(model.named_modules())
    for path, values in attributes.items():
        for name, value in values.items():
            if path not in modules or not _is_memory(name):
                continue
            own = vars(modules[path]).get(name)
            # A tensor of the same shape is overwritten in place, because other modules may refer to it.
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    own.copy_(value)
            else:
                setattr(modules[path], name, value)


def frozen_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that do not train."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def set_frozen(model: torch.nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters of these names, and unfreeze all others."""
    frozen = frozenset(names)
    for name, weight in model.named_parameters():
        if weight.requires_grad == (name in frozen):
            weight.requires_grad_(name not in frozen)
