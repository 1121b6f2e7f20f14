"""Replacement of functions of libraries during a simulation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

Patch = tuple[Any, str, Any]
"""The type of a patch: an object, the name of its attribute, and the attribute's replacement."""


@contextlib.contextmanager
def replace_attributes(patches: Iterable[Patch]) -> Iterator[None]:
    """Context in which attributes of objects are replaced, as by `unittest.mock.patch.object`."""
    with contextlib.ExitStack() as stack:
        for owner, name, instead in patches:
            stack.enter_context(patch.object(owner, name, instead, create=True))
        yield


def count_calls(owner: Any, name: str, count: Callable[[], None]) -> Patch:
    """Return a patch of a class's method that first calls the function `count`."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def count_and_run(*arguments: Any, **keywords: Any) -> Any:
        count()
        return method(*arguments, **keywords)

    return owner, name, count_and_run
