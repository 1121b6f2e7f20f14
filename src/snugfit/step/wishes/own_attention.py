"""Attentions that features add to those of transformers, or whose packages they bring.

The module `attentions.py` of a feature has one object for each. The field `attention` of `Setup` holds its
name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from snugfit.feature_folders import feature_objects
from snugfit.techniques.wish import Call


@dataclass(frozen=True, kw_only=True)
class OwnAttention:
    """An attention that is not transformers' own, by its functions."""

    name: str
    why_no_script: str
    """Reason against an exported script with it."""
    register: Call
    """Registers it in transformers."""
    enter: Call
    """Changes a given model that computes with it."""
    leave: Call
    """Undoes the changes of a given model."""
    pieces: Call
    """Returns host micro-batches in the form that it needs, from the plain loop, its model and these."""
    on_cpu: Call
    """Context manager of the rehearsal of a CPU."""


@dataclass(frozen=True, kw_only=True)
class PackageAttention:
    """An attention of transformers whose kernels come with a package of their own."""

    name: str
    refuse: Call
    """Raises `RecipeError` for a device on which its kernels cannot run."""
    on_shapes: Call
    """Context manager of a rehearsal."""


@functools.cache
def package_attentions() -> Mapping[str, PackageAttention]:
    """Return the attentions of packages, by transformers' name."""
    return {one.name: one for one in feature_objects("attentions", PackageAttention)}


@functools.cache
def own_attentions() -> Mapping[str | None, OwnAttention]:
    """Return the attentions of all features, by name."""
    return {one.name: one for one in feature_objects("attentions", OwnAttention)}
