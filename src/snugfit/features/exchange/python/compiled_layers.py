"""Facts of a script that compiles a model's layers: their cache of keys and values, and torch's limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snugfit.features.exchange.python.evaluate import Evaluation
from snugfit.features.exchange.python.values import Assignment, Name

WITH_CACHE = ("causal-lm", "seq2seq-lm")
"""Tasks whose models fill a cache of keys and values in training, unless `use_cache` is False."""

LIMITS = ("recompile_limit", "cache_size_limit")
"""Names of torch's limit of programs for one function; the second is the older one."""

OWN_LOOPS = ("loop", "accelerate")
"""Kinds of scripts without a Trainer, which sets `use_cache` to False."""


def is_limit(one: Assignment) -> bool:
    """Return True for an assignment of `torch._dynamo.config.recompile_limit`."""
    return isinstance(one.target, Name) and "_dynamo" in one.target.dotted and one.name in LIMITS


def cache_of_layers(done: Evaluation, dialect: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of compiled layers that fill a cache; empty if the layers get none.

    Each of these layers needs its own program, and torch compiles only as many as its limit.
    """
    fills = arguments.get("job.task") in WITH_CACHE and dialect in OWN_LOOPS
    if not (arguments.get("layers.compile") and fills):
        return {}
    switches = [one.value for one in done.assignments if one.name == "use_cache"]
    switches += [call.named["use_cache"] for call in done.calls if "use_cache" in call.named]
    if False in switches:
        return {}
    limits = [one.value for one in done.assignments if is_limit(one)]
    return {"layers.cache": True, "layers.limit": [8, *limits][-1]}
