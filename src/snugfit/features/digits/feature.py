"""A small real task that ships with snugfit."""

from __future__ import annotations

from snugfit.techniques.feature import Feature


class Digits(Feature):
    """Ship the pictures of `snugfit.features.digits`; no command uses them."""
