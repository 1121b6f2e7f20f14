"""Attention implementations that features add to transformers' models, or that a package such as flash-attn
installs. A feature's module `attentions.py` has one object for each implementation. The field `attention` of
`Setup` has its name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from snugfit.feature_folders import feature_objects
from snugfit.techniques.wish import Call


@dataclass(frozen=True, kw_only=True)
class OwnAttention:
    """A feature's attention function that transformers does not have, given by import paths."""

    name: str
    why_no_script: str
    """Reason why no exported script can use the attention."""
    register: Call
    """Function that registers the attention function in transformers."""
    enter: Call
    """Function that changes a given model to compute with the attention."""
    leave: Call
    """Function that undoes the changes that `enter` made to a model."""
    pieces: Call
    """Function that converts micro-batches on the host to the form that the attention takes. Its arguments
    are the loop, the model and the micro-batches.
    """
    on_cpu: Call
    """Function that returns a context manager for a simulated step on a CPU."""


@dataclass(frozen=True, kw_only=True)
class PackageAttention:
    """An attention of transformers whose kernels are in a package, such as flash-attn."""

    name: str
    refuse: Call
    """Function that raises `RecipeError` for a device on which the kernels cannot run."""
    on_shapes: Call
    """Function that returns a context manager for a simulated step, in which the kernels compute only shapes.
    """


@functools.cache
def package_attentions() -> Mapping[str, PackageAttention]:
    """Return the attentions of packages that features support, by transformers' name."""
    return {attention.name: attention for attention in feature_objects("attentions", PackageAttention)}


@functools.cache
def own_attentions() -> Mapping[str | None, OwnAttention]:
    """Return the attention functions that all features add, by name."""
    return {attention.name: attention for attention in feature_objects("attentions", OwnAttention)}
