"""The least that candidates with compiled layers take, before their layers are lowered.

A compiler leaves products and attention (`compiled_work.py`), so the same candidate without it bounds the
seconds. The bytes are bounded by what is live outside the layers and by what these products leave to the
backward pass. A step in more pieces is no faster than in fewer.
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
"""Of the seconds that a compiler leaves of a step without it, how much less those of compiled layers may be.
Products and attention took the same to the last digit in all that was looked at."""

PIECES_SHARE = 0.1
"""Of the seconds of a step, how much less it may take in more micro-batches: each launches all kernels again,
and larger ones are rarely slower. Of Llama-3.1-8B, sixteen pieces took 1.2 % longer than four."""


class _Counterparts(NamedTuple):
    """Candidates whose layers are not compiled, by which those are bounded whose are."""

    alike: int | None
    """The same but for that."""
    bare: int
    """That recomputes nothing and has whole logits."""


class CompiledKinds:
    """Candidates whose layers are compiled, of which the same without is in the space, and the `bounds` that
    are known so far. `saves_nothing` has for each that recomputes the same without that; those that recompute
    may take less by `recomputed_share` of their seconds. There are none unless `any_wait`."""

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
        """Of those that were asked about, the same with fewer micro-batches."""
        self.waiting: list[int] = []
        """Those that recompute nothing and have whole logits."""
        for number, candidate in enumerate(space.candidates if any_wait else ()):
            wish, saving_nothing = candidate.setup.compile, saves_nothing.get(number, number)
            if wish is None or wish.what != "layers" or saving_nothing is None:
                continue
            bare = self._without_compiler(saving_nothing)
            if bare is not None:
                self._uncompiled[number] = _Counterparts(self._without_compiler(number), bare)
                if number not in saves_nothing:
                    self.waiting.append(number)

    def __contains__(self, number: int) -> bool:
        return number in self._uncompiled

    def alike(self, number: int) -> int | None:
        """The same candidate without the compiler."""
        return self._uncompiled[number].alike

    def bounded_by(self, number: int) -> Iterator[int]:
        """Candidates by which this one is bounded; none of one whose layers are not compiled."""
        if number in self._uncompiled:
            yield from (other for other in self._uncompiled[number] if other is not None)
            yield from self._in_fewer_pieces(number)

    def least(self, number: int) -> Bound | None:
        """The least of this candidate; None of one whose layers are not compiled."""
        if number not in self._uncompiled:
            return None
        candidates = self.space.candidates
        setup, least = candidates[number].setup, Bound(0, 0.0)
        share = 1 - COMPILED_SHARE - (self._recomputed_share if setup.checkpoint is not None else 0.0)
        for other in self._uncompiled[number]:
            if other is not None and (known := self._bounds.get(other)):
                needed = _least_bytes(known, setup, candidates[other].setup)
                least = least.at_least(Bound(needed, known.compiled_seconds * share))
        for other in self._in_fewer_pieces(number):
            if known := self._bounds.get(other):
                least = least.at_least(Bound(0, known.seconds * (1 - PIECES_SHARE)))
        return least

    def _without_compiler(self, number: int) -> int | None:
        return self.space.number(self.space.candidates[number].recipe.with_(roster.plain(Slot.ENGINE)))

    def _in_fewer_pieces(self, number: int) -> list[int]:
        if number not in self._fewer:
            candidates = self.space.candidates
            sizes = self.space.others(candidates[number].recipe, Slot.BATCHING)
            most = candidates[number].setup.micro_batches
            self._fewer[number] = [one for one in sizes if candidates[one].setup.micro_batches < most]
        return self._fewer[number]


def _least_bytes(other: Bound, setup: Setup, uncompiled: Setup) -> int:
    """The least bytes of a step with compiled layers, by what another without them takes."""
    if setup.logits != uncompiled.logits:
        return other.resting_bytes
    alike = setup.checkpoint == uncompiled.checkpoint and not setup.has_budget
    return other.compiled_bytes if alike else other.outside_bytes
