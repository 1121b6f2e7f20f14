"""Lower bounds of candidates with compiled layers, before Inductor lowers their layers.

A compiler does not change products and attention (`compiled_work.py`), so the uncompiled candidate bounds the
seconds. The tensors that are live outside the layers, and the products' saved outputs, bound the bytes. More
micro-batches are never faster than fewer ones, up to `PIECES_SHARE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.cost.figures import Bound
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.space import Space
    from snugfit.techniques.setup import Setup

COMPILED_SHARE = 0.005
"""Greatest share by which a compiled step may fall below its bound of seconds. Products and attention took
equal seconds in every compared step of BERT-large."""

PIECES_SHARE = 0.1
"""Greatest share by which more micro-batches may be faster than fewer ones. Each micro-batch launches all
kernels again. Sixteen micro-batches of Llama-3.1-8B took 1.2 % longer than four."""


class _Counterparts(NamedTuple):
    """Uncompiled candidates that bound a compiled one."""

    alike: int | None
    """The same recipe without the compiler."""
    bare: int
    """The same, without recomputing and with whole logits."""


class CompiledKinds:
    """Candidates with compiled layers whose uncompiled recipe is in the space too.

    `bounds` holds the known bounds. `saves_nothing` maps a recomputing candidate to the same one without
    recomputing, of which it may take `recomputed_share` less seconds. Without `any_wait` there are none.
    """

    def __init__(
        self,
        space: Space,
        bounds: Mapping[int, Bound],
        saves_nothing: Mapping[int, int | None],
        recomputed_share: float,
        *,
        any_wait: bool = True,
    ) -> None:
        self.space, self._bounds, self._recomputed_share = space, bounds, recomputed_share
        self._uncompiled: dict[int, _Counterparts] = {}
        self._fewer: dict[int, list[int]] = {}
        """Numbers of the same candidates with fewer micro-batches, by candidate."""
        self.waiting: list[int] = []
        """Candidates without recomputing and with whole logits."""
        for number, candidate in enumerate(space.candidates if any_wait else ()):
            wish, saving_nothing = candidate.setup.lowering, saves_nothing.get(number, number)
            if wish is None or wish.is_one_program or saving_nothing is None:
                continue
            bare = self._without_compiler(saving_nothing)
            if bare is not None:
                self._uncompiled[number] = _Counterparts(self._without_compiler(number), bare)
                if number not in saves_nothing:
                    self.waiting.append(number)

    def __contains__(self, number: int) -> bool:
        return number in self._uncompiled

    def alike(self, number: int) -> int | None:
        """Return the same candidate without the compiler."""
        return self._uncompiled[number].alike

    def bare(self, number: int) -> int:
        """Return the same candidate without the compiler, without recomputing and with whole logits."""
        return self._uncompiled[number].bare

    def bounded_by(self, number: int) -> Iterator[int]:
        """Yield the candidates that bound this one; none for an uncompiled one."""
        if number in self._uncompiled:
            yield from (other for other in self._uncompiled[number] if other is not None)
            yield from self._in_fewer_pieces(number)

    def least(self, number: int) -> Bound | None:
        """Return the lower bound of this candidate; None for an uncompiled one."""
        if number not in self._uncompiled:
            return None
        candidates = self.space.candidates
        setup, least = candidates[number].setup, Bound(0, 0.0)
        for other in self._uncompiled[number]:
            if other is not None and (known := self._bounds.get(other)):
                plainer = candidates[other].setup
                share = 1 - COMPILED_SHARE
                if plainer.checkpoint != setup.checkpoint:
                    share -= self._recomputed_share
                needed = _least_bytes(known, setup, plainer)
                least = least.at_least(Bound(needed, known.compiled_seconds * share))
        for other in self._in_fewer_pieces(number):
            if known := self._bounds.get(other):
                least = least.at_least(Bound(0, known.seconds * (1 - PIECES_SHARE)))
        return least

    def again_seconds(self, number: int) -> float:
        """Return the least seconds of this candidate's recomputation, by the uncompiled one; 0 if unknown."""
        if number not in self._uncompiled:
            return 0.0
        alike, bare = self._uncompiled[number]
        again = None if alike is None else self._bounds.get(alike)
        once = self._bounds.get(bare)
        if again is None or once is None:
            return 0.0
        return max(0.0, again.compiled_seconds - once.compiled_seconds) * (1 - COMPILED_SHARE)

    def _without_compiler(self, number: int) -> int | None:
        return self.space.variant(number, roster.plain(Slot.ENGINE))

    def _in_fewer_pieces(self, number: int) -> list[int]:
        if number not in self._fewer:
            candidates = self.space.candidates
            sizes = self.space.variants(number, Slot.BATCHING)
            most = candidates[number].setup.micro_batches
            self._fewer[number] = [one for one in sizes if candidates[one].setup.micro_batches < most]
        return self._fewer[number]


def _least_bytes(other: Bound, setup: Setup, uncompiled: Setup) -> int:
    """Return the least bytes of a step with compiled layers, from the uncompiled one."""
    if setup.logits != uncompiled.logits:
        return other.resting_bytes
    alike = setup.checkpoint == uncompiled.checkpoint and not setup.has_budget
    return other.compiled_bytes if alike else other.outside_bytes
