"""Tests and recorded runs that need a technique of a feature, which may be deleted."""

from __future__ import annotations

import os
import re

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


def lacks_feature(item: pytest.Item, error: BaseException) -> str:
    """Return the reason to skip a test that failed since it names a technique of a deleted feature.

    Empty for a technique that the test's file does not name: then the core names it.
    """
    unknown = re.search(r"Unknown technique '(\w+)'", str(error)) if "SNUGFIT_WITHOUT" in os.environ else None
    if unknown is None or not re.search(rf"\b{unknown[1]}\b", item.path.read_text(encoding="utf-8")):
        return ""
    return f"the feature {os.environ['SNUGFIT_WITHOUT']}, with {unknown[1]}, is not there"
