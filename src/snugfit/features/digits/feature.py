"""Registration of the feature `digits`: a small real data set and task that ship with snugfit."""

from __future__ import annotations

from snugfit.techniques.feature import Feature


class Digits(Feature):
    """Ship the pictures of `snugfit.features.digits`; no command uses them."""
