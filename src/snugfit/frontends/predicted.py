"""The prediction of a run that begins here, for the GPU that it trains on.

It is made once for each recipe that a run goes on under, before anything is built, and costs some seconds. On
the CPU, where only bytes of the host could be predicted, nothing is.

The rehearsal of one of several ranks makes torch's default process group a pretended one, and so does that of
DeepSpeed's engine. In a process that trains with others, or with an engine, it is the real one, so there
another process rehearses, while this one builds and trains: others would wait for it.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.training.predicted import PredictedRun, PredictRun, RunAnswer, predict_nothing

if TYPE_CHECKING:
    import torch

    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction


def run_predictor(device: torch.device, gpus: int = 1) -> PredictRun:
    """For runs on this device, or on so many such: what a job under a recipe should take, or why that is not
    known."""
    if device.type != "cuda":
        return predict_nothing

    def predict_run(job: Job, recipe: Recipe) -> RunAnswer:
        import torch

        try:
            return run_figures(predict_apart(job, recipe, torch.cuda.get_device_name(device), gpus))
        except SnugfitError as unknown:
            return f"This run cannot be predicted: {unknown}"

    def predict_beside(job: Job, recipe: Recipe) -> Future[RunAnswer]:
        answer: Future[RunAnswer] = Future()

        def work() -> None:
            try:
                answer.set_result(predict_run(job, recipe))
            except Exception as fault:  # of the other process: no reason to end a run that trains
                answer.set_result(f"This run could not be predicted ({type(fault).__name__}): {fault}")

        threading.Thread(target=work, name="predicts the run", daemon=True).start()
        return answer

    return predict_run if gpus == 1 else predict_beside


def begin_to_import(job: Job, device: torch.device, gpus: int) -> None:
    """Where a process that trains with others will have something simulated in another one: that begins to
    import what it needs, while this one reads its data."""
    from snugfit.planning.several_gpus.judge import modules_of
    from snugfit.prediction.worker_pool import start_fork_server

    if device.type == "cuda" and gpus > 1:
        start_fork_server(modules_of(job), for_what=job)


def predict_apart(job: Job, recipe: Recipe, gpu: Gpu | str, gpus: int) -> Prediction:
    """What is predicted of a job on so many of these GPUs, worked out in another process where a process
    group is here. Raises `SnugfitError` where nothing can be, as for a job that cannot be sent there."""
    from snugfit.job.gpu import find_gpu
    from snugfit.planning.several_gpus.judge import Judge, modules_of
    from snugfit.prediction.predict import predict
    from snugfit.prediction.worker_pool import Question, is_picklable, worker_pool

    if gpus == 1 and recipe.setup().sharding is None:
        return predict(job, recipe, gpu=gpu)
    make = functools.partial(Judge, job, find_gpu(gpu))
    if not is_picklable(make):
        raise SnugfitError(
            "A model that was made in Python cannot be sent to another process, which would simulate it."
        )
    with worker_pool(make, workers=1, apart=True, preload=modules_of(job)) as pool:
        (answer,) = pool.answers_to([Question(0, "predict", (gpus, recipe))])
    if isinstance(answer.value, SnugfitError):
        raise answer.value
    prediction: Prediction = answer.value
    return prediction


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
