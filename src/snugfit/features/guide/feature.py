"""Registration of the feature `guide`: the experiments of Hugging Face's single-GPU training guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature


class Guide(Feature):
    """The feature that adds the command `guide`, and the package versions behind the guide's published
    figures.
    """

    needs: ClassVar[Mapping[str, str]] = {"plot": "page"}

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit guide`."""
        from snugfit.features.guide.command import guide

        return (guide,)

    def documents(self) -> Mapping[str, type]:
        """Return the class of the JSON document of `snugfit guide`."""
        from snugfit.features.guide.inference import InferenceGuide
        from snugfit.features.guide.result import GuideResult

        return {"guide --json": GuideResult, "guide --inference --json": InferenceGuide}
