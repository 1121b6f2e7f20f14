"""Registration of the feature `media`: training tasks and datasets of pictures and sounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    from pathlib import Path

    from snugfit.job.job import Job


class Media(Feature):
    """The feature that reads datasets with pictures or sounds, and folders of pictures."""

    column_roles: ClassVar[tuple[str, ...]] = ("image", "segmentation_map", "video", "audio")

    def class_reader(self, folders: Sequence[Path]) -> Callable[[Path], Any] | None:
        """Return a function that reads the pictures in folders named by class; None if `folders` has no
        pictures.
        """
        from snugfit.features.media.picture_folders import ClassFolders, contains_pictures

        return partial(ClassFolders, folders=folders) if contains_pictures(folders) else None

    def read_samples(self, rows: Any, job: Job, processor: Any, tokenizer: Any, **options: Any) -> Any | None:
        """Return the dataset's rows as samples for a task with pictures or sounds; None for other tasks."""
        from snugfit.features.media.samples import TASKS, read_samples

        return read_samples(rows, job, processor, tokenizer, **options) if job.task in TASKS else None
