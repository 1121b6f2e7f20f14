"""The checked arguments of a plan for one GPU, for many GPU models, or for several GPUs that train
together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.cost.figures import BelowLowerBound
from snugfit.planning.cost.startup_share import PlannedRun
from snugfit.planning.keep import Free, Keep, Kept, kept_of
from snugfit.planning.plan import SLOWEST
from snugfit.planning.request import (
    fidelity_of,
    refuse_bad_request,
    refuse_non_callables,
    start_of,
    workers_of,
)
from snugfit.planning.search.progress import Tell
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.planning.cost.timer import Timer
    from snugfit.prediction.worker_pool import SpareProcesses, WorkerPool

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The checked arguments of a plan: the job, the GPU models, and the techniques that it may choose."""

    job: Job
    gpus: Sequence[Gpu]
    """GPU models of the plan; empty for a plan without a GPU."""
    memory_bytes: int | None
    """Usable bytes of GPU memory; None for the whole memory."""
    headroom: int | str | None
    fidelity: Fidelity
    objective: str
    fixed: Kept
    """Slots (choices of the recipe) that are not searched."""
    ranked: int
    run: PlannedRun
    workers: int
    tell: Tell
    whole_front: bool
    """True if recipes much slower than the best one are listed too."""
    compares: bool
    """True if each GPU model gets its own result. A result may be the reason why no recipe was found."""

    @classmethod
    def of(
        cls,
        job: Job,
        gpus: Sequence[Gpu],
        *,
        headroom: int | str | None,
        fidelity: str | Fidelity,
        keep: Keep,
        free: Free,
        workers: int | None,
        tell: Tell,
        memory_bytes: int | None = None,
        objective: str = "speed",
        start: Recipe | str | None = None,
        ranked: int = 0,
        steps: int | None = None,
        once: StartupRates = STARTUP_RATES,
        whole_front: bool = False,
        several_gpus: bool = False,
        compares: bool = False,
    ) -> Self:
        """Check these arguments of a plan, and return them as an object. Raises `UsageError` for invalid
        ones."""
        refuse_bad_request(job, objective=objective, memory_bytes=memory_bytes, workers=workers)
        refuse_non_callables(tell=tell)
        fixed = replace(kept_of(job, keep, free, start_of(start, ranked)), several_gpus=several_gpus)
        fixed.refuse(None if compares or not gpus else gpus[0].compute_capability)
        request = cls(
            job=job,
            gpus=gpus,
            memory_bytes=memory_bytes,
            headroom=headroom,
            fidelity=fidelity_of(fidelity),
            objective=objective,
            fixed=fixed,
            ranked=ranked,
            run=PlannedRun(steps=steps, rates=once),
            workers=workers_of(workers),
            tell=tell,
            whole_front=whole_front,
            compares=compares,
        )
        for gpu in gpus:
            # A compared GPU of unknown memory gets no result, and so needs no headroom.
            if gpu.memory_bytes or not compares:
                request.headroom_on(gpu)
        return request

    @property
    def gpu(self) -> Gpu | None:
        """The first GPU model, which is the only one unless models are compared; None without one."""
        return next(iter(self.gpus), None)

    @property
    def wants_smallest(self) -> bool:
        """True if the recipe with the least memory is requested, instead of the fastest."""
        return self.objective == "memory"

    @property
    def slowest(self) -> float:
        """Largest seconds of an alternative recipe, in multiples of the answer's seconds."""
        return math.inf if self.whole_front or self.wants_smallest else SLOWEST

    def load_ahead(self, timer: object) -> None:
        """Start to import all modules that the worker processes need. `timer` is the workers' timer, or the
        object from which it is made."""
        from snugfit.planning.cost.parts_pool import load_ahead

        load_ahead(self.job, self.gpus, timer, self.workers, ahead=self.fixed.preloaded)

    def with_pool(
        self, search: Callable[[WorkerPool], _Result], timer: Timer, spare: SpareProcesses | None = None
    ) -> _Result:
        """Run `search` with a pool of workers that simulate models of few layers, and return its result. If
        few layers do not represent the job, run it with whole models. `spare` counts free processes, if other
        searches run concurrently. Every worker then has its own process.
        """
        from snugfit.planning.cost.parts_pool import parts_pool

        for shallow in (True, False):
            with parts_pool(
                self.job, self.gpus or [None], timer, workers=self.workers, shallow=shallow, run=self.run,
                own_process=spare is not None, spare=spare,
            ) as pool:  # fmt: skip
                try:
                    return search(pool)
                except BelowLowerBound:
                    self.tell(
                        "the layers differ, so models of few layers do not represent the job: "
                        "starting again with all layers"
                    )
        raise AssertionError("a full simulation is never less than itself")

    def headroom_on(self, gpu: Gpu | None) -> int:
        """Return the bytes of this GPU's memory that stay free. Raises `UsageError` for an invalid
        headroom."""
        return headroom_of(self.headroom, gpu, self.memory_bytes, one_of_many=self.compares)

    def memory_on(self, gpu: Gpu | None) -> int | None:
        """Return the usable bytes of this GPU, including the headroom; None if unlimited or unknown."""
        return self.memory_bytes if self.memory_bytes is not None or gpu is None else gpu.memory_bytes
