"""A cache of workers' results, which the searches for several GPUs with the same kernels share.

The workers' `Parts` return lower bounds, and exact bytes and seconds, for all GPUs of the group. The search
for one GPU reads only its own values. The search for the next GPU reuses cached results, and its workers
compute only the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.prediction.worker_pool import Answer, Question, WorkerPool
from snugfit.rehearsal.device.policy import PoliciesDiffer

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup


class SharedResults:
    """Cache of simulation results by method of `Parts` and by a recipe's `Setup`. A search space contains
    each Setup object once, so its id is the key.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._known: dict[tuple[str, int], Any] = {}

    def of_gpu(self, index: int) -> WorkerPool:
        """Return a worker pool that returns only the results for the GPU with this index."""
        return _PoolOfGpu(self, index)

    def unknown(self, question: Question) -> list[Setup]:
        """Return the Setups of this method call whose results are not in the cache."""
        (setups,) = question.arguments
        return [setup for setup in setups if (question.method, id(setup)) not in self._known]

    def learn(self, question: Question, value: Any) -> None:
        """Add a worker's results of a method call to the cache, or its error for each Setup. Raises
        `PoliciesDiffer` if the GPUs run different kernels.
        """
        if isinstance(value, PoliciesDiffer):
            raise value
        (setups,) = question.arguments
        values = [value] * len(setups) if isinstance(value, SnugfitError) else value
        self._known |= {(question.method, id(setup)): one for setup, one in zip(setups, values, strict=True)}

    def value(self, question: Question, index: int) -> Any:
        """Return the cached results for the GPU `index`, one for each Setup of the method call. Return a
        single error if all have the same one, or if any exact evaluation (`judge`) failed.
        """
        (setups,) = question.arguments
        values = [self._known[question.method, id(setup)] for setup in setups]
        errors = [one for one in values if isinstance(one, SnugfitError)]
        if errors and (question.method == "judge" or all(one is errors[0] for one in values)):
            return errors[0]
        return [one if isinstance(one, SnugfitError) else one[index : index + 1] for one in values]


class _PoolOfGpu(WorkerPool):
    """Worker pool for the search of one GPU, which sends method calls to workers only without a cached
    result."""

    def __init__(self, results: SharedResults, index: int) -> None:
        super().__init__(results.pool.workers)
        self._results, self._index = results, index

    def answers(self, ask: Callable[[int], Question | None], *, helped: bool = False) -> Iterator[Answer]:
        """Yield the results of method calls as `WorkerPool.answers` does; cached results need no worker."""
        asked: dict[int, tuple[Question, Question]] = {}
        known: list[Question] = []

        def ask_for_rest(worker: int) -> Question | None:
            # A known answer is delivered before any further question.
            if known or (question := ask(worker)) is None:
                return None
            if not (setups := self._results.unknown(question)):
                known.append(question)
                return None
            rest = question._replace(arguments=(setups,))
            asked[question.number] = question, rest
            return rest

        while True:
            for number, value in self._results.pool.answers(ask_for_rest, helped=helped):
                question, rest = asked.pop(number)
                self._results.learn(rest, value)
                yield Answer(number, self._results.value(question, self._index))
            if not known:
                return
            question = known.pop()
            yield Answer(question.number, self._results.value(question, self._index))
