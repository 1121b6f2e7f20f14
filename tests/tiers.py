"""Which cases of a test `make test` runs, and which only `make test-all` does.

A test that asks the same of many cases at great cost (every recipe, many kills) keeps a few of them in
`make test`; the others carry the marker `slow` and run before an issue is called resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], keep: int | Callable[[Any], bool]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, all `slow` but the first `keep`, or those that it picks."""
    marked = []
    for number, case in enumerate(cases):
        kept = keep(case) if callable(keep) else number < keep
        arguments = case if type(case) is tuple else (case,)
        marked.append(case if kept else pytest.param(*arguments, marks=pytest.mark.slow))
    return marked
