"""Registration of the feature `watch`: memory and time of a block of the user's own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.techniques.feature import Feature


class WatchFeature(Feature):
    """The feature that adds the function `snugfit.watch`."""

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"watch": ("watch",)}
