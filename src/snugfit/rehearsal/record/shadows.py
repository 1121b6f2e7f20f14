"""Shadows: the values of tensors on `meta` that follow from the batch, tracked on the CPU.

The batch is synthetic, so values computed from it are known, such as lengths, masks, positions, labels and
grids of patches. A shadow represents the contents of a storage. So all views of the storage share it, and a
write through one view is visible through all. A shadow is a deferred computation: if all operands of an
operator have shadows, the call is stored. It runs on the CPU at the first read (`questions.py`).

Values that depend on weights have no shadow, except integers and booleans. These are assumed (`assumed.py`),
and values computed from them keep a reference to the assumption.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from snugfit.rehearsal.record.assumed import Assumption, assume
from snugfit.rehearsal.record.effects import FILLED, OVERWRITES, UNINITIALIZED, Effect, finite_check
from snugfit.rehearsal.record.shadow import (
    DeferredRun,
    Geometry,
    HostValue,
    NotFollowed,
    Shadow,
    View,
    assumption_of,
    tensors_in,
    values_of,
)
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.rehearsal.record.shape_cache import Operator

LARGEST = 512 * MIB
"""Size in bytes of the largest tensor whose values are tracked (by a copy called shadow)."""


_CPU = torch.device("cpu")


class _ByStorage:
    """Tracked values (shadows) by storage, each dropped when its storage is freed.

    Addresses are reused, so an address alone could assign the value of a freed tensor to a new one.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[weakref.ref[Any], Shadow]] = {}

    def of(self, storage: Any) -> Shadow | None:
        """Return the tracked values of this storage, or None if they are unknown."""
        known = self._by_address.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else None

    def put(self, storage: Any, shadow: Shadow) -> None:
        """Set the tracked values of this storage."""
        address, known = storage._cdata, self._by_address

        def forget(reference: Any) -> None:
            # The address may belong to a newer storage, whose shadow stays.
            if address in known and known[address][0] is reference:
                del known[address]

        # A weak reference: a shadow that kept a storage alive would delay the recorded free.
        known[address] = weakref.ref(storage, forget), shadow

    def remove(self, storage: Any) -> None:
        """Remove the tracked values of this storage."""
        self._by_address.pop(storage._cdata, None)


