"""Many processes answer like one: in order, with snugfit's errors unchanged and bugs with their traceback."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from snugfit.errors import JobError, SnugfitError
from snugfit.prediction.worker_pool import (
    Question,
    SpareProcesses,
    _Worker,
    map_in_processes,
    worker_pool,
)


def halve(number: int) -> int:
    if number == 13:
        raise JobError("no half of thirteen")
    if number < 0:
        raise KeyError("a bug")
    return number // 2


@pytest.mark.whole
@pytest.mark.parametrize("workers", [1, 2])
def test_items_come_in_order_until_one_cannot_be_answered(workers: int) -> None:
    results = map_in_processes(halve, [8, 6, 4, 13, 2], workers=workers)
    assert [next(results) for _ in range(3)] == [4, 3, 2]
    with pytest.raises(JobError, match="thirteen"):
        next(results)


@pytest.mark.whole
def test_a_bug_in_a_worker_shows_its_own_traceback() -> None:
    with pytest.raises(RuntimeError, match="KeyError"):
        list(map_in_processes(halve, [1, -1], workers=2))


@pytest.mark.whole
def test_a_killed_fork_server_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [EOFError(), ConnectionRefusedError("no such server")]

    def refuse(_descriptors: Any) -> None:
        raise faults.pop(0)

    monkeypatch.setattr("multiprocessing.forkserver.connect_to_new_process", refuse)
    with pytest.raises(SnugfitError, match=r"no such server.*--workers 1"):
        _Worker(multiprocessing.get_context("forkserver"), dict)
    assert not faults


class Slow:
    """A worker that returns its process number after a delay."""

    def process(self) -> int:
        time.sleep(0.2)
        return os.getpid()


@pytest.mark.whole
def test_a_process_that_became_spare_helps_where_that_is_allowed() -> None:
    questions, spare = [Question(number, "process") for number in range(4)], SpareProcesses()
    with worker_pool(Slow, workers=1, own_process=True, spare=spare) as pool:

        def processes(*, helped: bool) -> set[int]:
            waiting = iter(questions)
            return {answer.value for answer in pool.results(lambda _: next(waiting, None), helped=helped)}

        own = processes(helped=True)
        assert len(own) == 1
        spare.give()
        assert processes(helped=False) == own
        assert len(processes(helped=True)) == 2
        assert not spare.take(), "it was taken once"


SCRIPT = """
import json, os, signal
from multiprocessing import forkserver
from operator import neg
from pathlib import Path
from snugfit.prediction.worker_pool import is_picklable, map_in_processes, start_fork_server
def own(number): return number
start_fork_server((), worker_object=None)
status = Path(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read_text()
mask = next(line for line in status.splitlines() if line.startswith('SigIgn'))
print(json.dumps({
    "ignores Ctrl-C": bool(int(mask.split()[1], 16) & 1 << signal.SIGINT - 1),
    "negated": list(map_in_processes(neg, [1, 2], workers=2)),
    "picklable": [is_picklable(own), is_picklable(neg)],
    "GPUs of workers": list(map_in_processes(os.getenv, ['CUDA_VISIBLE_DEVICES'] * 2, workers=2)),
    "GPUs": os.environ['CUDA_VISIBLE_DEVICES'],
}))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Return the results of a script from stdin, in a fresh process with a visible GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="Requires: [/proc]")
def test_ctrl_c_does_not_reach_the_fork_server_while_it_imports(told: dict[str, Any]) -> None:
    assert told["ignores Ctrl-C"]


@pytest.mark.whole
def test_a_script_from_stdin_needs_no_file(told: dict[str, Any]) -> None:
    """A worker cannot import the script. Objects that refer to it stay in this process, and the remaining
    ones are sent."""
    assert (told["negated"], told["picklable"]) == ([-1, -2], [False, True])


@pytest.mark.whole
def test_workers_see_no_gpu(told: dict[str, Any]) -> None:
    """The fork server hides the GPUs, since its imports query CUDA, which then fails in forks. The
    caller's own process keeps its GPUs."""
    assert (told["GPUs of workers"], told["GPUs"]) == (["", ""], "0")
