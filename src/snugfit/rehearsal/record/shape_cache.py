"""Shapes remembered: an operator that has run on such shapes once need not work them out again.

On `meta` an operator's kernel only works out the shapes, strides and dtypes of its results, and for many
operators it does so in Python, slower than a GPU would compute the values. Layers repeat, micro-batches
repeat and steps repeat, so nearly every call has been made before with operands of the same shapes. What it
gave is remembered by operator, operands' metadata and settings, and made anew as an empty tensor. Nothing of
a policy goes into it (policies act above the shape functions), so one memory serves every rehearsal of the
process: a planner's thousand rehearsals work each shape out once.

Remembered are pure operators (whose results share no storage with an operand) and operators that only write
into their first operand and leave its shape. A view is never remembered: its storage is its operand's. Some
views deny it in their schema (`aten::_unsafe_view`), so the storages themselves are asked, not the schema.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from snugfit.rehearsal.device.shapes import OWN

_Result = tuple[torch.Size, tuple[int, ...], torch.dtype]


MOST = 200_000
"""Calls remembered at most, at about a kilobyte each; a rehearsal makes some hundreds of different ones."""


class Operator:
    """An operator, what is often asked about it, and what is remembered of it."""

    __slots__ = ("func", "is_view", "manner", "name", "own", "results")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.name: str = func._schema.name
        self.is_view: bool = func.is_view
        self.manner = _manner(func)
        self.own = OWN.get(func)
        self.results: dict[Any, Any] = {}


class ShapeMemo:
    """Runs operators on meta tensors, from memory where it can."""

    def __init__(self) -> None:
        self._operators: dict[int, Operator] = {}  # by id, which hashes faster than an operator does
        self._count = 0

    def operator(self, func: Any) -> Operator:
        """What is known of this operator."""
        known = self._operators.get(id(func))
        if known is None:
            known = self._operators[id(func)] = Operator(func)
        return known

    def run(self, known: Operator, key: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives on these meta operands, whose key this is."""
        if known.own is not None:
            return known.own(*args, **kwargs)
        manner = known.manner
        if manner == "other" or key is None:
            return known.func(*args, **kwargs)
        found = known.results.get(key)
        if found is not None:
            return _made(found) if manner == "pure" else args[0] if manner == "in place" else None
        if manner != "pure":
            return self._run_in_place(known, key, args, kwargs)
        out = known.func(*args, **kwargs)
        described = _described(out)
        if described is not None and not _shares(out, (args, tuple(kwargs.values()))):
            self._keep(known, key, described)
        return out

    def _run_in_place(self, known: Operator, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _key(args[:1])
        out = known.func(*args, **kwargs)
        if (out is None or out is args[0]) and _key(args[:1]) == before:
            self._keep(known, key, True)
        return out

    def _keep(self, known: Operator, key: int, result: Any) -> None:
        if self._count >= MOST:
            self._count = 0
            for operator in self._operators.values():
                operator.results.clear()
        known.results[key] = result
        self._count += 1


REMEMBERED = ShapeMemo()
"""What every rehearsal of this process remembers."""


_META = torch.device("meta")


class _NotAKey(Exception):
    """An operand that no result may be remembered by."""


def _manner(func: Any) -> str:
    """`pure`, `in place` (returns its first operand), `of a list` (writes into each tensor of it and returns
    nothing, as foreach optimizers do) or `other`, from the operator's schema."""
    schema = func._schema
    written = [argument.alias_info is not None for argument in schema.arguments]
    returned = [result.alias_info is not None for result in schema.returns]
    only_first = written[:1] == [True] and not any(written[1:])
    if func.is_view or not (returned or only_first):
        return "other"
    if not any(written) and not any(returned):
        return "pure"
    if only_first and not returned:
        return "of a list"
    if only_first and returned == [True] and str(schema.returns[0].type) == "Tensor":
        return "in place"
    return "other"


_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of most arguments that are no tensors."""


_NUMBERS = itertools.count()
_NUMBERED: dict[Any, int] = {}
"""The number of each key that was met: what is remembered of a call is found by it in no time."""


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """A number that stands for all of a call's operands that its results' shapes can depend on: metadata of
    tensors on `meta`, and whatever else is given. None where there are others."""
    try:
        # Without a dtype, some results take the default one, which models are built under.
        key = _key(args), _key(kwargs.items()) if kwargs else (), torch.get_default_dtype()
    except _NotAKey:
        return None
    number = _NUMBERED.get(key)
    if number is None:
        if len(_NUMBERED) >= MOST:
            _NUMBERED.clear()  # a number is never given twice
        number = _NUMBERED[key] = next(_NUMBERS)
    return number


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            found.append((kind, value))
        elif isinstance(value, torch.Tensor):
            if not value.is_meta:
                raise _NotAKey
            found.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif isinstance(value, (tuple, list)):
            found.append(_key(value))
        elif isinstance(value, torch.Generator):
            raise _NotAKey
        else:
            found.append((kind, value))
    return tuple(found)


def _described(out: Any) -> Any:
    """What makes the same again; None where nothing does. A result that is not there (the gradient of what is
    frozen) is described by nothing."""
    if out is None:
        return ()
    if isinstance(out, torch.Tensor):
        result = (out.shape, out.stride(), out.dtype)
        if out.device.type != "meta" or out.storage_offset() or type(out) is not torch.Tensor:
            return None
        whole = torch.empty_strided(*result[:2], dtype=out.dtype, device="meta")
        same = whole.untyped_storage().nbytes() == out.untyped_storage().nbytes()
        return result if same else None
    if isinstance(out, (tuple, list)):
        items = [_described(item) for item in out]
        return None if any(item is None for item in items) else (type(out), items)
    return None


def _shares(out: Any, operands: Any) -> bool:
    """Whether a result lies in an operand's storage, or in another result's."""
    results = list(_storages(out))
    return len(set(results)) < len(results) or not set(results).isdisjoint(_storages(operands))


def _storages(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()._cdata
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _storages(item)


def _made(described: Any) -> Any:
    if not described:
        return None
    if isinstance(described[0], torch.Size):
        shape, stride, dtype = described
        return torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    kind, items = described
    return kind(_made(item) for item in items)
