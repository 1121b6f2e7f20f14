"""Registration of the feature `tasks`: training tasks on several texts, or on positions in a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    from snugfit.job.job import Job


class Tasks(Feature):
    """The feature that reads datasets of questions, answers and choices."""

    column_roles: ClassVar[tuple[str, ...]] = (
        "question", "context", "answers", "answer", "answer_start", "choices",
    )  # fmt: skip

    def read_samples(self, rows: Any, job: Job, processor: Any, tokenizer: Any, **options: Any) -> Any | None:
        """Return the dataset's rows as samples for a task of this feature; None for other tasks."""
        from snugfit.features.tasks.reading import READERS, read_samples

        return read_samples(rows, job, tokenizer, **options) if job.task in READERS else None
