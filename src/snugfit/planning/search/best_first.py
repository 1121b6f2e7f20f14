"""Best-first search for one GPU: a queue of candidate recipes, ordered by their least possible seconds.

Each candidate with lower bounds has a minimum number of seconds. So has each group of candidates with the
same forward and backward passes that waits for bounds. The fastest comes first, since its result makes most
slower ones unnecessary. A free worker takes tasks that are slower than those of other workers only up to
`LOOKAHEAD_SHARE`. It takes no group whose bounds depend on a pending result of another worker.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.search.screening import groups_by_passes, note
from snugfit.planning.search.state import SPEED_RESOLUTION
from snugfit.prediction.worker_pool import CallResult, Question

if TYPE_CHECKING:
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.recomputing import RecomputingKinds
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

LOOKAHEAD_SHARE = 2.0
"""Share by which the least possible seconds of a task's recipes may exceed those of other workers' tasks
(chosen).
"""


class _SearchTask(NamedTuple):
    """Task for a worker process: recipes for which to compute lower bounds, or to simulate exactly."""

    method: str
    seconds: float
    """Lower bound of the fastest candidate's seconds per step; infinite for recipes without lower bounds."""
    numbers: list[int]


class _NeededRecipes(NamedTuple):
    """Cache entry: the recipes of one group that the search still needs, with the number of results at that
    time.
    """

    results: int
    numbers: list[int]
    seconds: float
    """Lower bound of the fastest candidate's seconds per step."""


