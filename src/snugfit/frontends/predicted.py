"""The prediction of a run that begins here, for the GPU that it trains on.

It is made once for each recipe that a run goes on under, before anything is built, and costs some seconds. On
the CPU, where only bytes of the host could be predicted, nothing is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.training.predicted import PredictedRun, PredictRun, predict_nothing

if TYPE_CHECKING:
    import torch

    from snugfit.results.prediction import Prediction


def run_predictor(device: torch.device, gpus: int = 1) -> PredictRun:
    """For runs on this device, or on so many such: what a job under a recipe should take, or why that is not
    known."""
    if device.type != "cuda":
        return predict_nothing

    def predict_run(job: Job, recipe: Recipe) -> PredictedRun | str:
        import torch

        from snugfit.prediction.predict import predict

        try:
            return run_figures(predict(job, recipe, gpu=torch.cuda.get_device_name(device), gpus=gpus))
        except SnugfitError as unknown:
            return f"This run cannot be predicted: {unknown}"

    return predict_run


def run_figures(prediction: Prediction) -> PredictedRun:
    """The figures of a prediction that are compared with those of a run."""
    timing = prediction.timing
    return PredictedRun(
        reserved_bytes=prediction.footprint.reserved_bytes,
        step_seconds=timing.step_seconds if timing else None,
        peak_seconds=timing.peak_seconds if timing else None,
        samples=prediction.job.batch_size,
        tokens=prediction.job.tokens,
        doubts=prediction.doubts,
    )