class Shadows:
    """The values that one simulation tracks on the CPU for `meta` tensors (shadows), by storage."""

    def __init__(self, routing: str = "balanced") -> None:
        self.routing = routing
        self._known = _ByStorage()
        self.assumed_numbers: set[float] = set()
        """Assumed numbers that the model's code has received (`assumed_float.py`)."""
        self.unsure: dict[int, Any] = {}
        """Host storages that contain assumed numbers, by address, each with a weak reference."""

    def of(self, tensor: torch.Tensor) -> View | None:
        """Return the tracked values of a tensor on `meta`, or None if they are unknown."""
        shadow = self._known.of(tensor.untyped_storage())
        return View(shadow, Geometry.of(tensor)) if shadow is not None else None

    def mark_unknown(self, tensor: torch.Tensor) -> None:
        """Mark the tracked value of a tensor on `meta` as unknown."""
        self._known.remove(tensor.untyped_storage())

    def set(self, tensor: torch.Tensor, value: torch.Tensor, assumption: Assumption | None = None) -> None:
        """Set the tracked value of a tensor on `meta`."""
        self._put(tensor, Geometry.of(tensor).shadow(lambda: value, assumption))

    def follow(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Update the tracked values of an operator's results, and of the tensors that it writes."""
        effect = operator.effect
        if effect is Effect.COMPUTES:
            if not self._is_plainly_unknown(args, out):
                self._compute(operator.func, args, kwargs, out)
        elif effect is Effect.FILLS:
            if operator.func not in UNINITIALIZED or not out.is_floating_point():
                self._fill(out, FILLED[operator.func](args))
        elif effect is Effect.WRITES:
            self._write(operator.func, args, kwargs)
        elif effect is Effect.DRAWS:
            self._assume(operator.func, args, out)
        elif effect is Effect.WRITES_MANY:
            # Operators that write several tensors are too rare to follow each tensor.
            self._mark_all_unknown(args)
            self._mark_all_unknown(tuple(kwargs.values()))

    def set_unsure(self, tensor: torch.Tensor) -> None:
        """Mark the numbers of a host tensor as assumed by the simulation, not known."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self.unsure[address] = weakref.ref(storage, lambda gone: self.unsure.pop(address, None))

    def is_unsure(self, operands: Any) -> bool:
        """Return True if a number or a host tensor among these has assumed values."""
        # In the usual case, no operand needs a search.
        if not self.unsure and not self.assumed_numbers:
            return False
        unsure, assumed = self.unsure, self.assumed_numbers
        return any(
            not tensor.is_meta and tensor.untyped_storage()._cdata in unsure
            for tensor in tensors_in(operands)
        ) or (
            type(operands) is tuple
            and any(type(operand) is float and operand in assumed for operand in operands)
        )

    def _mark_all_unknown(self, operands: Sequence[Any]) -> None:
        for operand in operands:
            if isinstance(operand, torch.Tensor):
                self._known.remove(operand.untyped_storage())
            elif isinstance(operand, (tuple, list)) and operand and isinstance(operand[0], torch.Tensor):
                self._mark_all_unknown(operand)

    def _is_plainly_unknown(self, args: tuple[Any, ...], out: Any) -> bool:
        """Return True if the result is a float tensor without tracked values because the first operand has
        none.
        """
        first = args[0] if args else None
        return (
            isinstance(out, torch.Tensor)
            and out.is_floating_point()
            and isinstance(first, torch.Tensor)
            and first.is_meta
            and self._known.of(first.untyped_storage()) is None
        )

    # ---- new tensors -------------------------------------------------------------------------------------

    def _fill(self, out: torch.Tensor, number: Any) -> None:
        """Set a constant as a tensor's tracked value."""
        geometry = Geometry.of(out)
        if geometry.nbytes > LARGEST or isinstance(number, complex) or number in self.assumed_numbers:
            return
        make = partial(torch.full, geometry.shape, number, dtype=geometry.dtype, device=_CPU)
        self._put(out, geometry.shadow(make))

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        try:
            noted = self._note((args, kwargs))
        except NotFollowed:
            # Floats computed from an unknown operand stay unknown. Integers and booleans determine shapes, so
            # they are assumed.
            self._assume(func, args, out)
            return
        results = list(tensors_in(out))
        if not results:
            return
        assumption, depth = assumption_of(noted)
        # All results share one stored call, so that it runs once.
        call = DeferredRun(func, *noted)
        for number, tensor in enumerate(results):
            geometry = Geometry.of(tensor)
            # An operator that returns its operand's storage keeps the value that is already known.
            if geometry.nbytes > LARGEST or self._known.of(tensor.untyped_storage()) is not None:
                continue
            self._put(tensor, geometry.shadow(partial(call.result, number), assumption, depth))

    def _assume(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Set assumed values for the integer and boolean results of an operator with unknown operands."""
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return
        for number, tensor in enumerate(tensors_in(out)):
            if tensor.is_floating_point() or tensor.is_complex():
                continue
            geometry = Geometry.of(tensor)
            if geometry.nbytes > LARGEST or self._known.of(tensor.untyped_storage()) is not None:
                continue
            finite = finite_check(func, args)
            if finite is not None:
                self._fill(tensor, finite)
                continue
            taken = assume(func, args, number, tensor, self.routing)
            self._put(tensor, geometry.shadow(taken.make, taken.assumption))

    # ---- writing -----------------------------------------------------------------------------------------

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[0]
        if not target.is_meta:
            return
        storage = target.untyped_storage()
        before = self._known.of(storage)
        # A complete overwrite needs no previous value, so it starts a shadow for an unknown storage too.
        whole = func in OVERWRITES and _covers(target, storage.nbytes())
        if (before is None and not whole) or storage.nbytes() > LARGEST:
            self._known.remove(storage)
            return
        try:
            noted = self._note((args[1:], kwargs))
        except NotFollowed:
            self._known.remove(storage)
            return
        assumption, depth = assumption_of(noted)
        geometry, rest = Geometry.of(target), None if whole else before
        if rest is not None:
            # Parts that are not overwritten keep their assumption, and the chain grows by one.
            assumption, depth = rest.assumption or assumption, max(depth, rest.depth)

        def write() -> torch.UntypedStorage:
            # The contents are copied, since stored calls may still read the previous ones.
            contents = torch.UntypedStorage(geometry.nbytes) if rest is None else rest.contents().clone()
            operands, keywords = values_of(noted)
            func(geometry.within(contents), *operands, **keywords)
            return contents

        self._put(target, Shadow(write, assumption, depth))

    def _put(self, tensor: torch.Tensor, shadow: Shadow) -> None:
        self._known.put(tensor.untyped_storage(), shadow)

    def _note(self, operands: Any) -> Any:
        """Return an operator's operands with their tracked CPU values in place of `meta` tensors. Raise
        `NotFollowed` if one has none.
        """
        if isinstance(operands, torch.Tensor):
            if not operands.is_meta:
                if self.is_unsure(operands):
                    raise NotFollowed
                return HostValue.of(operands)
            shadow = self._known.of(operands.untyped_storage())
            if shadow is None or operands.is_complex():
                raise NotFollowed
            return View(shadow, Geometry.of(operands))
        if isinstance(operands, (tuple, list)):
            return type(operands)([self._note(operand) for operand in operands])
        if isinstance(operands, dict):
            return {name: self._note(operand) for name, operand in operands.items()}
        # The number came from an assumed value through `.item()`, so the result is unknown.
        if isinstance(operands, float) and operands in self.assumed_numbers:
            raise NotFollowed
        return _CPU if isinstance(operands, torch.device) else operands


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Return True if a tensor covers its whole storage."""
    return tensor.numel() * tensor.element_size() == nbytes and tensor.storage_offset() == 0
