"""Registration of the feature `accuracy`: recipes of jobs, predicted and measured, and the best recipes of a
plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature

_DRAWN = (
    "Jobs are drawn by `python lab/draw_runs.py` of the repository. For a job of yours: --job FILE --top K."
)


class AccuracyFeature(Feature):
    """Add the command `accuracy`, and the options `--verify` and `--no-peers` of `plan`."""

    removed_options: ClassVar[Mapping[tuple[str, str], str]] = {
        ("accuracy", "--draw"): _DRAWN,
        ("accuracy", "--gpus"): _DRAWN,
        ("plan", "--no-learn"): "--verify no longer changes the calibration. Leave the option out.",
    }

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit accuracy`."""
        from snugfit.features.accuracy.command import accuracy

        return (accuracy,)

    def documents(self) -> Mapping[str, type]:
        """Return the document of `snugfit accuracy`."""
        from snugfit.features.accuracy.compared_runs import Accuracy

        return {"accuracy --json": Accuracy}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the options of a plan whose best recipes are measured."""
        from snugfit.features.accuracy.plan_command import options

        return options() if command == "plan" else ()

    def prepare(self, command: str, request: Any) -> Any:
        """Return the request for a plan with `--verify`: it plans for this machine's GPU and measures
        afterwards.
        """
        from snugfit.features.accuracy.plan_command import prepare

        return prepare(request) if command == "plan" and request.flags["verify"] else request
