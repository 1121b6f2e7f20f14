"""Registration of the feature `defaults`: the user's own default values of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snugfit.techniques.feature import Feature


class Defaults(Feature):
    """The feature that reads default values of options from a file and from environment variables."""

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Add the user's defaults for options that the command has, and that nothing else gives."""
        from snugfit.features.defaults.values import add_defaults

        add_defaults(flags, settings)
