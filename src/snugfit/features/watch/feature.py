"""Registration of the feature `watch`: measurements of a block of the user's own code, in the user's own
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.techniques.feature import Feature


class WatchFeature(Feature):
    """Add the function `snugfit.watch`."""

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"watch": ("watch",)}
