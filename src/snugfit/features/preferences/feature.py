"""Registration of the feature `preferences`: tasks of training on preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    import inspect

    from snugfit.job.job import Job


class Preferences(Feature):
    """The feature of reward models, of policies that learn from pairs of answers, and of students."""

    column_roles: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the command-line options of the losses' settings, as parameters."""
        from snugfit.features.preferences.options import COMMANDS, OPTIONS

        return OPTIONS if command in COMMANDS else ()

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Replace the teacher's name by its model, which --offline searches on this machine alone."""
        from snugfit.job.model import Model

        if isinstance(name := settings.get("teacher"), str):
            settings["teacher"] = Model.find(name, online=not flags.get("offline")).to_json()

    def prepare(self, command: str, request: Any) -> Any:
        """Return the command's parsed options, with the memory that vLLM leaves. Raises `UsageError` if the
        command does not support the task.
        """
        from snugfit.features.preferences.options import check_request

        return check_request(command, request)

    def read_samples(self, rows: Any, job: Job, processor: Any, tokenizer: Any, **options: Any) -> Any | None:
        """Return the dataset's rows as pairs of answers for a task on preferences; None for other tasks."""
        from snugfit.features.preferences.settings import FORMS

        if job.task not in FORMS:
            return None
        from snugfit.features.preferences.samples import read_samples

        return read_samples(rows, job, processor, tokenizer, **options)
