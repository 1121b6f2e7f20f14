"""Registration of the feature `environments`: predictions with other versions of packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class Environments(Feature):
    """The feature that adds `run-in`, `upgrade-check`, and `--software FILE` of `predict` and `plan`."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the functions of `snugfit run-in` and `snugfit upgrade-check`."""
        from snugfit.features.environments.command import run_in, upgrade_check

        return (run_in, upgrade_check)

    def documents(self) -> Mapping[str, type]:
        """Return the class of the JSON document of `upgrade-check`."""
        from snugfit.features.environments.changes import UpgradeCheck

        return {"upgrade-check --json": UpgradeCheck}

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return the renderer of a comparison of two environments."""
        from snugfit.features.environments.changes import UpgradeCheck
        from snugfit.features.environments.report import render

        return {UpgradeCheck: render}

    def rewrite_words(self, words: Sequence[str], declared: Collection[str]) -> Sequence[str]:
        """Return the words of `predict --software FILE` as those of the command `run-in`."""
        from snugfit.features.environments.command import as_command

        return as_command([*words]) if "run_in" in declared and words else words