class BestFirst:
    """Search that computes lower bounds of all candidate recipes that may be on the Pareto front of bytes and
    seconds, for one GPU. It simulates those that remain exactly. With `postpones`, it compiles no layers that
    recompute.
    """

    def __init__(
        self, state: SearchState, kinds: RecomputingKinds, tell: Tell, *, postpones: bool = False
    ) -> None:
        self.state, self.kinds, self.tell, self.postpones = state, kinds, tell, postpones
        kinds.start()
        self._tasks: dict[int, _SearchTask] = {}
        """Unfinished tasks of the worker processes, by the number of the call to a worker."""
        self._unbounded = deque(groups_by_passes(state.space, kinds.others))
        """Groups of recipes (with equal forward and backward passes) that have no lower bounds yet. They are
        processed first.
        """
        self._results = 0
        self._needed: dict[int, _NeededRecipes] = {}
        """Candidates that the search still needed at the last check of a postponed group, by group."""
        self._stale = set(kinds.waiting)
        """Groups of postponed recipes to check again, because results came after their last check."""
        self._complete = False
        """True if no result came after the last check of all groups."""
        self._groups: list[tuple[float, int, list[int]]] = []
        """Heap of recipes to simulate exactly, grouped by trace: least seconds, least bytes, and recipe
        numbers.
        """
        self._add_groups(number for number in state.bounds if number not in state.evaluated)

    def run(self, pool: WorkerPool) -> None:
        """Run the search until no candidate is needed. Raises `BelowLowerBound`."""
        self.tell(f"estimating {len(self._unbounded)} groups of recipes")
        for answer in pool.results(self._next_question, helped=True):
            self._learn(answer)
            state = self.state
            self.tell(f"{state.kinds} groups of recipes estimated, {len(state.evaluated)} recipes checked")

    # ---- the next question -------------------------------------------------------------------------------

    def _next_question(self, worker: int) -> Question | None:
        task = self._unbounded_task(worker) or self._fastest_task(worker)
        if task is None:
            return None
        screens, first = task.method == "screen", task.numbers[0]
        if not screens or self.state.is_reserved(first):
            self.state.is_for(worker, first)  # from now on, only this worker simulates these passes
        # The complement (a negative number) separates tasks for lower bounds from exact simulations.
        number = ~first if screens else first
        self._tasks[number] = task
        setups = [self.state.space.candidates[index].setup for index in task.numbers]
        return Question(number, task.method, (setups,))

    def _unbounded_task(self, worker: int) -> _SearchTask | None:
        """Return the task to compute lower bounds for a group of recipes with the same forward and backward
        passes. The list is in the order of the updates' keys. One worker begins at each end, so few updates
        are simulated in both.
        """
        for group in reversed(self._unbounded) if worker % 2 else self._unbounded:
            if self._may_screen(worker, group[0]):
                self._unbounded.remove(group)
                return _SearchTask("screen", math.inf, group)
        return None

    def _fastest_task(self, worker: int) -> _SearchTask | None:
        """Return the task with the least possible seconds per step that this worker may take."""
        now = min((task.seconds for task in self._tasks.values()), default=math.inf)
        evaluation = self._next_to_evaluate(worker, now * (1 + LOOKAHEAD_SHARE))
        most = evaluation.seconds if evaluation else now * (1 + LOOKAHEAD_SHARE)
        # Postponed groups can be compared only with the lower bounds of recipes that recompute nothing.
        screened = None if self._awaits_first_bounds() else self._next_screened(worker, most, now)
        # The exact simulation waits until a group that may be faster has lower bounds.
        if screened is not None and evaluation is not None:
            self._push_group(evaluation.numbers)
        return screened or evaluation

    def _awaits_first_bounds(self) -> bool:
        return bool(self._unbounded) or any(task.seconds == math.inf for task in self._tasks.values())

    def _next_to_evaluate(self, worker: int, most: float) -> _SearchTask | None:
        passed, task = [], None
        while self._groups and self._groups[0][0] <= most and task is None:
            entry = heapq.heappop(self._groups)
            numbers = [number for number in entry[-1] if not self.state.is_dominated(number)]
            if numbers and self.state.may_be_for(worker, numbers[0]):
                task = self._smallest_of_alike(worker, _SearchTask("evaluate", entry[0], numbers))
            elif numbers:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._groups, entry)
        return task

    def _smallest_of_alike(self, worker: int, fastest: _SearchTask) -> _SearchTask:
        """Return the task to simulate the smallest recipes that are about as slow as these, if these are not
        the best. Their result often makes the larger ones unnecessary.
        """
        if fastest.seconds <= self.state.fastest_that_fits:
            return fastest
        most, bounds = fastest.seconds * (1 + SPEED_RESOLUTION), self.state.bounds
        alike = [
            (group, numbers)
            for group in self._groups
            if group[0] <= most
            and (numbers := [number for number in group[-1] if not self.state.is_dominated(number)])
            and self.state.may_be_for(worker, numbers[0])
        ]
        smallest = min(alike, key=lambda number: number[0][1], default=None)
        if smallest is None or smallest[0][1] >= min(
            bounds[number].needed_bytes for number in fastest.numbers
        ):
            return fastest
        # The fastest recipe with these passes makes the others unnecessary.
        passes = self.state.passes_of(smallest[1][0])
        if self.state.passes_of(fastest.numbers[0]) == passes:
            return fastest
        group, numbers = min(number for number in alike if self.state.passes_of(number[1][0]) == passes)
        self._groups.remove(group)
        heapq.heapify(self._groups)
        self._push_group(fastest.numbers)
        return _SearchTask("evaluate", group[0], numbers)

    def _next_screened(self, worker: int, most: float, now: float) -> _SearchTask | None:
        """Return the task to compute lower bounds for a group of recipes that may take less than `most`
        seconds.

        All such groups need lower bounds, so groups from which others' bounds follow come first. Layers that
        are not compiled yet take long. They wait for the tasks that other workers do `now`.
        """
        while True:
            for kind in self._stale:
                self._examine(kind)
            self._stale.clear()
            lowers_later = False
            for *_, seconds, kind in self._kinds_below(most):
                needed = self._examine(kind)
                numbers = self.kinds.next_of(needed.numbers) if needed.seconds < most else []
                if numbers and self.state.must_be_lowered(numbers[0]):
                    lowers_later |= seconds > now
                    postponed = self.postpones and self.kinds.is_lowered_saving(numbers[0])
                    numbers = [] if lowers_later or postponed else numbers
                if numbers and self._may_screen(worker, numbers[0]):
                    return _SearchTask("screen", seconds, self.kinds.send(numbers))
            if self._complete or math.isfinite(most):
                return None
            # At the end, every group is checked once more with the latest results.
            self._stale, self._complete = set(self.kinds.waiting), True

    def _kinds_below(self, most: float) -> list[tuple[bool, int, float, int]]:
        """Return the groups of recipes that may take less than `most` seconds. Groups with layers to compile
        come last, since others may make them unnecessary.
        """
        waiting = self.kinds.waiting
        return sorted(
            (self.state.must_be_lowered(needed.numbers[0]), self.kinds.rank(kind), needed.seconds, kind)
            for kind, needed in self._needed.items()
            if needed.seconds < most and kind in waiting
        )

    def _examine(self, kind: int) -> _NeededRecipes:
        """Return the candidates of a group that are still needed, given the current results."""
        needed = self._needed.get(kind)
        if needed is None or needed.results != self._results:
            numbers = self.kinds.needed_of(kind)
            seconds = self.kinds.least_seconds_of(numbers) if numbers else math.inf
            needed = self._needed[kind] = _NeededRecipes(self._results, numbers, seconds)
        return needed

    def _may_screen(self, worker: int, number: int) -> bool:
        return not self.state.is_reserved(number) or self.state.may_be_for(worker, number)

    # ---- the answers -------------------------------------------------------------------------------------

    def _learn(self, answer: CallResult) -> None:
        task = self._tasks.pop(answer.number)
        self._results += 1
        self._complete = False
        if task.method == "evaluate":
            self.state.store_group(task.numbers, answer.value)
            kinds = self.kinds.kinds_by(task.numbers)
        else:
            screening = note(self.state.space, task.numbers, answer.value)
            kinds = self.kinds.learn(task.numbers, screening)
            self._add_groups(screening.bounds)
        self._stale |= kinds

    def _add_groups(self, numbers: Iterable[int]) -> None:
        for group in self.state.by_trace(numbers):
            self._push_group(group)

    def _push_group(self, group: list[int]) -> None:
        bounds = self.state.bounds
        fastest = min((bounds[number].seconds, bounds[number].needed_bytes) for number in group)
        heapq.heappush(self._groups, (*fastest, group))
