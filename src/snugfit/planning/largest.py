"""Search for the largest batch size or sequence length that fits.

Each tried size has a full prediction. A formula is not enough: the peak moves to other operators with the
size, and the allocator rounds. Memory grows nearly linearly with either size. The next size is the
intersection of the limit with the line through the two nearest predictions. Every fourth time it is the
middle. The result fits and leaves the headroom of a plan, and the next larger size does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from snugfit.errors import JobError, NothingFits, UsageError, did_you_mean
from snugfit.job.inputs import has_sequence
from snugfit.job.job import LARGEST_BATCH, LARGEST_LENGTH, refuse_what_is_no_job
from snugfit.prediction.predict import predict
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job

FIELDS = {"batch": ("batch_size", LARGEST_BATCH), "sequence-length": ("sequence_length", LARGEST_LENGTH)}


class LargestFit(NamedTuple):
    """Largest batch size or sequence length with which a job fits, and the prediction for it."""

    size: int
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `LargestFit.from_json` reads."""
        return {"size": self.size, "prediction": self.prediction.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the size and prediction that `to_json` wrote."""
        return cls(document["size"], Prediction.from_json(document["prediction"]))


def largest(
    job: Job,
    recipe: Recipe | str = "plain",
    *,
    gpu: Gpu | str | None = None,
    memory_bytes: int | None = None,
    headroom: int | str | None = None,
    loop: str = "plain",
    of: str = "batch",
) -> LargestFit:
    """Return the largest global batch or sequence length that fits, with its prediction.

    The batch is a multiple of the recipe's micro-batches. Recipe and GPU may be given as text. The
    `headroom` stays free (bytes, or text such as `2%`); by default that of plans.

    Raises `UsageError` without a limit, for an unknown `of`, and for the sequence length of a task without
    sequences. Raises `NothingFits` if the smallest size does not fit.
    """
    refuse_what_is_no_job(job)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    field_of(job, of)
    if gpu is None and memory_bytes is None:
        raise UsageError(
            "The search for the largest size that fits needs a memory limit: give a "
            "GPU, or an amount of memory."
        )
    sizes = _Sizes(
        job, recipe, of, {"gpu": gpu, "memory_bytes": memory_bytes, "headroom": headroom, "loop": loop}
    )
    low, high = 1, sizes.limit + 1
    if sizes.spare(low) < 0:
        margin = sizes.predictions[low].headroom_bytes
        free = f" and a headroom of {show_bytes(margin)}" if margin else ""
        raise NothingFits(
            f"Not even a {of.replace('-', ' ')} of {sizes.size(low)} fits: {show_bytes(-sizes.spare(low))} "
            f"are missing with {recipe}{free}. Try {job.words.savings}, or a larger GPU."
        )
    rounds = 0
    while high - low > 1:
        middle = sizes.guess(low, high, halve=rounds % 4 == 3)
        if sizes.spare(middle) >= 0:
            low = middle
        else:
            high = middle
        rounds += 1
    return LargestFit(sizes.size(low), sizes.predictions[low])


def field_of(job: Job, of: str) -> tuple[str, int]:
    """Return the job's field or phase setting for the size `of` (such as `batch_size`), and its largest
    allowed value. Raises `UsageError` for an unknown size, and for the sequence length of a task without
    sequences."""
    added = job.added_phase
    sizes = FIELDS | dict(added.sizes if added else {})
    if of not in sizes:
        raise UsageError(
            f"largest of {of!r} is unknown.{did_you_mean(of, sizes)} Allowed for the phase {job.phase}: "
            f"{', '.join(sizes)}."
        )
    if sizes[of][0] == "sequence_length" and not has_sequence(job.task):
        raise UsageError(f"largest of {of!r}: the task {job.task} has no sequences. Try 'batch'.")
    return sizes[of]


class _Sizes:
    """Cached predictions of one job with different batch sizes or lengths. Sizes are counted in units: the
    smallest size that the recipe can divide into micro-batches.
    """

    def __init__(self, job: Job, recipe: Recipe, of: str, options: dict[str, Any]) -> None:
        self.job, self.recipe, self.options = job, recipe, options
        self.field, most = field_of(job, of)
        self.unit = recipe.pieces if of == "batch" else 1
        self.predictions: dict[int, Prediction] = {}
        self.limit = self._largest_valid(most // self.unit)

    def size(self, count: int) -> int:
        """Return the batch size or length of `count` units."""
        return count * self.unit

    def spare(self, count: int) -> int:
        """Return the bytes that a size of `count` units leaves free, minus the headroom; negative if it does
        not fit.
        """
        if count not in self.predictions:
            self.predictions[count] = predict(self._job(count), self.recipe, **self.options)
        prediction = self.predictions[count]
        return (prediction.spare_bytes or 0) - prediction.headroom_bytes

    def guess(self, low: int, high: int, *, halve: bool) -> int:
        """Return the next size to predict, between `low`, which fits, and `high`, which does not fit or is
        invalid. All are counted in units."""
        if high not in self.predictions:
            return min(high - 1, self._extrapolate(low))
        if halve:
            return (low + high) // 2
        fits, misses = self.spare(low), -self.spare(high)
        return min(max(low + int((high - low) * fits / (fits + misses)), low + 1), high - 1)

    def _extrapolate(self, low: int) -> int:
        below = max((count for count in self.predictions if count < low), default=None)
        if below is None or self.spare(below) <= self.spare(low):
            return 4 * low
        unit_bytes = (self.spare(below) - self.spare(low)) / (low - below)
        return low + max(1, int(self.spare(low) / unit_bytes) + 1)

    def _job(self, count: int) -> Job:
        changed: dict[str, Any] = {self.field: self.size(count)}
        if self.field in self.job.phase_settings:
            changed = {"phase_settings": {**self.job.phase_settings, **changed}}
        return replace(self.job, **changed)

    def _largest_valid(self, most: int) -> int:
        """Return the largest number of units, up to `most`, for which the job is valid. For example, a model
        limits its positions."""
        low, high = 1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self._job(middle)
                low = middle
            except JobError:
                high = middle
        return low
