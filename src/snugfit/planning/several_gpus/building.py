"""Where a model is built that no GPU can hold whole.

Under `fsdp` and `hsdp` each GPU builds the whole model before it keeps its part, unless the host does, which
each then takes its part from, layer by layer (`step/build.py`). Under every other technique a GPU has to hold
all of these weights anyhow. So a model whose weights exceed a GPU is planned as one that the host builds.
"""

from __future__ import annotations

from dataclasses import replace

from snugfit.job.job import Job
from snugfit.prediction.startup import model_size

BUILT_ON_HOST = (
    "The host builds the model, in each process, and under fsdp each GPU takes its part from there: --set "
    "build_on=host, or build_on: host in the job file. Plans choose that where the weights exceed a GPU. The "
    "host needs memory for as many copies as it has GPUs."
)


MOST = 0.9
"""The share of a GPU that a whole model may take (chosen): CUDA's context, NCCL and the first part of it that
is spread want the rest."""


def built_where_it_fits(job: Job, bound: int) -> Job:
    """The job, built on the host where its weights alone take more than `MOST` of `bound` bytes of a GPU."""
    import torch

    if job.build_on == "host" or job.model.module is not None:
        return job
    weights = model_size(job).numbers * getattr(torch, job.dtype).itemsize
    return replace(job, build_on="host") if weights > MOST * bound else job
