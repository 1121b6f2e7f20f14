"""The registry of features: the folders of `features/`, and plugins."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from snugfit.feature_folders import FeatureError, feature_packages, import_feature
from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return every feature, by name. Raises `FeatureError` for a folder that breaks a rule of the
    interface.
    """
    return tuple(itertools.starmap(_read, feature_packages().items()))


def _read(name: str, package: str) -> Feature:
    module = import_feature(f"{package}.feature")
    classes = [
        value
        for value in vars(module).values()
        # An imported class belongs to another module; only the feature's own counts.
        if inspect.isclass(value) and issubclass(value, Feature) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise FeatureError(f"{module.__name__}: one subclass of Feature is expected, found {len(classes)}.")
    classes[0].name = name
    return classes[0]()


@functools.cache
def hooks(method: str) -> tuple[Callable[..., Any], ...]:
    """Return the bound methods of this name of all features that override it."""
    plain = getattr(Feature, method)
    # A feature that does not override a hook is skipped, so the hook costs no call.
    return tuple(
        getattr(feature, method) for feature in features() if getattr(type(feature), method) is not plain
    )


def tensors_beside(weight: Any) -> list[tuple[Any, str]]:
    """Return the object and attribute of each tensor, such as quantization scales, that features store next
    to a weight.
    """
    return [entry for beside in hooks("tensors_beside") for entry in beside(weight)]


def stored_dtype(tensor: Any) -> str:
    """Return the name of a tensor's number format: a feature's, such as `nf4`, for packed numbers, else
    torch's."""
    packed = (name for packed_dtype in hooks("packed_dtype") if (name := packed_dtype(tensor)))
    return next(packed, str(tensor.dtype).removeprefix("torch."))


def public_names() -> dict[str, str]:
    """Return the module of each name that features add to the package `snugfit`, by name."""
    return {
        name: f"{feature_packages()[feature.name]}.{module}"
        for feature in features()
        for module, names in feature.public_names.items()
        # A name whose other feature is deleted is left out.
        if feature.needs.get(module.rpartition(".")[2], feature.name) in feature_packages()
        for name in names
    }


def picture(answer: Any, form: str) -> bytes:
    """Return charts of a command's result as a `png`, an `svg`, or `html` for a notebook; empty without
    charts.
    """
    return next(filter(None, (draw(answer, form) for draw in hooks("picture"))), b"")


def technique_modules() -> tuple[tuple[Slot, str], ...]:
    """Return the slot (a choice of a recipe, such as precision) and the module of each technique that a
    feature adds.
    """
    return tuple(
        (slot, f"{feature_packages()[feature.name]}.{module}")
        for feature in features()
        for slot, modules in feature.techniques.items()
        for module in modules
        # A technique whose other feature is deleted is left out.
        if feature.needs.get(module, feature.name) in feature_packages()
    )
