"""Registration of the feature `series`: the task of time series."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    from snugfit.job.job import Job


class TimeSeries(Feature):
    """The feature of models that predict time series."""

    def read_samples(self, rows: Any, job: Job, processor: Any, tokenizer: Any, **options: Any) -> None:
        """Raise `UsageError` for a dataset of time series, and return None for other tasks."""
        from snugfit.features.series.tasks import SERIES

        if job.task == SERIES.name:
            raise UsageError(
                f"snugfit train does not read data for the task {job.task} yet. Train with transformers' "
                "Trainer and snugfit.fit, and use snugfit predict or measure for its memory."
            )
