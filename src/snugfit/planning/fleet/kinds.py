"""Group GPU models that share one search for recipes, and run the searches of several groups concurrently.

Searches of two groups share nothing, so each has a separate worker process if there are enough. Two workers
of one search wait for each other, and simulate some optimizer updates twice. Once fewer groups than workers
remain, a free worker helps another search, in calls whose results do not depend on the worker.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from snugfit.errors import GpuError
from snugfit.planning.fleet.gpu_plans import OnGpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.rehearsal.device.policy import PoliciesDiffer
from snugfit.techniques import roster
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.planning.keep import Kept
    from snugfit.planning.search.progress import Tell
    from snugfit.prediction.worker_pool import SpareProcesses
    from snugfit.techniques.technique import Technique

_Answer = TypeVar("_Answer")


def kinds_of(
    gpus: Iterable[Gpu], fixed: Kept, fidelity: Fidelity = Fidelity.ROUNDS
) -> tuple[list[list[Gpu]], dict[str, OnGpu]]:
    """Return the GPU models in groups that run the same kernels. Each group needs one search. Also return, by
    GPU key, results for unusable GPUs, with the reason and no recipe.
    """
    degrees = list(Fidelity)
    looked_at = [
        technique
        for technique in roster.techniques()
        if degrees.index(technique.fidelity) <= degrees.index(fidelity) and not technique.missing_package()
    ]
    groups: dict[Hashable, list[Gpu]] = defaultdict(list)
    answers: dict[str, OnGpu] = {}
    for gpu in gpus:
        try:
            refuse_gpu(gpu, fixed)
            groups[_kind(gpu, looked_at)].append(gpu)
        except GpuError as unknown:
            answers[gpu.key] = OnGpu(gpu=gpu, fits=None, why=str(unknown))
    return [*groups.values()], answers


def refuse_gpu(gpu: Gpu, fixed: Kept) -> None:
    """Raise `GpuError` if snugfit cannot plan for this GPU: not a CUDA GPU, unknown memory, or too old for
    fixed techniques."""
    policy_for(gpu, Software())
    if gpu.memory_bytes is None:
        raise GpuError(f"{gpu.name}: the table has no figure for the memory that a process can use.")
    if reason := fixed.too_new(gpu.compute_capability):
        raise GpuError(f"{gpu.name}: {reason}")


def _kind(gpu: Gpu, looked_at: Sequence[type[Technique]]) -> Hashable:
    """Return a key that is equal for GPU models that can share a search for recipes.

    Such GPUs run the same kernels in most steps, and support the same techniques.
    """
    policy = policy_for(gpu, Software())
    allowed = tuple(
        technique.name
        for technique in looked_at
        if technique.least_capability is None or policy.capability >= technique.least_capability
    )
    return policy.sharing_key, allowed


def _split(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Divide GPU models into groups that run the same kernels in any step."""
    groups: dict[Hashable, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        groups[policy_for(gpu, Software()).decisions].append(gpu)
    return [*groups.values()]


class _SearchStopped(Exception):
    """Error that ends a search for recipes in another thread, since its result is no longer needed."""


def search_kinds(
    search: Callable[[Sequence[Gpu], int, Tell], _Answer],
    kinds: Sequence[Sequence[Gpu]],
    *,
    workers: int,
    side_by_side: int,
    spare: SpareProcesses,
    tell: Tell,
) -> list[_Answer]:
    """Run `search` for each of these groups of GPU models, concurrently, and return the results in order.

    `side_by_side` searches run at once, each with its share of the `workers`. A share becomes `spare` once no
    group is left to start. A group whose GPUs turn out to run different kernels is split into separate
    searches.
    """
    begun, done, began, stopped = 0, 0, time.monotonic(), threading.Event()

    def callback_for(gpus: int) -> Tell:
        """Return a callback for progress messages that adds the current GPUs, and after the first search an
        estimate of the remaining seconds."""
        left = (time.monotonic() - began) / done * (len(kinds) - begun) if done else 0.0
        rest = f", then about {left:.0f} s more" if left else ""
        head = f"kind {begun} of {len(kinds)} ({gpus} GPUs): "

        def callback(message: str) -> None:
            # A search in another thread can be ended only when it reports its progress.
            if stopped.is_set():
                raise _SearchStopped
            tell(f"{head}{message}{rest}")

        return callback

    def answers(kind: Sequence[Gpu]) -> Iterator[_Answer]:
        try:
            yield search(kind, max(1, workers // side_by_side), callback_for(len(kind)))
        except PoliciesDiffer:
            for part in _split(kind):
                yield from answers(part)

    def answers_of(kind: Sequence[Gpu]) -> list[_Answer]:
        nonlocal begun, done
        begun += 1
        known = list(answers(kind))
        done += 1
        if begun == len(kinds) and side_by_side > 1:
            spare.give()
        return known

    if side_by_side <= 1:
        return [answer for kind in kinds for answer in answers_of(kind)]
    with ThreadPoolExecutor(side_by_side) as threads:
        try:
            return [answer for known in threads.map(answers_of, kinds) for answer in known]
        finally:
            stopped.set()
