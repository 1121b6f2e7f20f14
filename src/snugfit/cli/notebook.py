"""Functions of the package that show their progress on stderr, in a notebook or a terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from snugfit.cli.progress import show_progress
from snugfit.planning.search import auto

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


def _with_progress(function: Callable[_Given, _Answer], doing: str) -> Callable[_Given, _Answer]:
    """Return the function, wrapped so that it shows a line of progress while it runs."""

    @functools.wraps(function)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Answer:
        with show_progress() as tell:
            job = given[0] if given else named.get("job")
            tell(f"{doing} {getattr(getattr(job, 'model', None), 'name', '')}".rstrip())
            return function(*given, **named)

    return call


predict = _with_progress(auto.predict, "predicting")
