"""Nested states, stored without pickle: tensors in safetensors, all other values in strict JSON.

A state has the form of `state_dict()`: dicts, lists and tuples of tensors, numbers, text and None, nested to
any depth. `pack` splits it. Each tensor goes into a flat dict under a number. The remaining tree contains
this number and the tensor's device, `cpu` or `cuda`. An optimizer's step count, for example, must stay on its
device.

`unpack` rebuilds the state, bit for bit. Python writes floats to JSON so that the same float is read back.
Values that JSON does not have (NaN, infinities, integer keys, tuples) are written with a tag. A tensor that
occurs in several places (the code book of 8-bit moments) is written once, and is shared again after loading.
If a state refers to a parameter of the run (such as a key of GrokAdamW's groups), its index is written.
numpy's numbers and arrays, and torch's dtypes, keep their types.

Nothing is pickled, so reading a state never runs code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    import torch

TENSOR, TUPLE, PAIRS, FLOAT = "tensor", "tuple", "pairs", "float"
PARAMETER, NUMPY, DTYPE = "parameter", "numpy", "dtype"
"""Tags in the JSON tree for values that JSON does not have, such as dtypes."""

SAVED_ON = "saved_on"
"""Name of a tensor's attribute: the type of the device on which `unpack` places it, in place of its own."""

ARRAY = "array"
"""Tag in place of a dtype's name: the value under `NUMPY` is an array, stored as a tensor."""


def pack(state: Any, parameters: Sequence[torch.Tensor] = ()) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the nested state in JSON form, and its tensors by the names that the JSON refers to.

    Tensors in `parameters` are named by their index there. Raises `SnugfitError` for values that no
    checkpoint can contain (an object, a function, a tensor as a key).
    """
    packer = _Packer(parameters)
    return packer.tree(state), packer.tensors


class _Packer:
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._parameters = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._names: dict[int, str] = {}
        self._seen: list[torch.Tensor] = []

    def _name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self._names:
            self._seen.append(tensor)  # kept alive, so that its id stays unique
            self._names[id(tensor)] = str(len(self.tensors))
            self.tensors[self._names[id(tensor)]] = tensor.detach()
        return self._names[id(tensor)]

    def tree(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return {TUPLE: self._each(value)}
        if isinstance(value, list):
            return self._each(value)
        # Keys in JSON are text, so pairs are stored, which preserve the type of each key.
        if isinstance(value, Mapping):
            return {PAIRS: [[self._key(key), self.tree(item)] for key, item in value.items()]}
        return self._numpy(value) if type(value).__module__ == "numpy" else _plain(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        """Return the JSON form of a tensor; a tensor subclass made of several tensors, as in torchao's
        optimizers, is refused.
        """
        if id(value) in self._parameters:
            return {PARAMETER: self._parameters[id(value)]}
        if hasattr(value, "__tensor_flatten__"):
            return _plain(value)
        return {TENSOR: self._name_of(value), "on": getattr(value, SAVED_ON, value.device.type)}

    def _key(self, key: Any) -> Any:
        """Return the JSON form of a dict's key.

        Raises `SnugfitError` for a tensor, because a tensor that is read back would be a different key.
        """
        import torch

        if isinstance(key, torch.Tensor) and id(key) not in self._parameters:
            raise SnugfitError("A state has a tensor as a key, which a checkpoint cannot contain.")
        return self.tree(key)

    def _numpy(self, value: Any) -> Any:
        import numpy
        import torch

        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
            return {NUMPY: ARRAY, "value": self.tree(torch.tensor(value))}
        if isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
            return {NUMPY: value.dtype.name, "value": _plain(value.item())}
        return _plain(value)

    def _each(self, values: Sequence[Any]) -> list[Any]:
        """Return the JSON form of each value of a list. Lists of ints take a fast path: states of random
        generators have hundreds of them, and training waits.
        """
        return list(values) if set(map(type, values)) == {int} else [self.tree(value) for value in values]


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.dtype):
        return {DTYPE: str(value).removeprefix("torch.")}
    # A bool is also an int in Python, so it is tested first.
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        # An instance of a subclass such as IntEnum becomes a plain int.
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    raise SnugfitError(
        f"A state contains a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot contain. Allowed are tensors, numbers, text, lists and dicts."
    )


def unpack(
    tree: Any,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    parameters: Sequence[torch.Tensor] = (),
) -> Any:
    """Return the nested state from the JSON tree and tensors of `pack`. Tensors that were not on the host are
    moved to `device`.

    Raises `SnugfitError` for an unknown tree, or for missing tensors or parameters.
    """
    return _Unpacker(tensors, device, parameters).value(tree)


class _Unpacker:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._tensors, self._device, self._parameters = tensors, device, parameters
        self._placed: dict[str, torch.Tensor] = {}
        self._readers: dict[str, Callable[[Any], Any]] = {
            TENSOR: self._tensor,
            FLOAT: lambda tree: float(tree[FLOAT]),
            TUPLE: lambda tree: tuple(self.value(branch) for branch in tree[TUPLE]),
            PAIRS: lambda tree: {self.value(key): self.value(branch) for key, branch in tree[PAIRS]},
            NUMPY: self._numpy,
            DTYPE: self._dtype,
            PARAMETER: self._parameter,
        }

    def _tensor(self, tree: Any) -> torch.Tensor:
        import torch

        name = tree[TENSOR]
        if name not in self._tensors:
            raise SnugfitError(f"A saved state names the tensor {name}, which is missing.")
        if name not in self._placed:
            device = torch.device("cpu") if tree["on"] == "cpu" else self._device
            self._placed[name] = self._tensors[name].to(device, copy=True)
        return self._placed[name]

    def _parameter(self, tree: Any) -> torch.Tensor:
        number: int = tree[PARAMETER]
        if number >= len(self._parameters):
            raise SnugfitError(f"A saved state names parameter {number}, which this run does not have.")
        return self._parameters[number]

    def _numpy(self, tree: Any) -> Any:
        import numpy

        value = self.value(tree["value"])
        return value.numpy() if tree[NUMPY] == ARRAY else numpy.dtype(tree[NUMPY]).type(value)

    @staticmethod
    def _dtype(tree: Any) -> Any:
        import torch

        return getattr(torch, tree[DTYPE])

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(branch) for branch in tree]
        if not isinstance(tree, dict):
            return tree
        for name, read in self._readers.items():
            if name in tree:
                return read(tree)
        raise SnugfitError(f"A saved state contains an object with the keys {', '.join(sorted(tree))}.")
