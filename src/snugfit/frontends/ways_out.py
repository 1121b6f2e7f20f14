"""Addition of changes that fit to the message of a run's out-of-memory error.

They are computed for the job of the run and the memory of its GPU, without use of the GPU. The original error
is never lost: without an answer it is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import OutOfMemory
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction
    from snugfit.training.journal import Event

ON_GPU = "oom:"
"""Prefix of causes that mean the memory of a GPU, as messages contain it."""

LOOKING = "Memory ran out. Changes of the recipe that fit are looked for; nothing trains meanwhile."

LESS = 0.9
"""Memory limit of the changes, as a share of the predicted need, if the step was predicted to fit but did
not."""


@contextmanager
def end_with_ways_out(
    job: Job,
    recipe: Recipe,
    device: torch.device,
    gpus: int = 1,
    watch: Callable[[Event], None] = lambda event: None,
) -> Iterator[None]:
    """Context that adds changes that fit to the message of a GPU's `OutOfMemory`. `watch` receives a note
    before the search.

    Errors after which a run starts again, and those of a run on several GPUs, stay as they are.
    """
    try:
        yield
    except OutOfMemory as error:
        if type(error) is not OutOfMemory or ON_GPU not in str(error):
            raise
        if device.type != "cuda" or gpus > 1:
            raise
        import torch

        watch({"event": "note", "text": LOOKING})
        total = torch.cuda.mem_get_info(device)[1]
        if not (text := ways_out_of(job, recipe, torch.cuda.get_device_name(device), total)):
            raise
        raise OutOfMemory(f"{error}\n{text}") from error


def ways_out_of(
    job: Job, recipe: Recipe, gpu: Gpu | str, memory_bytes: int | None = None, *, loop: str = "plain"
) -> str:
    """Return lines on the changes with which the step fits a GPU of this memory; empty if none can be
    computed."""
    try:
        return "\n".join(_lines(job, recipe, gpu, memory_bytes, loop))
    except Exception:  # the caller has an error of its own, which no other may hide
        return ""


def _lines(job: Job, recipe: Recipe, gpu: Gpu | str, memory_bytes: int | None, loop: str) -> list[str]:
    from snugfit.planning.search.ways_out import ways_out
    from snugfit.prediction.predict import predict
    from snugfit.report.plan.ways_out import of_prediction

    limited = _too_large(predict(job, recipe, gpu=gpu, loop=loop), memory_bytes)
    return of_prediction(replace(limited, ways_out=ways_out(limited)))


def _too_large(prediction: Prediction, memory_bytes: int | None) -> Prediction:
    """Return the prediction with a memory limit that it does not fit: the given memory, or less than its
    need."""
    limit = min(filter(None, (memory_bytes, prediction.memory_bytes)), default=prediction.needed_bytes)
    limit = min(limit, int(LESS * prediction.needed_bytes)) if prediction.needed_bytes <= limit else limit
    return replace(prediction, memory_bytes=limit)
