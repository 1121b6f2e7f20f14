"""Choose the cases of a test for `make test`; `make test-all` runs all.

A test may repeat one check for many cases at great cost (every recipe, many kills). A few of its cases run in
`make test`. The rest carry the marker `slow` and run before an issue is called resolved.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest


def slow_but(cases: Iterable[Any], keep: int | Callable[[Any], bool]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`; all are `slow` but the first `keep`, or those that it
    selects."""
    marked = []
    for number, case in enumerate(cases):
        kept = keep(case) if callable(keep) else number < keep
        arguments = case if type(case) is tuple else (case,)
        marked.append(case if kept else pytest.param(*arguments, marks=pytest.mark.slow))
    return marked


def crossed(*axes: Iterable[Any], keep: int | None = None) -> list[Any]:
    """Return each combination of these axes' values, for `pytest.mark.parametrize`. `make test` runs the
    cases that cover each value of each axis once, or the first `keep` of them. The rest are `slow`. A tuple
    holds the values of several parameters."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    often = [tuple(one[number % len(one)] for one in values) for number in range(longest)][:keep]
    rest = [case for case in itertools.product(*values) if case not in often]
    return slow_but([_flat(case) for case in (*often, *rest)], len(often))


def _flat(case: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(one if type(one) is tuple else (one,) for one in case))


Case = TypeVar("Case")


def few_of(cases: Sequence[Case], left_out: Iterable[Case]) -> list[Case]:
    """Return the cases that share one start of processes: some in `make test`, all in `make test-all`
    (`SNUGFIT_ALL_TRUTH`)."""
    out = [] if os.environ.get("SNUGFIT_ALL_TRUTH") else list(left_out)
    assert all(case in cases for case in out)
    return [case for case in cases if case not in out]
