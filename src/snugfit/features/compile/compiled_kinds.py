"""Lower bounds of the memory and seconds of recipes with compiled layers, computed without compiling them.

A compiler fuses element-wise operators, sums and norms. Matrix products, convolutions and attention remain
library calls, and code outside the layers is unchanged. The seconds of these calls in the same recipe without
compilation are a lower bound. A lower bound of the bytes are the tensors outside the layers and the saved
outputs of the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.planning.cost.figures import Bound
from snugfit.planning.cost.lowered import CACHE_SHARE, LoweredKinds
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.space import Space
    from snugfit.planning.search.state import SearchState
    from snugfit.techniques.setup import Setup

LIBRARY_OPERATORS = MATRIX_PRODUCTS - {"aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
"""Operators that remain library calls in compiled code. The compiler may replace written-out attention, with
batched products, by one kernel."""

LIBRARIES = ("scaled_dot_product", "convolution")
"""Substrings of the names of further operators that remain library calls in compiled code."""

COMPILED_SHARE = 0.005
"""Largest share by which a compiled step may be faster than its computed lower bound. Products and attention
took equal seconds in every compared step of BERT-large."""

PIECES_SHARE = 0.1
"""Largest share by which a step with more micro-batches may be faster than with fewer. Each micro-batch
launches all kernels again. Sixteen micro-batches of Llama-3.1-8B took 1.2 % longer than four."""


REST_SHARE = 0.01
"""Largest share by which all kernels but products and attention may be faster with another number of
micro-batches (chosen)."""


class _Counterparts(NamedTuple):
    """Indices of the uncompiled candidate recipes whose bytes and seconds bound those of a compiled
    recipe.
    """

    same_settings: int | None
    """The recipe that is not compiled and otherwise the same; None without one."""
    bare: int
    """The recipe that is not compiled, recomputes nothing, and computes all logits at once."""


class CompiledKinds(LoweredKinds):
    """Lower bounds of bytes and seconds for candidate recipes with compiled layers, derived from their
    uncompiled counterparts in the search.
    """

    space: Space
    state: SearchState

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bounds: Mapping[int, Bound] = self.state.bounds
        self._uncompiled: dict[int, _Counterparts] = {}
        self._sizes: dict[int, list[int]] = {}
        """Indices of the recipes that differ only in the number of micro-batches, by a recipe's index."""
        self.waiting: list[int] = []
        for number, candidate in enumerate(self.space.candidates):
            lowering, saving_nothing = candidate.setup.lowering, self.saves_nothing.get(number, number)
            # Compiling a whole model also changes code between its layers, so the uncompiled step gives no
            # bound.
            if lowering is None or lowering.is_one_program or saving_nothing is None:
                continue
            bare = self._without_compiler(saving_nothing)
            if bare is not None:
                self._uncompiled[number] = _Counterparts(self._without_compiler(number), bare)
                if number not in self.saves_nothing:
                    self.waiting.append(number)

    @staticmethod
    def is_left(operator: str) -> bool:
        """Return True if this operator remains a library call in compiled code, such as a matrix product. The
        compiler never recomputes its outputs, so outputs that the backward pass reads are kept.
        """
        return operator in LIBRARY_OPERATORS or any(name in operator for name in LIBRARIES)

    def __contains__(self, number: int) -> bool:
        return number in self._uncompiled

    def same_uncompiled(self, number: int) -> int | None:
        """Return the index of the recipe that differs from a compiled one only by not being compiled."""
        return self._uncompiled[number].same_settings if number in self else None

    def bare(self, number: int) -> int:
        """Return the index of a compiled recipe's counterpart without compilation and recomputation, which
        computes all logits at once.
        """
        return self._uncompiled[number].bare

    def bounded_by(self, number: int) -> Iterator[int]:
        """Yield the indices of uncompiled recipes from which a bound of this compiled recipe's bytes and
        seconds is computed.
        """
        if number in self._uncompiled:
            yield from (other for other in self._uncompiled[number] if other is not None)
            yield from self._other_sizes(number)

    def least(self, number: int) -> Bound | None:
        """Return a lower bound of a compiled recipe's bytes and seconds; None for an uncompiled recipe."""
        if number not in self._uncompiled:
            return None
        candidates = self.space.candidates
        setup, least = candidates[number].setup, Bound(0, 0.0)
        for other in self._uncompiled[number]:
            if other is not None and (known := self._bounds.get(other)):
                plainer = candidates[other].setup
                share = 1 - COMPILED_SHARE
                if not plainer.recomputes_as(setup):
                    # Recomputed kernels may run faster than the first time, because their data may be in the
                    # GPU's cache.
                    share -= CACHE_SHARE
                needed = _least_bytes(known, setup, plainer)
                least = least.at_least(Bound(needed, known.compiled_seconds * share))
        for other in self._other_sizes(number):
            if known := self._bounds.get(other):
                own, plain = self._of_uncompiled(number), self._of_uncompiled(other)
                seconds = 0.0
                if candidates[other].setup.micro_batches < setup.micro_batches:
                    # More micro-batches are hardly faster than fewer, because each launches all kernels
                    # again.
                    seconds = known.seconds * (1 - PIECES_SHARE)
                    if own and plain:
                        more = own.compiled_seconds - plain.compiled_seconds
                        seconds = max(seconds, (known.seconds + more) * (1 - REST_SHARE))
                elif own and plain:
                    # There are fewer kernels in compiled code. Larger micro-batches thus save at most as much
                    # device time as in uncompiled code.
                    saved = max(0.0, plain.device_seconds - own.device_seconds)
                    seconds = (known.device_seconds - saved) * (1 - REST_SHARE)
                least = least.at_least(Bound(0, seconds))
        return least

    def _of_uncompiled(self, number: int) -> Bound | None:
        same_settings = self.same_uncompiled(number)
        return None if same_settings is None else self._bounds.get(same_settings)

    def again_seconds(self, number: int) -> float:
        """Return a lower bound of the seconds that a compiled recipe spends on recomputing activations; 0 if
        it is unknown.
        """
        if number not in self._uncompiled:
            return 0.0
        same_settings, bare = self._uncompiled[number]
        again = None if same_settings is None else self._bounds.get(same_settings)
        once = self._bounds.get(bare)
        if again is None or once is None:
            return 0.0
        return max(0.0, again.compiled_seconds - once.compiled_seconds) * (1 - COMPILED_SHARE)

    def _without_compiler(self, number: int) -> int | None:
        return self.space.variant(number, roster.plain(Slot.ENGINE))

    def _other_sizes(self, number: int) -> list[int]:
        if number not in self._sizes:
            self._sizes[number] = [*self.space.variants(number, Slot.BATCHING)]
        return self._sizes[number]


def _least_bytes(other: Bound, setup: Setup, uncompiled: Setup) -> int:
    """Return a lower bound of the peak bytes of a step with compiled layers, from the bound of the uncompiled
    step.
    """
    if setup.logits != uncompiled.logits:
        return other.resting_bytes
    same_checkpointing = setup.recomputes_as(uncompiled) and not setup.has_budget
    return other.compiled_bytes if same_checkpointing else other.outside_bytes
