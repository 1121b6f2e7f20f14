"""Registration of the feature `lengths`: ways of padding for a dataset's sequence lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    pass


class LengthsFeature(Feature):
    """The feature that adds the command `lengths`, the option `plan --lengths`, and the function
    `plan_lengths`.
    """

    removed_options: ClassVar[Mapping[tuple[str, str], str]] = {
        ("predict", "--data"): "A prediction reads no data. Give the longest sample: --sequence-length N.",
        ("plan", "--data"): "A plan reads lengths alone: --lengths FILE, with the tokens of each sample.",
    }
    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dataset": ("Lengths",),
        "length_plan": ("LengthPlan",),
        "search": ("plan_lengths",),
    }

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit lengths`."""
        from snugfit.features.lengths.command import lengths

        return (lengths,)

    def documents(self) -> Mapping[str, type]:
        """Return the class of each command's JSON document: of `lengths`, and of a plan with `--lengths`."""
        from snugfit.features.lengths.length_plan import LengthPlan, PlanWithLengths

        return {"lengths --json": LengthPlan, "plan --lengths FILE --json": PlanWithLengths}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the option `--lengths` of `plan`, as a parameter; none for other commands."""
        from snugfit.features.lengths.command import PLANNED

        return (PLANNED,) if command == "plan" else ()

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Add the sequence length and padding of the longest batch to the command's settings."""
        if flags.get("lengths") is not None:
            from snugfit.features.lengths.command import settings_of

            settings |= settings_of(flags, settings)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the command's parsed options unchanged. Raises `UsageError` for `plan --lengths` with
        measurements, or for several GPUs.
        """
        if command == "plan" and request.flags.get("lengths") is not None:
            from snugfit.features.lengths.command import refuse_others

            refuse_others(request.flags, request.gpus)
        return request

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return the function that renders the report of a `LengthPlan`, by that class."""
        from snugfit.features.lengths.length_plan import LengthPlan
        from snugfit.features.lengths.report import render

        return {LengthPlan: render}

    def add_to_plan(self, request: Any, plan: Any, *, fresh: bool) -> Mapping[str, Any]:
        """Return the memory and speed of each way of padding under the plan's recipe, to add to the plan.
        Return an empty dict without `--lengths`.
        """
        if request.flags.get("lengths") is None:
            return {}
        from snugfit.features.lengths.command import plan_of

        return {"lengths": plan_of(request, plan.best_or_nearest.recipe, fresh=fresh)}
