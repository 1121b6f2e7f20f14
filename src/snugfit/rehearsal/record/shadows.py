"""Shadow values: what tensors on `meta` hold, where that follows from the batch.

The batch is ours, so what a step decides by it is known: lengths, masks, positions, labels, grids of patches.
A shadow is the contents of a storage, so that views of one storage share it and what is written through one
is seen through all. It is a computation and not yet a value: an operator whose operands all have shadows
notes itself and them, and runs on the CPU when somebody asks (`questions.py`). A mask that nobody asks about
costs nothing but the note. No tensor on `meta` is kept alive for it: what is freed is what is recorded.

What depends on weights has no shadow, but for whole numbers and truths: theirs is assumed (`assumed.py`), and
whatever is computed of it remembers that. Weights themselves are forgotten when the model is built, though
the first step might know them: every later one would not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from snugfit.rehearsal.record.assumed import Assumed, Assumption, assume
from snugfit.rehearsal.record.effects import EMPTIES, FILLED, OVERWRITES, Effect, finite_check
from snugfit.step.batches import REAL_VALUES
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.rehearsal.record.shape_cache import Operator

LARGEST = 512 * MIB
"""Bytes of the largest shadow; what is larger is not followed."""

COPIED = MIB
"""Bytes up to which what the host gives is copied at once; a larger tensor is read when it is asked for."""

DEEPEST = 64
"""Computations on one another that wait to be asked; a longer chain is run as far as it goes."""

_CPU = torch.device("cpu")


class NotFollowed(Exception):
    """A value of which there is no shadow."""


class Shadow:
    """The contents of a storage, made when they are asked for."""

    __slots__ = ("_contents", "_make", "assumption", "depth")

    def __init__(
        self,
        make: Callable[[], torch.UntypedStorage],
        assumption: Assumption | None = None,
        depth: int = 0,
    ) -> None:
        self._make: Callable[[], torch.UntypedStorage] | None = make
        self._contents: torch.UntypedStorage | None = None
        self.assumption, self.depth = assumption, depth + 1
        if depth >= DEEPEST:
            self.contents()
            self.depth = 1

    def contents(self) -> torch.UntypedStorage:
        """The bytes, on the CPU. Raises `NotFollowed` where the computation is one that the CPU refuses."""
        if self._contents is None:
            if self._make is None:
                raise NotFollowed
            make, self._make = self._make, None
            try:
                self._contents = make()
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as refused:
                raise NotFollowed from refused
        return self._contents


class View(NamedTuple):
    """A tensor on `meta` that has a shadow: where it lies in its storage."""

    shadow: Shadow
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, shadow: Shadow, tensor: torch.Tensor) -> View:
        """As this tensor lies."""
        return cls(shadow, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def tensor(self) -> torch.Tensor:
        """The value, on the CPU; not to be written into. Raises `NotFollowed`."""
        return self.within(self.shadow.contents())

    def within(self, contents: torch.UntypedStorage) -> torch.Tensor:
        """As it lies in other contents."""
        empty = torch.empty(0, dtype=self.dtype, device=_CPU)
        return empty.set_(contents, self.offset, self.shape, self.stride)


class _Host(NamedTuple):
    """A tensor of the host's, as it is when it is noted."""

    value: torch.Tensor
    version: int
    real: Callable[[], torch.Tensor] | None = None
    """Makes the real one, of which the tensor is a stand-in (`step/batches.py`)."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Host:
        value, real = tensor.detach(), getattr(tensor, REAL_VALUES, None)
        if real is None and tensor.numel() * tensor.element_size() <= COPIED:
            value = value.clone()
        return cls(value, value._version, real)

    def tensor(self) -> torch.Tensor:
        """The value. Raises `NotFollowed` where it was written into meanwhile."""
        if self.value._version != self.version:
            raise NotFollowed
        return self.value if self.real is None else self.real()


class _DeferredRun:
    """An operator that waits to be run on shadows: all its results come of one run."""

    __slots__ = ("_arguments", "_func", "_results")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func, self._arguments = func, (args, kwargs)
        self._results: list[torch.Tensor] = []

    def result(self, number: int) -> torch.Tensor:
        """One of its results, of those that are tensors."""
        if not self._results:
            args, kwargs = _values(self._arguments)
            self._results = list(tensors_in(self._func(*args, **kwargs)))
            self._arguments = ((), {})
        return self._results[number]


class Shadows:
    """The shadows of one rehearsal, by the address of the storage that each belongs to."""

    def __init__(self, routing: str = "balanced") -> None:
        self.routing = routing
        self._by_address: dict[int, Shadow] = {}
        self.unsure: dict[int, Any] = {}
        """Storages of the host's that hold numbers which were assumed, by address; a reference to each."""

    def of(self, tensor: torch.Tensor) -> View | None:
        """The shadow of a tensor on `meta`; None where its value is not known."""
        shadow = self._by_address.get(tensor.untyped_storage()._cdata)
        return View.of(shadow, tensor) if shadow is not None else None

    def forget(self, address: int) -> None:
        """The storage at this address is gone, or holds what nobody knows."""
        self._by_address.pop(address, None)

    def set(self, tensor: torch.Tensor, value: torch.Tensor, assumption: Assumption | None = None) -> None:
        """A tensor on `meta` holds this value."""
        nbytes, view = tensor.untyped_storage().nbytes(), _Geometry.of(tensor)
        self._put(tensor, Shadow(lambda: view.contents(value, nbytes), assumption))

    def hold(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """The same for a tensor that no operator made, as long as it lives."""
        self.set(tensor, value)
        address = tensor.untyped_storage()._cdata
        weakref.finalize(tensor.untyped_storage(), self.forget, address).atexit = False

    def follow(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator has run on `meta`: its results get shadows, or what it wrote into changes its own."""
        effect = operator.effect
        if effect is Effect.COMPUTES:
            if not self._is_plainly_unknown(args, out):
                self._compute(operator.func, args, kwargs, out)
        elif effect is Effect.FILLS:
            if operator.func not in EMPTIES or not out.is_floating_point():
                self._fill(out, FILLED[operator.func](args))
        elif effect is Effect.WRITES:
            self._write(operator.func, args, kwargs)
        elif effect is Effect.DRAWS:
            self._assume(operator.func, args, out)
        elif effect is Effect.WRITES_MANY:
            self._forget_all(args)
            self._forget_all(tuple(kwargs.values()))

    def set_unsure(self, tensor: torch.Tensor) -> None:
        """A tensor of the host's holds numbers that were assumed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self.unsure[address] = weakref.ref(storage, lambda gone: self.unsure.pop(address, None))

    def is_unsure(self, operands: Any) -> bool:
        """Whether a tensor of the host's among these holds numbers that were assumed."""
        return bool(self.unsure) and any(
            not one.is_meta and one.untyped_storage()._cdata in self.unsure for one in tensors_in(operands)
        )

    def _forget_all(self, operands: Sequence[Any]) -> None:
        known = self._by_address
        for operand in operands:
            if isinstance(operand, torch.Tensor):
                known.pop(operand.untyped_storage()._cdata, None)
            elif isinstance(operand, (tuple, list)) and operand and isinstance(operand[0], torch.Tensor):
                self._forget_all(operand)

    def _is_plainly_unknown(self, args: tuple[Any, ...], out: Any) -> bool:
        """Whether an operator gives floats of a first operand without a shadow, as most of them do."""
        first = args[0] if args else None
        return (
            isinstance(out, torch.Tensor)
            and out.is_floating_point()
            and isinstance(first, torch.Tensor)
            and first.is_meta
            and first.untyped_storage()._cdata not in self._by_address
        )

    # ---- new tensors -------------------------------------------------------------------------------------

    def _fill(self, out: torch.Tensor, number: Any) -> None:
        """Also of zeros that will be optimizer states: the note is small, and gone when they are written."""
        shape, dtype, nbytes = tuple(out.shape), out.dtype, out.untyped_storage().nbytes()
        if nbytes > LARGEST or isinstance(number, complex):
            return
        view = _Geometry.of(out)
        self._put(
            out,
            Shadow(lambda: view.contents(torch.full(shape, number, dtype=dtype, device=_CPU), nbytes)),
        )

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        try:
            noted = self._note((args, kwargs))
        except NotFollowed:
            self._assume(func, args, out)
            return
        results = list(tensors_in(out))
        if not results:
            return
        assumption, depth = _rests_on(noted)
        call = _DeferredRun(func, *noted)
        for number, tensor in enumerate(results):
            nbytes, view = tensor.untyped_storage().nbytes(), _Geometry.of(tensor)
            if nbytes > LARGEST or tensor.untyped_storage()._cdata in self._by_address:
                continue
            self._put(tensor, _result_shadow(call, number, view, nbytes, assumption, depth))

    def _assume(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Of results whose operands are not known: whole numbers and truths."""
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return
        for number, tensor in enumerate(tensors_in(out)):
            if tensor.is_floating_point() or tensor.is_complex():
                continue
            nbytes, view = tensor.untyped_storage().nbytes(), _Geometry.of(tensor)
            if nbytes > LARGEST or tensor.untyped_storage()._cdata in self._by_address:
                continue
            finite = finite_check(func, args)
            if finite is not None:
                self._fill(tensor, finite)
                continue
            taken = assume(func, args, number, tensor, self.routing)
            self._put(tensor, _assumed_shadow(taken, view, nbytes))

    # ---- writing -----------------------------------------------------------------------------------------

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[0]
        if not target.is_meta:
            return
        storage = target.untyped_storage()
        address = storage._cdata
        before = self._by_address.get(address)
        whole = func in OVERWRITES and _covers(target, storage.nbytes())
        if (before is None and not whole) or storage.nbytes() > LARGEST:
            self._by_address.pop(address, None)
            return
        try:
            noted = self._note((args[1:], kwargs))
        except NotFollowed:
            self._by_address.pop(address, None)
            return
        assumption, depth = _rests_on(noted)
        if before is not None and not whole:
            assumption, depth = before.assumption or assumption, max(depth, before.depth)
        nbytes = storage.nbytes()
        view = View.of(before or _NOTHING, target)

        def write() -> torch.UntypedStorage:
            contents = torch.UntypedStorage(nbytes) if whole else view.shadow.contents().clone()
            operands, keywords = _values(noted)
            func(view.within(contents), *operands, **keywords)
            return contents

        self._put(target, Shadow(write, assumption, depth))

    def _put(self, tensor: torch.Tensor, shadow: Shadow) -> None:
        self._by_address[tensor.untyped_storage()._cdata] = shadow

    def _note(self, operands: Any) -> Any:
        """Operands with shadows in the place of tensors. Raises `NotFollowed` where one has none."""
        if isinstance(operands, torch.Tensor):
            if not operands.is_meta:
                if self.is_unsure(operands):
                    raise NotFollowed
                return _Host.of(operands)
            shadow = self._by_address.get(operands.untyped_storage()._cdata)
            if shadow is None or operands.is_complex():
                raise NotFollowed
            return View.of(shadow, operands)
        if isinstance(operands, (tuple, list)):
            return type(operands)([self._note(one) for one in operands])
        if isinstance(operands, dict):
            return {name: self._note(one) for name, one in operands.items()}
        return _CPU if isinstance(operands, torch.device) else operands


class _Geometry(NamedTuple):
    """How a new tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def contents(self, value: torch.Tensor, nbytes: int) -> torch.UntypedStorage:
        """A storage of so many bytes that holds this value. Raises `NotFollowed` for another shape."""
        if tuple(value.shape) != self.shape:
            raise NotFollowed
        contents = torch.UntypedStorage(nbytes)
        empty = torch.empty(0, dtype=self.dtype, device=_CPU)
        empty.set_(contents, self.offset, self.shape, self.stride).copy_(value)
        return contents


_NOTHING = Shadow(lambda: torch.UntypedStorage(0))


def _result_shadow(
    call: _DeferredRun, number: int, view: _Geometry, nbytes: int, assumption: Assumption | None, depth: int
) -> Shadow:
    return Shadow(lambda: view.contents(call.result(number), nbytes), assumption, depth)


def _assumed_shadow(taken: Assumed, view: _Geometry, nbytes: int) -> Shadow:
    return Shadow(lambda: view.contents(taken.make(), nbytes), taken.assumption)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's operands or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def _values(noted: Any) -> Any:
    """Noted operands as tensors on the CPU. Raises `NotFollowed`."""
    if isinstance(noted, (View, _Host)):
        return noted.tensor()
    if isinstance(noted, (tuple, list)):
        return type(noted)([_values(one) for one in noted])
    if isinstance(noted, dict):
        return {name: _values(one) for name, one in noted.items()}
    return noted


def _views(noted: Any) -> Iterator[View]:
    if isinstance(noted, View):
        yield noted
    elif isinstance(noted, (tuple, list)):
        for one in noted:
            yield from _views(one)
    elif isinstance(noted, dict):
        yield from _views(list(noted.values()))


def _rests_on(noted: Any) -> tuple[Assumption | None, int]:
    """The first assumption that operands rest on, and the longest chain behind them."""
    views = list(_views(noted))
    assumption = next((view.shadow.assumption for view in views if view.shadow.assumption), None)
    return assumption, max((view.shadow.depth for view in views), default=0)


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == nbytes and tensor.storage_offset() == 0
