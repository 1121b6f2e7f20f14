"""Nested states as files that hold no code: tensors in safetensors, the rest in strict JSON.

A state is what `state_dict()` gives: dicts, lists and tuples of tensors, numbers, text and None, as deep as
it likes. `pack` takes it apart: each tensor goes into a flat dict under a number, and the tree that is left
names it by that number, with the device it lay on (`cpu` or `cuda`; an optimizer keeps its step count where
it was made). `unpack` puts it together again, bit for bit: JSON writes a float so that it reads back the
same, and what JSON has no word for (NaN, infinities, integer keys, tuples) is written with its name. A
tensor that is held in several places (the code book of 8-bit moments) is written once and is one tensor
again.

Nothing here is pickled, so nothing is run when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    import torch

TENSOR, TUPLE, PAIRS, FLOAT = "tensor", "tuple", "pairs", "float"
"""The names under which a tree holds what JSON has no word for."""


def pack(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree that JSON can hold, and the tensors by the names that it gives them.

    Raises `SnugfitError` for what no checkpoint of ours holds (an object, a function).
    """
    packer = _Packer()
    return packer.tree(state), packer.tensors


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._seen: list[torch.Tensor] = []

    def _name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self._names:
            self._seen.append(tensor)  # alive, so that no other tensor takes its id
            self._names[id(tensor)] = str(len(self.tensors))
            self.tensors[self._names[id(tensor)]] = tensor.detach()
        return self._names[id(tensor)]

    def tree(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return {TENSOR: self._name_of(value), "on": value.device.type}
        if isinstance(value, tuple):
            return {TUPLE: self._each(value)}
        if isinstance(value, list):
            return self._each(value)
        if isinstance(value, Mapping):
            return {PAIRS: [[self.tree(key), self.tree(item)] for key, item in value.items()]}
        return _plain(value)

    def _each(self, values: Sequence[Any]) -> list[Any]:
        """Generators' states are hundreds of numbers each, and training waits for this."""
        return list(values) if set(map(type, values)) == {int} else [self.tree(value) for value in values]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    raise SnugfitError(
        f"A state to be kept holds a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint"
        " cannot hold: tensors, numbers, text, lists and dicts are."
    )


def unpack(tree: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """The state that `pack` took apart; a tensor that did not lie on the host goes to `device`.

    Raises `SnugfitError` for a tree that `pack` did not write, or tensors that are not its own.
    """
    return _Unpacker(tensors, device).value(tree)


class _Unpacker:
    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._placed: dict[str, torch.Tensor] = {}

    def _tensor(self, name: str, on: str) -> torch.Tensor:
        import torch

        if name not in self._tensors:
            raise SnugfitError(f"A kept state names the tensor {name}, which is not there.")
        if name not in self._placed:
            device = torch.device("cpu") if on == "cpu" else self._device
            self._placed[name] = self._tensors[name].to(device, copy=True)
        return self._placed[name]

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(branch) for branch in tree]
        if not isinstance(tree, dict):
            return tree
        if TENSOR in tree:
            return self._tensor(tree[TENSOR], tree["on"])
        if FLOAT in tree:
            return float(tree[FLOAT])
        if TUPLE in tree:
            return tuple(self.value(branch) for branch in tree[TUPLE])
        if PAIRS in tree:
            return {self.value(key): self.value(branch) for key, branch in tree[PAIRS]}
        raise SnugfitError(f"A kept state holds an object with the keys {', '.join(sorted(tree))}.")
