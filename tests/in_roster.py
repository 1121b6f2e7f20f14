"""Tests and recorded runs that need a technique of a feature, which may be deleted."""

from __future__ import annotations

import pytest

from snugfit.techniques import roster


def missing_techniques(recipe: str) -> list[str]:
    """Return the words of this recipe that no technique has."""
    known = {name for one in roster.techniques() for name in (one.name, *one.elsewhere)} | {"plain"}
    words = [text.partition("(")[0].strip() for text in recipe.split("+")]
    return [word for word in words if word not in known]


def are_in_roster(recipe: str) -> bool:
    """Return whether the recipe of a recorded run can still be read."""
    return not missing_techniques(recipe)


def needs_techniques(recipe: str) -> None:
    """Skip the running test where a technique of this recipe is in a feature that is not there."""
    if missing := missing_techniques(recipe):
        pytest.skip(f"the feature with {', '.join(missing)} is not there")
