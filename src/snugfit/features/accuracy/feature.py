"""Registration of the feature `accuracy`: the command `accuracy`, and the options of `plan` to measure
recipes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Configuration, Feature

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
        """Return the class of the JSON document of `snugfit accuracy`."""
        from snugfit.features.accuracy.compared_runs import Accuracy

        return {"accuracy --json": Accuracy}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the options of `plan` that measure its best recipes; none for other commands."""
        from snugfit.features.accuracy.plan_command import options

        return options() if command == "plan" else ()

    def next_steps(self, plan: Any, configuration: Configuration | None) -> Mapping[str, str]:
        """Return the command that measures the plan's best recipes, if its seconds rest on assumptions."""
        from snugfit.features.accuracy.plan_command import command_to_verify

        return command_to_verify(plan)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the command's parsed options, checked for `plan --verify`. Such a plan is for this machine's
        GPU, and its recipes are measured.
        """
        from snugfit.features.accuracy.plan_command import prepare

        return prepare(request) if command == "plan" and request.flags["verify"] else request
