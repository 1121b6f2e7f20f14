"""Registration of the feature `examples`: predictions of a user's own training step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup


class Examples(Feature):
    """The feature that adds the command `example`, the option `predict --example`, and `rehearse`."""

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"rehearsed": ("rehearse",)}

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit example`."""
        from snugfit.features.examples.command import example

        return (example,)

    def documents(self) -> Mapping[str, type]:
        """Return the class of the command's JSON document."""
        from snugfit.results.prediction import Prediction

        return {"example --json": Prediction}

    def rewrite_words(self, words: Sequence[str], declared: Collection[str]) -> Sequence[str]:
        """Return the words of `predict --example FILE.py` as those of the command `example`."""
        from snugfit.features.examples.command import as_command

        return as_command([*words]) if "example" in declared and words else words

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which an example's step has the policy of the simulated device."""
        from unittest.mock import patch

        from snugfit.features.examples.step import ExampleStep

        return patch.object(ExampleStep, "simulated", policy)
