"""Sets of a model's code, walked in one order: a rehearsal must not depend on `PYTHONHASHSEED`.

Some models make something for each kind of their layers in the order of a set of names (`for layer_type in
set(config.layer_types)`: rotary embeddings of ModernBERT, masks of Gemma 3). Python shuffles names anew in
each process, so which of two equal blocks is born first, and dies first, is chance, in a real run too. A
rehearsal walks them sorted: one of the orders that a real run may have, and always the same.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.job.architectures import class_of

if TYPE_CHECKING:
    from snugfit.job.job import Job


class SortedSet(set[Any]):
    """A set that is walked in the order of its members' names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextlib.contextmanager
def sets_in_order(job: Job) -> Iterator[None]:
    """Within it, `set` in the code of the job's model, where that is transformers', is a `SortedSet`."""
    names = _names_of_its_code(job)
    if names.get("set", builtins.set) is not builtins.set:  # the code has something of its own by this name
        yield
        return
    names["set"] = SortedSet
    try:
        yield
    finally:
        del names["set"]


def _names_of_its_code(job: Job) -> dict[str, Any]:
    """None where the model is the user's, or where transformers has no class for it, as building will say."""
    if job.model.module is not None:
        return {}
    try:
        return vars(sys.modules[class_of(job.task, job.transformers_config()).__module__])
    except KeyError:
        return {}
