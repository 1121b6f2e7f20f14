"""Registration of the feature `schema`: the JSON Schema of the commands' documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class SchemaFeature(Feature):
    """The feature that adds the command `schema`."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit schema`."""
        from snugfit.features.schema.command import schema

        return (schema,)
