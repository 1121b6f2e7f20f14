"""What is foreseen of a run that begins here: its prediction for the GPU that it trains on.

A prediction is made once for each recipe that a run goes on under, before anything is built, and costs some
seconds. On the CPU, where only bytes of the host could be told, nothing is foreseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.job.limits import NO_SEQUENCE
from snugfit.techniques.recipe import Recipe
from snugfit.training.predicted import Foresee, Foreseen, nothing_foreseen

if TYPE_CHECKING:
    import torch

    from snugfit.results.prediction import Prediction


def foresees(device: torch.device) -> Foresee:
    """For runs on this device: what a job under a recipe should take, or why that is not known."""
    if device.type != "cuda":
        return nothing_foreseen

    def foresee(job: Job, recipe: Recipe) -> Foreseen | str:
        import torch

        from snugfit.prediction.predict import predict

        try:
            return foreseen_of(predict(job, recipe, gpu=torch.cuda.get_device_name(device)))
        except SnugfitError as unknown:
            return f"This run cannot be predicted: {unknown}"

    return foresee


def foreseen_of(prediction: Prediction) -> Foreseen:
    """The figures of a prediction that are laid beside a run's."""
    timing = prediction.timing
    return Foreseen(
        reserved_bytes=prediction.footprint.reserved_bytes,
        step_seconds=timing.step_seconds if timing else None,
        peak_seconds=timing.peak_seconds if timing else None,
        samples=prediction.job.batch_size,
        tokens=_tokens(prediction.job),
    )


def _tokens(job: Job) -> int:
    """That a predicted step goes through, those of a user's example where there is one; 0 where its inputs
    are no tokens."""
    if job.task not in NO_SEQUENCE:
        return job.batch_size * job.sequence_length
    ids = (job.model.example or {}).get("input_ids")
    return job.batch_size * (int(ids.numel()) // max(1, len(ids))) if ids is not None else 0
