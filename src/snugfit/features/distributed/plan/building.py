"""Choice of the device on which a model is built, if no GPU can hold the whole model.

Under `fsdp` and `hsdp`, each GPU builds the whole model before it shards it, unless the host builds it. If
the host does, each GPU takes its part layer by layer (`step/build.py`). Under every other technique a GPU
holds all of these weights anyway. If a model's weights exceed a GPU, plans therefore build it on the host.
"""

from __future__ import annotations

from dataclasses import replace

from snugfit.job.job import Job
from snugfit.prediction.startup import model_size

BUILT_ON_HOST = (
    "The host builds the model, in each process. Under fsdp each GPU takes its part from there: --set "
    "build_on=host, or build_on: host in the job file. Plans choose that where the weights exceed a GPU. The "
    "host needs memory for as many copies as it has GPUs."
)


MOST = 0.9
"""Largest share of one GPU's memory that an unsharded model may take (chosen). CUDA's context, NCCL and the
first sharded part need the rest.
"""


def built_where_it_fits(job: Job, bound: int) -> Job:
    """Return the job with `build on the host` set if its weights alone take more than `MOST` of a GPU's
    `bound` bytes.
    """
    import torch

    if job.build_on == "host" or job.model.module is not None:
        return job
    weights = model_size(job).numbers * getattr(torch, job.dtype).itemsize
    return replace(job, build_on="host") if weights > MOST * bound else job
