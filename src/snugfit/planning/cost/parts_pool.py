"""Start the worker processes of a plan, each with its own cache of simulated passes and updates (`Parts`).

The cache stays in this process if the job or timer cannot be pickled. Examples are a user's own module and a
closure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from snugfit.planning.cost.startup_share import ENDLESS_RUN
from snugfit.prediction.worker_pool import SpareProcesses, WorkerPool, start_fork_server, worker_pool

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.parts import Parts
    from snugfit.planning.cost.startup_share import PlannedRun
    from snugfit.planning.cost.timer import Timer


def load_ahead(
    job: Job, gpus: Sequence[Gpu | None], timer: object, workers: int, *, ahead: Iterable[str] = ()
) -> None:
    """Start the fork server and let it import the modules that worker processes need. `timer` is the workers'
    timer, or the object from which it is made. `ahead` lists further modules that techniques import.
    """
    modules = [*_preload(job), *ahead]
    if workers > 1 and can_travel(job):
        start_fork_server(modules, worker_object=(job, gpus, timer))


@contextmanager
def parts_pool(
    job: Job,
    gpus: Sequence[Gpu | None],
    timer: Timer,
    *,
    workers: int,
    shallow: bool,
    run: PlannedRun = ENDLESS_RUN,
    own_process: bool = False,
    spare: SpareProcesses | None = None,
) -> Iterator[WorkerPool]:
    """Yield a pool of `workers` workers, each with its own `Parts` of this job.

    A single worker runs in this process unless `own_process` requires a process of its own. `spare` counts
    processes that may help later.
    """
    make, modules = partial(_parts, job, gpus, timer, shallow=shallow, run=run), _preload(job)
    workers = workers if can_travel(job) else 1
    with worker_pool(make, workers=workers, preload=modules, own_process=own_process, spare=spare) as pool:
        yield pool


def _parts(job: Job, gpus: Sequence[Gpu | None], timer: Timer, *, shallow: bool, run: PlannedRun) -> Parts:
    """Create a `Parts` object in the worker process, and return it. The parent process thus imports none of
    its modules.
    """
    from snugfit.deferred_imports import complete_imports
    from snugfit.planning.cost.parts import Parts

    complete_imports()  # an import within a later simulation would change its trace
    return Parts(job, gpus, timer, shallow=shallow, run=run)


def can_travel(job: Job) -> bool:
    """Return True if the job can be pickled for another process."""
    return job.model.module is None


def _preload(job: Job) -> list[str]:
    """Return the modules that a plan's workers import first. The last one is ignored if transformers has no
    such file."""
    name = job.model.architecture
    return [
        "snugfit.planning.cost.parts",
        "snugfit.rehearsal.record.recorder",
        "snugfit.rehearsal.device.overrides",
        f"transformers.models.{name}.modeling_{name}",
    ]
