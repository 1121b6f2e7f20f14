"""The prediction of a training run's bytes and seconds on its GPU, made at the start of the run.

A prediction is made once for each recipe of a run, before the model is built, and takes some seconds. On the
CPU there is none, because only bytes of the host could be predicted.

A simulation of one of several ranks replaces torch's default process group by a fake one. So does the
simulation of DeepSpeed's engine. A process that trains with several ranks or an engine needs the real group.
The simulation then runs in another process, while this one builds and trains, because the other ranks would
wait for it.
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
    """Return a function that predicts a job under a recipe on this device, or on `gpus` of them.

    Its result is the prediction, or the reason for its absence.
    """
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
            except Exception as fault:  # a failed prediction must not end the training
                answer.set_result(f"This run could not be predicted ({type(fault).__name__}): {fault}")

        # As a daemon, this thread does not delay the end of the process.
        threading.Thread(target=work, name="predicts the run", daemon=True).start()
        return answer

    return predict_run if gpus == 1 else predict_beside


def begin_to_import(job: Job, device: torch.device, gpus: int) -> None:
    """Start to import a simulation's modules in another process, while this one reads data.

    Only runs of several processes simulate in another process.
    """
    from snugfit.prediction.exchanges import modules_of
    from snugfit.prediction.worker_pool import start_fork_server

    if device.type == "cuda" and gpus > 1:
        start_fork_server(modules_of(job), worker_object=job)


def predict_apart(job: Job, recipe: Recipe, gpu: Gpu | str, gpus: int) -> Prediction:
    """Predict a job on `gpus` of these GPUs, in another process if this one has a process group.

    Raises `SnugfitError` if no prediction is possible, as for a job that cannot be sent to another process.
    """
    from snugfit.job.gpu import find_gpu
    from snugfit.prediction.exchanges import modules_of
    from snugfit.prediction.predict import predict
    from snugfit.prediction.worker_pool import Question, is_picklable, worker_pool
    from snugfit.step.applier import engine_of

    if gpus == 1 and engine_of(recipe.setup()) is None:
        return predict(job, recipe, gpu=gpu)
    make = functools.partial(functools.partial, predict, job, recipe, gpu=find_gpu(gpu), gpus=gpus)
    if not is_picklable(make):
        raise SnugfitError(
            "A model that was made in Python cannot be sent to another process, which would simulate "
            "it. Give a model by its name or folder."
        )
    with worker_pool(make, workers=1, own_process=True, preload=modules_of(job)) as pool:
        (answer,) = pool.answers_to([Question(0, "__call__")])
    if isinstance(answer.value, SnugfitError):
        raise answer.value
    prediction: Prediction = answer.value
    return prediction


def run_figures(prediction: Prediction) -> PredictedRun:
    """Return the bytes and seconds of a prediction that a run compares with its measured ones."""
    timing = prediction.timing
    return PredictedRun(
        reserved_bytes=prediction.footprint.reserved_bytes,
        step_seconds=timing.step_seconds if timing else None,
        peak_seconds=timing.peak_seconds if timing else None,
        samples=prediction.job.batch_size,
        tokens=prediction.job.tokens,
        doubts=prediction.doubts,
    )
