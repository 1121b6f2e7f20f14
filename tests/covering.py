"""Build covering arrays: few recipes in which each technique, or each pair of techniques, occurs.

A recipe has one technique of each slot. A family of models may be a slot too. The caller gives a predicate of
compatible values, so a new technique is covered without a change here. The arrays are deterministic: a seed
breaks ties.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Case = tuple[Any, ...]
"""One value each of some slots, in the order of the slots."""


def covering(
    slots: Sequence[Sequence[Any]],
    goes: Callable[[Case], bool],
    *,
    together: int = 1,
    times: int = 1,
    seed: int = 0,
) -> list[Case]:
    """Return choices of all slots that cover each tuple of `together` values of different slots `times`
    times. `goes` returns true for a compatible choice of some slots. A slot is left out of a choice if none
    of its values is compatible."""
    rng = random.Random(seed)
    place = {value: number for number, slot in enumerate(slots) for value in slot}
    missing = Counter(
        dict.fromkeys(
            (case for some in itertools.combinations(slots, together) for case in itertools.product(*some)),
            times,
        )
    )
    found: list[Case] = []
    while missing:
        must = max(missing, key=lambda case: (missing[case], rng.random()))
        if not goes(must):
            del missing[must]
            continue
        chosen = _filled(must, slots, place, goes, missing, rng)
        found.append(chosen)
        for case in itertools.combinations(chosen, together):
            if case in missing:
                missing[case] -= 1
                if not missing[case]:
                    del missing[case]
    return found


def _filled(
    must: Case,
    slots: Sequence[Sequence[Any]],
    place: dict[Any, int],
    goes: Callable[[Case], bool],
    missing: Counter[Case],
    rng: random.Random,
) -> Case:
    """Return this choice, filled with the value of each other slot that covers the most missing tuples."""
    chosen, together = must, len(next(iter(missing)))
    others = [number for number in range(len(slots)) if number not in {place[value] for value in must}]
    for number in sorted(others, key=lambda number: (-len(slots[number]), rng.random())):

        def gain(value: Any, chosen: Case = chosen) -> tuple[int, float]:
            beside = itertools.combinations(chosen, together - 1)
            cases = (tuple(sorted((*case, value), key=place.__getitem__)) for case in beside)
            return sum(missing[case] for case in cases), rng.random()

        for value in sorted(slots[number], key=gain, reverse=True):
            bolder = tuple(sorted((*chosen, value), key=place.__getitem__))
            if goes(bolder):
                chosen = bolder
                break
    return chosen


def lacking(
    cases: Sequence[Case],
    slots: Sequence[Sequence[Any]],
    goes: Callable[[Case], bool],
    *,
    together: int = 1,
    times: int = 1,
) -> list[Case]:
    """Return compatible tuples of values that these choices cover fewer than `times` times."""
    met = Counter(case for choice in cases for case in itertools.combinations(choice, together))
    all_of_them = (
        case for some in itertools.combinations(slots, together) for case in itertools.product(*some)
    )
    return [case for case in all_of_them if met[case] < times and goes(case)]
