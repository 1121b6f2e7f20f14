"""Launching threads stay on quiet cores. The cores are invented, and the test sets their pace."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from snugfit.measurement import quiet_core
from snugfit.measurement.quiet_core import INTERVAL, INTERVAL_ALL_DISTURBED, QuietCore


class Cores:
    """Four cores and a clock. The thread runs on one core, whose pace sets the duration of a loop."""

    def __init__(self, *paces: float) -> None:
        self.paces = list(paces)
        self.held: set[int] = set(range(len(paces)))
        self.now = 0.0

    def get(self, thread: int) -> set[int]:
        return set(self.held)

    def set(self, thread: int, cores: set[int]) -> None:
        if thread in (0, threading.get_native_id()):
            self.held = set(cores)

    def pace(self, core: QuietCore) -> float:
        pace = self.paces[min(self.held)]
        core._best = min(core._best, pace)
        return pace


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cores]:
    made = Cores(2.0, 1.0, 1.7, 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", made.get, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", made.set, raising=False)

    def pace(core: QuietCore) -> float:
        return made.pace(core)

    monkeypatch.setattr(QuietCore, "_time_core", pace)
    monkeypatch.setattr(quiet_core.time, "perf_counter", lambda: made.now)
    yield made
    quiet_core.ALL_CORES.clear()


def test_the_first_look_finds_the_quietest_core(cores: Cores) -> None:
    core = QuietCore()
    core.rebalance()
    assert cores.held == {1}


def test_a_disturbed_core_is_left_for_a_quiet_one(cores: Cores) -> None:
    core = QuietCore()
    core.rebalance()
    cores.paces[1] = 1.6
    cores.now = INTERVAL / 2
    core.rebalance()
    assert cores.held == {1}, "no check before the interval ends"
    cores.now = INTERVAL
    core.rebalance()
    assert cores.held == {3}
    assert core.disturbed_share() == pytest.approx(2 / 2)  # core 0 was slow first, then core 1


def test_where_every_core_is_disturbed_it_stays_on_the_least_and_looks_less_often(cores: Cores) -> None:
    core = QuietCore()
    core.rebalance()
    cores.paces[:] = [2.0, 1.6, 1.5, 1.9]
    cores.now = INTERVAL
    core.rebalance()
    assert cores.held == {2}
    cores.paces[0] = 1.0
    cores.now = INTERVAL + INTERVAL_ALL_DISTURBED / 2
    core.rebalance()
    assert cores.held == {2}
    cores.now = INTERVAL + INTERVAL_ALL_DISTURBED
    core.rebalance()
    assert cores.held == {0}


def test_a_pace_a_little_slower_moves_nobody(cores: Cores) -> None:
    core = QuietCore()
    core.rebalance()
    cores.paces[1] = 1.2
    cores.now = INTERVAL
    core.rebalance()
    assert cores.held == {1}


def test_all_cores_are_given_back(cores: Cores) -> None:
    core = QuietCore()
    core.rebalance()
    core.release()
    assert cores.held == {0, 1, 2, 3}
    assert not quiet_core.ALL_CORES


def test_one_core_is_no_choice(cores: Cores) -> None:
    cores.held = {2}
    core = QuietCore()
    core.rebalance()
    assert (cores.held, core.disturbed_share()) == ({2}, None)


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system holds no thread to a core")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is no choice")
def test_forked_processes_and_new_threads_have_all_cores() -> None:
    """Loader workers are forked from the pinned thread, and must not share its core."""
    before = os.sched_getaffinity(0)
    core = QuietCore()
    try:
        core.rebalance()
        assert len(os.sched_getaffinity(0)) == 1
        if (child := os.fork()) == 0:
            os._exit(0 if os.sched_getaffinity(0) == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ready, done, seen = threading.Event(), threading.Event(), []

        def born_here() -> None:
            ready.set()
            done.wait(10)
            seen.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=born_here)
        thread.start()
        ready.wait(10)
        core._next_check = 0.0
        core.rebalance()
        done.set()
        thread.join()
        assert seen == [before]
    finally:
        core.release()
    assert os.sched_getaffinity(0) == before
