"""Replay a step with many micro-batches through the allocator, without repetitions that change nothing.

All micro-batches of a step except the first and the last have the same allocations and frees. The steps after
the first repeat likewise. If the allocator's state before a micro-batch equals an earlier one, the
micro-batches between them are a period. The state covers all blocks and addresses. Each further period leaves
the allocator unchanged, and no peak increases. Often a single micro-batch is the period. If the blocks of one
batch are still alive at the start of the next, it is two or three. Whole periods are skipped, and the result
is still exact to the byte. Without a period, all micro-batches are replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.prediction.allocator import Allocator, actions_by_word
from snugfit.prediction.last_step import MOST_REPEATED
from snugfit.rehearsal.trace.relative import Alloc, Free, PhaseStart
from snugfit.rehearsal.trace.trace import GRAPH_STREAM, MarkKind, Memory, Work

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.repeat import PeriodicRun
    from snugfit.rehearsal.trace.trace import Trace

MIN_PERIODIC = 16
"""Number of micro-batches from which a step's seconds are computed from only three: the first, a middle one
and the last.
"""


class AllocatorPeaks(NamedTuple):
    """Peaks of requested, allocated and reserved bytes in a run."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


Request = tuple[int, Any]
"""Type of an allocator request: (stack, action). A stack is a list of the live memory blocks of equal
allocations. The action is the bytes to allocate, or the position of the block to free, from the stack's end
(-1 and down). With stack -1, the action names an action of the CUDA driver, or the release of the allocator's
cache.
"""


class Requests:
    """Allocation and free requests of a simulated run, in a form for fast replays through the allocator."""

    def __init__(self, run: PeriodicRun) -> None:
        self._stacks: dict[Alloc, int] = {}
        self._known: dict[int, Request] = {}  # by the id of an event: repeated events are the same object
        self._pending: set[str] = set(actions_by_word(Allocator().addresses))
        self._due: list[str] = []
        self._phase = "build"
        self.build = self._of(run.build)
        self.recorded = [
            [(self._of(events), times) for events, times in pieces if times] for pieces in run.recorded
        ]
        self.steps = run.steps
        self.stacks = len(self._stacks)
        self.of_graphs = [number for stack, number in self._stacks.items() if stack.stream == GRAPH_STREAM]
        """Numbers of the stacks (blocks of equal allocations) in the memory pool of CUDA graphs."""

    @property
    def leaves_as_many(self) -> bool:
        """True if the last of several steps frees as many blocks as it allocates, for each kind of
        allocation.
        """
        left: Counter[int] = Counter()
        for requests, times in self.recorded[-1]:
            for stack, action in requests:
                left[stack] += (times if action > 0 else -times) if stack >= 0 else 0
        return self.steps > 1 and not any(left.values())

    def _of(self, events: Iterable[Any]) -> list[Request]:
        requests: list[Request] = []
        known, stacks = self._known, self._stacks
        for event in events:
            kind = type(event)
            if kind is Alloc or kind is Free:
                if self._pending and kind is Alloc:
                    requests += self._driver(event)
                request = known.get(id(event))
                if request is None:
                    number = stacks.setdefault(event.stack, len(stacks))
                    action = event.nbytes if kind is Alloc else -1 - event.stack_distance
                    request = known[id(event)] = number, action
                requests.append(request)
            elif kind is PhaseStart:
                self._phase = event.phase
            elif event is MarkKind.CONTEXT_RELEASED:
                self._due = [self._phase, event]
            elif event is MarkKind.CACHE_EMPTIED:
                requests.append((-1, event))
        return requests

    def _driver(self, alloc: Alloc) -> Iterator[Request]:
        """Yield requests for the CUDA driver's changes of free addresses before this allocation, each
        once."""
        for word in (*self._due, alloc.phase, alloc.operator):
            if word in self._pending:
                self._pending.remove(word)
                yield -1, word
        self._due = []


def replay_periodic(requests: Requests, *, expandable: bool) -> AllocatorPeaks:
    """Replay these requests through a simulated allocator, and return its peaks of memory."""
    allocator = Allocator(expandable=expandable)
    stacks: list[list[Any]] = [[] for _ in range(requests.stacks)]
    memory = [Memory.OWN] * requests.stacks
    for number in requests.of_graphs:
        memory[number] = Memory.GRAPHS
    actions = actions_by_word(allocator.addresses)

    def state() -> Hashable:
        """Return the addresses of all allocated blocks and the allocator's state, on which all later
        allocations depend."""
        handed_out = tuple([tuple([block.address for block in stack]) for stack in stacks])
        return handed_out, allocator.state()

    def replay(requests: Sequence[Request]) -> None:
        allocate, release = allocator.allocate, allocator.release
        for stack, action in requests:
            if action is MarkKind.CACHE_EMPTIED:
                allocator.empty_cache()
            elif stack < 0:
                actions.pop(action, _nothing)()
            elif action > 0:
                stacks[stack].append(allocate(action, memory[stack]))
            else:
                release(stacks[stack].pop(action))

    def replay_step(pieces: Sequence[tuple[Sequence[Request], int]]) -> None:
        for some, times in pieces:
            _repeat(partial(replay, some), times, state)

    replay(requests.build)
    for pieces in requests.recorded[:-1]:
        replay_step(pieces)
    times = requests.steps - len(requests.recorded) + 1
    if requests.leaves_as_many:  # then all further micro-batches are like the last
        times += MOST_REPEATED
    _repeat(partial(replay_step, requests.recorded[-1]), times, state)
    return AllocatorPeaks(allocator.requested_peak, allocator.allocated_peak, allocator.reserved_peak)


def _nothing() -> None:
    """Do nothing: the replacement of a CUDA driver's action that already happened."""


def _repeat(replay: Callable[[], None], times: int, state: Callable[[], Hashable]) -> None:
    """Call the function `replay` `times` times, but skip whole cycles once the allocator's `state`
    repeats.
    """
    begins: dict[Hashable, int] = {}
    left = times
    while left:
        # A single replay cannot repeat, and computing a state is expensive.
        if times > 1:
            now = state()
            if now in begins:
                # The state has occurred before, so whole periods change nothing and are skipped.
                left %= begins[now] - left
                begins, times = {}, 1
                continue
            begins[now] = left
        replay()
        left -= 1


def micro_batch_works(trace: Trace, micro_batches: int) -> list[Work]:
    """Return the kernels of each of a step's `micro_batches`; the last entry includes the update. The trace
    may have fewer micro-batches, but more than two. The second is then repeated.
    """
    works = [_between(trace, *ends) for ends in pairwise([0, *later_starts(trace), len(trace.kernels)])]
    if len(works) == micro_batches:
        return works
    return [works[0], *[works[1]] * (micro_batches - 2), works[-1]]


def later_starts(trace: Trace) -> list[int]:
    """Return the index of the first kernel of each micro-batch of a step, except for the first
    micro-batch."""
    return [
        index
        for index, (before, kernel) in enumerate(pairwise(trace.kernels), start=1)
        if kernel.phase == "load" != before.phase
    ]


def _between(trace: Trace, start: int, end: int) -> Work:
    last = end == len(trace.kernels)
    waits = (index - start for index in trace.waits if start <= index < end or (last and index == end))
    return Work(trace.kernels[start:end], tuple(waits))
