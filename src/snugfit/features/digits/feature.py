"""Registration of the feature `digits`: a small real data set and task that ship with snugfit."""

from __future__ import annotations

from snugfit.techniques.feature import Feature


class Digits(Feature):
    """The feature that ships the pictures of `snugfit.features.digits`. No command uses them."""
