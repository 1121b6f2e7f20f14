"""Measurements in a fresh process: the child's effects on its parent, and its results (promises 7 to 9)."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from clean_forks import forks_of
from fake_nvml import FakeGpu, FakeNvml
from forked_children import forked_children
from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import JobError, UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement import child as child_room
from snugfit.measurement import contamination
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.experiment import run as run_room
from snugfit.measurement.experiment.request import MeasurementRequest
from snugfit.measurement.experiment.run import quiet_on_all, read_result, run_experiment
from snugfit.measurement.host import HostLoad, crowding, host_load
from snugfit.measurement.measure import measure
from snugfit.measurement.nvml import open_nvml
from snugfit.measurement.process import TAIL_BYTES, Child, ChildExit
from snugfit.measurement.stopwatch import Stopwatch, timing_of
from snugfit.measurement.target import Target, child_environment
from snugfit.results.footprint import Startup
from snugfit.results.measurement import Measurement
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.units import MIB
from tiers import slow_but

TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 30522,
    "max_position_embeddings": 64,
}
ENDED = ChildExit(returncode=0, timed_out=False, tail="", oom_kills=0)


def tiny_job(**changes: Any) -> Job:
    model = Model.from_config(TINY | changes.pop("config", {}), name="tiny")
    fields = {"task": Task.SEQUENCE_CLASSIFICATION, "batch_size": 4, "sequence_length": 16} | changes
    return Job(model=model, **fields)


def experiment_of(job: Job) -> MeasurementRequest:
    return MeasurementRequest(
        job=job, recipe=Recipe(), loop="plain", warmup=0, steps=1, deadline_seconds=60, history=None
    )


def script(body: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(body)]


def live(body: str, *, seconds: float = 60, once: Path | None = None, **options: Any) -> ChildExit:
    """Run this program and wait for this many seconds, counted from the creation of the file `once`."""
    with Child(script(body), environment=os.environ, **options) as running:
        latest = time.monotonic() + 60
        while once is not None and not once.exists() and time.monotonic() < latest:
            time.sleep(0.01)
        return running.wait(seconds)


def gone(pid: int, *, patience: float = 10) -> bool:
    """True if a process ends within `patience` seconds; a process that only waits to be reaped has ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


class TestChild:
    @pytest.mark.whole
    def test_its_code_and_words_come_back(self) -> None:
        ending = live("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
        assert (ending.returncode, ending.timed_out) == (3, False)
        assert {"out", "err"} <= set(ending.tail.split())

    @pytest.mark.whole
    def test_only_the_last_words_are_kept(self) -> None:
        ending = live("print('x' * 3_000_000); print('last')")
        assert len(ending.tail) <= TAIL_BYTES
        assert ending.tail.endswith("last\n")

    @pytest.mark.whole
    def test_words_that_are_no_text(self) -> None:
        assert "\ufffd" in live("import os; os.write(1, bytes([255, 254]))").tail

    @pytest.mark.whole
    @pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGKILL])
    def test_a_signal_is_told(self, number: signal.Signals) -> None:
        ending = live(
            f"""
            import os, resource
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            print('about to die', flush=True)
            os.kill(os.getpid(), {number.value})
            """
        )
        assert ending.returncode == -number
        assert "about to die" in ending.tail

    @pytest.mark.whole
    def test_one_that_hangs_is_asked_to_end(self) -> None:
        ending = live("import time; time.sleep(600)", seconds=0.5)
        assert (ending.timed_out, ending.returncode) == (True, -signal.SIGTERM)

    @pytest.mark.whole
    def test_one_that_ignores_the_request_is_made_to(self, tmp_path: Path) -> None:
        ready = tmp_path / "ready"
        ending = live(
            f"""
            import signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open({str(ready)!r}, 'w')
            time.sleep(600)
            """,
            seconds=0.1,
            once=ready,
            grace_seconds=0.3,
        )
        assert (ending.timed_out, ending.returncode) == (True, -signal.SIGKILL)

    @pytest.mark.whole
    @pytest.mark.parametrize(
        "end", slow_but(["os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(600)"], 1)
    )
    def test_its_descendants_die_with_it(self, end: str, tmp_path: Path) -> None:
        """The child has its own child, like a loader's worker, that ignores SIGTERM."""
        ready = tmp_path / "ready"
        ending = live(
            f"""
            import os, signal, subprocess, sys, time
            code = "import signal, time; signal.signal(15, 1); print('up', flush=True); time.sleep(600)"
            worker = subprocess.Popen([sys.executable, '-S', '-c', code], stdout=subprocess.PIPE)
            worker.stdout.readline()
            print(worker.pid, flush=True)
            open({str(ready)!r}, 'w')
            {end}
            """,
            seconds=0.3,
            once=ready,
            grace_seconds=0.3,
        )
        assert gone(int(ending.tail.split()[0]))

    @pytest.mark.whole
    def test_nothing_is_left_when_the_parent_is_interrupted(self) -> None:
        with (
            pytest.raises(KeyboardInterrupt),
            Child(script("import time; time.sleep(600)"), environment=os.environ) as running,
        ):
            raise KeyboardInterrupt
        assert gone(running.pid)

    @pytest.mark.whole
    def test_the_parent_sleeps_while_it_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The parent also sleeps when the child has closed its end of the pipe, which then stays readable."""
        looks = []
        has_died = Child._has_died

        def counted(self: Child) -> bool:
            looks.append(1)
            return has_died(self)

        monkeypatch.setattr(Child, "_has_died", counted)
        ending = live("import os, time; os.close(1); os.close(2); time.sleep(0.3)")
        assert ending.returncode == 0
        assert len(looks) < 10

    @pytest.mark.whole
    def test_a_kernel_without_pidfd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(pid: int) -> int:
            raise OSError("not here")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        assert live("import sys; sys.exit(5)").returncode == 5
        assert live("import time; time.sleep(600)", seconds=0.3).timed_out

    @pytest.mark.whole
    def test_kills_for_memory_are_counted_while_it_lives(self) -> None:
        counts = iter([40, 42])
        assert live("pass", count_oom_kills=lambda: next(counts)).oom_kills == 2

    @pytest.mark.whole
    def test_no_descriptor_is_left_open(self) -> None:
        live("pass")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            live("pass")
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="Requires: [the kernel's parent-death signal]")
def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    """kill -9 of the measuring process ends the measured one and the workers it forked."""
    measured = """
        import os, time
        from snugfit.measurement.process import die_with_parent
        die_with_parent(os.getppid())
        worker = os.fork()
        if worker:
            open(PIDS + '.part', 'w').write(f'{os.getpid()} {worker}')
            os.rename(PIDS + '.part', PIDS)
        time.sleep(600)
        """
    pids = tmp_path / "pids"
    inner = f"PIDS = {str(pids)!r}\n" + textwrap.dedent(measured)
    parent_code = f"""
        import os, sys
        from snugfit.measurement.process import Child
        with Child([sys.executable, '-c', {inner!r}], environment=os.environ) as child:
            child.wait(600)
        """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_code)])
    while not pids.exists() and parent.poll() is None:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    measured_pid, worker = map(int, pids.read_text().split())
    assert gone(measured_pid)
    assert gone(worker)


@pytest.mark.whole
def test_one_whose_parent_is_gone_already_ends() -> None:
    ending = live(f"""
        import sys; sys.path[:0] = {sys.path!r}
        from snugfit.measurement.process import die_with_parent
        die_with_parent(1 << 30)
        print('still here')
        """)
    assert ending.returncode == 128 + signal.SIGTERM
    assert "still here" not in ending.tail


START = Startup(imports_seconds=6.0, context_seconds=0.3, build_seconds=0.5, first_step_seconds=1.0)


def result(**changes: Any) -> dict[str, Any]:
    return ChildResult(outcome="ok", seconds=(0.1, 0.2), host_bytes=5).to_json() | changes


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"outcome": "ok"',
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe{\x00}\x00",
        b"[" * 200_000,
        b'{"outcome": "ok", "seconds": [NaN]}',
        json.dumps(result()).replace("0.1", "1e999").encode(),
        json.dumps(result()).replace("0.1", "-Infinity").encode(),
        json.dumps(result()).replace("0.1", "9" * 5000).encode(),
        json.dumps(result(seconds="fast")).encode(),
        json.dumps(result(seconds=[-1])).encode(),
        json.dumps(result(seconds=[True])).encode(),
        json.dumps(result(requested_bytes=1.5)).encode(),
        json.dumps(result(requested_bytes=-1)).encode(),
        json.dumps(result(outcome=None)).encode(),
        json.dumps(result(outcome="splendid")).encode(),
        json.dumps(result(seconds=[])).encode(),
        json.dumps(result(versions={"torch": 2})).encode(),
        json.dumps(result(startup={"imports_seconds": 1.0})).encode(),
        json.dumps(result(startup=START.to_json() | {"build_seconds": -1.0})).encode(),
        json.dumps(result(surprise=1)).encode(),
        json.dumps(result(message="x" * 9_000_000)).encode(),
    ],
    ids=lambda content: repr(content[:24]),
)
def test_what_is_no_result(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    reported = read_result(ENDED, tmp_path / "result.json")
    assert reported.outcome == "bad-result"
    assert reported.message


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place, outcome in (("nothing", "no-result"), (".", "bad-result"), ("fifo", "bad-result")):
        assert read_result(ENDED, tmp_path / place).outcome == outcome


def test_a_result_counts_only_when_its_writer_ended_well(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_document(path, result())
    assert read_result(ENDED, path).outcome == "ok"
    assert read_result(replace(ENDED, returncode=-11), path).outcome == "signal:SEGV"
    assert read_result(replace(ENDED, timed_out=True), path).outcome == "timeout"


def test_a_start_comes_back() -> None:
    found = ChildResult(outcome="ok", startup=replace(START, settling_seconds=0.25, settling_steps=2))
    assert ChildResult.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_loss_may_be_nan() -> None:
    text = json.dumps(ChildResult(outcome="ok", losses=(0.5, math.nan)).to_json(), allow_nan=False)
    losses = ChildResult.from_json(json.loads(text)).losses
    assert losses[0] == 0.5
    assert math.isnan(losses[1])


def test_a_document_is_whole_or_not_there(tmp_path: Path) -> None:
    write_document(tmp_path / "a.json", {"first": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_document(tmp_path / "a.json", {"second": math.nan})
    assert read_document(tmp_path / "a.json") == {"first": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_document_has_a_size(tmp_path: Path) -> None:
    write_document(tmp_path / "a.json", {"text": "x" * 1000})
    with pytest.raises(BadDocument, match="larger than 100 bytes"):
        read_document(tmp_path / "a.json", limit=100)


@pytest.mark.parametrize(
    ("seconds", "mean", "spread", "unstable"),
    [
        ([0.2] * 10, 0.2, 0.0, False),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0], 6.0, 8 / 6, True),
        ([1.0] * 99 + [50.0], 1.0, 0.0, False),  # one slow step in a hundred is no unstable run
        ([1.00, 1.02, 1.04, 1.06, 1.08], 1.04, 0.064 / 1.04, False),
        ([1.0] * 15 + [2.0] * 5, (14 + 2 * 4) / 18, 1 / (22 / 18), True),  # at neither of a host's two paces
        ([0.5], 0.5, 0.0, True),  # one step alone shows no spread
    ],
)
def test_statistics(seconds: list[float], mean: float, spread: float, unstable: bool) -> None:
    timing = timing_of(seconds, 8)
    assert timing is not None
    assert timing.step_seconds == pytest.approx(mean)
    assert timing.spread == pytest.approx(spread)
    assert timing.samples_per_second == pytest.approx(8 / mean)
    assert (timing.unstable, timing.steps) == (unstable, len(seconds))


def test_disturbed_steps_do_not_count_while_enough_others_remain() -> None:
    """The choice is by disturbance alone, because a disturbed step may be as short as any other."""
    seconds, quiet = [1.0] * 5 + [3.0] * 14 + [1.0], [True] * 5 + [False] * 15
    timing = timing_of(seconds, 8, quiet)
    assert timing is not None
    assert (timing.step_seconds, timing.steps, timing.spread) == (1.0, 5, 0.0)
    assert timing.every_seconds == pytest.approx((5 + 13 * 3.0) / 18)
    assert timing.seconds == tuple(seconds)
    few = timing_of(seconds, 8, [True] * 4 + [False] * 16)
    assert few is not None
    assert (few.steps, few.step_seconds) == (20, few.every_seconds)


class DisturbedCore:
    """A core with a disturbance at each of these calls."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.called, self.disturbed_samples = calls, 0, 0

    def sample(self) -> None:
        self.disturbed_samples += self.called in self.calls
        self.called += 1

    rebalance = sample


@pytest.mark.parametrize(
    ("calls", "quiet"),
    [
        ((), [True, True, True]),
        ((0,), [True, True, True]),  # before the first steady step
        ((2,), [False, True, True]),  # at its beginning
        ((3,), [False, True, True]),  # within it
        ((4,), [False, False, True]),  # at the border to the next
        ((8,), [True, True, False]),  # at the end of the last
    ],
)
def test_a_step_is_quiet_from_border_to_border(calls: tuple[int, ...], quiet: list[bool]) -> None:
    import torch

    watch = Stopwatch(torch.device("cpu"), 1, core=cast(Any, DisturbedCore(*calls)))
    for index in range(4):
        watch.step_begins(index)
        if index:
            watch.phase("forward")
        watch.step_ends(index)
        if index == 0:
            watch.phase("update")  # reads the load after the first step
            watch.phase("update")
    assert watch.quiet() == quiet


class FakeEvent:
    """A CUDA event on a device that is never behind its host."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("warmup", "steady", "start"),
    [
        (0, [3, 4, 5, 6], (0.0, 0)),
        (1, [4, 5, 6], (0.5, 0)),
        (3, [6], (10.5, 2)),  # two steps of 4 and 5 s, and three pauses of half a second
    ],
)
def test_the_stages_of_a_start(
    monkeypatch: pytest.MonkeyPatch, device: str, warmup: int, steady: list[float], start: tuple[float, int]
) -> None:
    """The model is built in 2 s, and steps take 3, 4, 5 and 6 s with half a second before each."""
    import torch

    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch = Stopwatch(torch.device(device), warmup)
    now[0] += 2
    watch.build_ends(torch.nn.Linear(1, 1), None)
    for index in range(4):
        now[0] += 0.5
        watch.step_begins(index)
        now[0] += 3 + index
        watch.step_ends(index)
    assert watch.seconds() == [steady[0], *(each + 0.5 for each in steady[1:])]
    found = watch.startup(imports_seconds=7.0, context_seconds=0.2)
    assert (found.build_seconds, found.first_step_seconds) == (2, 3.5)
    assert (found.settling_seconds, found.settling_steps) == start


def test_what_is_paid_once_is_all_but_steady_steps() -> None:
    settled = replace(START, settling_seconds=0.6, settling_steps=2)
    assert START.total_seconds(0.2) == pytest.approx(6.8 + 1.0 - 0.2)
    assert settled.total_seconds(0.2) == pytest.approx(6.8 + 1.6 - 3 * 0.2)
    assert settled.total_seconds(2.0) == pytest.approx(6.8), "faster first steps give no negative cost"


def test_no_steps_no_timing() -> None:
    assert timing_of([], 8) is None


def load_at(wall: float, busy: float, own: float) -> HostLoad:
    return HostLoad(wall=wall, busy=busy, own=own)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (load_at(10, 20, 19.5), None),  # the run itself filled both cores
        (load_at(10, 11, 2), None),  # other processes were busy, and a core was free
        (load_at(10, 20, 9), "1.1 of the host's 2 cores"),
        (load_at(0.1, 0.2, 0.0), None),  # too short for the kernel's ticks
        (None, None),
    ],
)
def test_a_host_that_was_crowded_all_the_time(last: HostLoad | None, words: str | None) -> None:
    """Evenly slow steps have no spread, so the kernel's counters decide."""
    reason = crowding(load_at(0, 0, 0), last, 2)
    assert (words in reason) if words and reason else reason is words


@pytest.mark.whole
def test_the_kernels_load_counts_living_children_as_ours() -> None:
    first = host_load()
    assert first is not None
    burn = "x = 0\nfor _ in range(3_000_000): x += 1\nprint('done', flush=True)\nimport time; time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-S", "-c", burn], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    last = host_load()
    worker.kill()
    worker.communicate()
    assert last is not None
    assert last.own - first.own >= 0.03
    assert last.busy >= first.busy


def test_the_childs_environment() -> None:
    shell = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN": "s",
        "WANDB_API_KEY": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "my_password": "s",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32",
    }
    plain = child_environment(shell, Setup(), visibility={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert "s" not in plain.values()
    assert {name: plain[name] for name in ("PATH", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM")} == {
        name: shell[name] for name in ("PATH", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM")
    }
    assert plain["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert not [name for name in plain if "ALLOC_CONF" in name]
    expandable = child_environment(shell, Setup(expandable_segments=True), visibility={})
    assert expandable["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(("device", "policy"), [("cpu", "PASSIVE"), ("cuda", None)])
def test_threads_of_a_run_on_the_cpu_sleep_while_they_wait(
    device: str, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a busy host spends its cores on threads that wait for others."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    request: Any = SimpleNamespace(setup=Setup())
    (variables,) = run_room._environments(request, [Target(type=device)])
    assert variables.get("OMP_WAIT_POLICY") == policy


def test_measured_processes_keep_bytecode_where_an_image_forbids_it(tmp_path: Path) -> None:
    """Without stored bytecode, each measured process compiles torch again."""
    shell = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    kept = child_environment(shell, Setup(), visibility={})
    assert "PYTHONDONTWRITEBYTECODE" not in kept
    assert Path(kept["PYTHONPYCACHEPREFIX"]).is_relative_to(tmp_path)
    theirs = child_environment({**shell, "PYTHONPYCACHEPREFIX": "/p"}, Setup(), visibility={})
    assert theirs["PYTHONPYCACHEPREFIX"] == "/p"
    assert "PYTHONPYCACHEPREFIX" not in child_environment({}, Setup(), visibility={})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loop": "trainr"}, "'trainer'"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": True}, "steps is True"),
        ({"warmup": -1}, "warm-up steps is -1"),
        ({"deadline_seconds": 0}, "deadline is 0"),
        ({"deadline_seconds": math.nan}, "deadline is nan"),
        ({"deadline_seconds": "60"}, "deadline is '60'"),
        ({"device": "gpu"}, "Devices: cpu"),
        ({"device": 0}, "Devices: cpu"),
        ({"gpu_index": "0"}, "GPU index '0'"),
        ({"ledger": 3}, "ledger is 3; it must be a path"),
        ({"record_history": 3}, "record_history is 3; it must be a path"),
        ({"record_history": "/nowhere/at/all/h.pickle"}, "the folder does not exist"),
        ({"gpu_index": -1}, "GPU index -1"),
        ({"device": "cpu", "record_history": Path("history.pickle")}, "no GPU"),
        ({"record_history": Path("/nowhere/at/all/h.pickle")}, "the folder does not exist"),
        ({"record_history": Path("h.pickle"), "warmup": 0, "steps": 2}, "3 or more steps"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measure(tiny_job(), Recipe(), **{"ledger": tmp_path / "runs", **options})
    assert os.listdir(tmp_path) == []


@pytest.mark.whole
def test_a_mistake_that_the_child_finds_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the model's build finds an unsupported activation. The child's code runs in this process."""

    def done_here(request: Path, result: Path) -> list[str]:
        write_document(result, child_room.run(read_document(request), tmp_path / "none").to_json())
        return [sys.executable, "-S", "-c", "raise SystemExit(1)"]

    monkeypatch.setattr(run_room, "child_command", done_here)
    facts = tiny_job().model.config | {"hidden_act": "swoosh"}
    job = replace(tiny_job(), model=Model.from_config(facts, name="wrong"))
    with pytest.raises(UsageError, match=r"wrong.*swoosh"):
        measure(job, "plain", device="cpu", ledger=tmp_path / "runs")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("job", "words"), [
    ("bert", r"job is 'bert'.*snugfit\.Job.*Model\.find\('bert'\)"), (None, "job is NoneType"),
])  # fmt: skip
def test_what_is_no_job_is_told_what_one_is(job: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        measure(job, ledger=None)


def test_a_ledger_that_cannot_be_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"folder for measured runs.*file"):
        measure(tiny_job(), Recipe(), device="cpu", ledger=tmp_path / "file")


def test_a_module_from_python_is_not_pickled() -> None:
    import torch

    model = Model.from_module(torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)})
    job = Job(model=model, task=Task.CUSTOM, batch_size=1)
    with pytest.raises(JobError, match=r"snugfit\.watch\(\)"):
        measure(job, Recipe(), ledger=None)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, Path]:
    """Return a run in its own process, and its ledger."""
    ledger = tmp_path_factory.mktemp("runs")
    return measure(tiny_job(), Recipe(), device="cpu", warmup=1, steps=3, ledger=ledger), ledger


@pytest.mark.whole
def test_a_step_on_the_cpu(on_the_cpu: tuple[Measurement, Path]) -> None:
    """Run end to end: two processes, a ledger, and null fields for the GPU."""
    seen, ledger = on_the_cpu
    assert (seen.outcome, seen.message, seen.device.type) == ("ok", "", "cpu")
    assert seen.footprint is not None
    footprint = seen.footprint
    gpu_only = (
        footprint.requested_bytes,
        footprint.reserved_bytes,
        footprint.nvml_bytes,
        footprint.context_bytes,
    )
    assert gpu_only == (None,) * 4
    assert (seen.device.uuid, seen.first_context_bytes, seen.smi_bytes, seen.contaminated) == (None,) * 4
    assert footprint.host_bytes is not None
    assert footprint.host_bytes > 50 * MIB
    assert seen.timing is not None
    assert seen.timing.steps == 3
    assert len(seen.losses) == 4
    assert all(math.isfinite(loss) for loss in seen.losses)
    assert "torch" in seen.versions
    assert seen.startup is not None
    assert min(seen.startup.imports_seconds, seen.startup.build_seconds) > 0
    assert seen.startup.first_step_seconds > 0
    assert (seen.startup.context_seconds, seen.startup.settling_steps) == (0, 0)
    (folder,) = ledger.iterdir()
    document = read_document(folder / "measurement.json")
    assert Measurement.from_json(document) == seen
    assert document["footprint"]["nvml_bytes"] is None
    del document["startup"]  # as in older results
    assert Measurement.from_json(document) == replace(seen, startup=None)


@pytest.mark.whole
def test_the_seed_is_the_same_in_every_run(on_the_cpu: tuple[Measurement, Path]) -> None:
    """Two runs have equal losses, so a difference between recipes comes from the recipe alone."""
    with forked_children():
        other = measure(tiny_job(), "workers(1)", device="cpu", warmup=1, steps=3, ledger=None)
    assert other.outcome == "ok"
    assert other.losses == on_the_cpu[0].losses


@pytest.mark.whole
def test_one_that_takes_too_long_is_ended_and_kept(tmp_path: Path) -> None:
    seen = measure(tiny_job(), Recipe(), device="cpu", deadline_seconds=0.3, ledger=tmp_path)
    assert (seen.outcome, seen.footprint, seen.timing) == ("timeout", None, None)
    assert "Still running after 0.3 s" in seen.message
    assert len(os.listdir(tmp_path)) == 1


def measures_in_little_memory(request: str, result: str) -> int:
    """Measure in this process, limited to 8 GB more."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 8_000_000_000, most))
    write_document(Path(result), child_room.run(read_document(Path(request)), Path("none")).to_json())
    return 1


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_too_little_memory_on_the_host(tmp_path: Path) -> None:
    """The kernel refuses a model of 16 GB in a process limited to 8 GB, and the message reports that."""
    job = tiny_job(config={"vocab_size": 4_000_000, "hidden_size": 1024})
    request, result = tmp_path / "request.json", tmp_path / "result.json"
    write_document(request, experiment_of(job).document(Target(type="cpu"), None))
    forks = forks_of("many_fits")
    code = forks.ended(forks.start(measures_in_little_memory, str(request), str(result)))
    reported = read_result(replace(ENDED, returncode=code), result)
    assert reported.outcome == "host-oom"
    assert reported.host_bytes is not None
    assert "memory" in reported.message


def test_what_the_child_raises_becomes_a_cause(tmp_path: Path) -> None:
    request = experiment_of(tiny_job()).document(Target(type="cpu"), None)
    refused = child_room.run(request | {"loop": "none"}, tmp_path / "h")
    assert refused.outcome == "refused"
    assert "Unknown loop" in refused.message
    broken = child_room.run(request | {"device": "meta:nonsense"}, tmp_path / "h")
    assert broken.outcome == "exit:1"
    assert "RuntimeError" in broken.message


FAKE_CHILD = """
import json, sys, time
from pathlib import Path
reported = json.loads({reported!r})
while not Path({go!r}).exists():
    time.sleep(0.01)
Path(sys.argv[2]).write_text(json.dumps(reported))
sys.exit({code})
"""


class TestOnAGpu:
    """The parent's half of a GPU run, with invented NVML and an invented child."""

    def perform(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        gpu: FakeGpu,
        reported: ChildResult,
        *,
        code: int = 0,
        meanwhile: Any = lambda: None,
        recipe: str = "plain",
    ) -> Measurement:
        """Measure with device bytes that rise while the child lives and fall after its end."""
        go, library = tmp_path / "go", FakeNvml(gpu)
        body = FAKE_CHILD.format(reported=json.dumps(reported.to_json()), go=str(go), code=code)
        monkeypatch.setattr(
            run_room,
            "child_command",
            lambda request, result: [sys.executable, "-S", "-c", body, str(request), str(result)],
        )
        monkeypatch.setattr(contamination, "MAX_WAIT_SECONDS", 0.0)
        readings = {"while": 0}
        wait = Child.wait

        def waited(self: Child, seconds: float) -> ChildExit:
            gpu.used += 7661 * MIB
            meanwhile()
            library.before_reading = lambda: (
                go.touch() if readings["while"] > 20 else readings.update({"while": readings["while"] + 1})
            )
            ending = wait(self, seconds)
            gpu.used = 3 * MIB if gpu.used < 10_000 * MIB else gpu.used
            return ending

        monkeypatch.setattr(Child, "wait", waited)
        with open_nvml(library) as nvml:
            target = Target(type="cuda", card=nvml.cards()[0], driver=nvml.driver())
            experiment = MeasurementRequest(
                job=tiny_job(),
                recipe=Recipe.parse(recipe),
                loop="plain",
                warmup=0,
                steps=1,
                deadline_seconds=60,
                history=None,
            )
            return run_experiment(experiment, (target,))[0]

    REPORTED = ChildResult(
        outcome="ok",
        seconds=(0.1, 0.1, 0.1),
        requested_bytes=6575 * MIB,
        allocated_bytes=6578 * MIB,
        reserved_bytes=6894 * MIB,
        retries=0,
        host_bytes=900 * MIB,
        first_context_bytes=621 * MIB,
        smi_bytes=7664 * MIB,
        smi_nvml_bytes=7664 * MIB,
    )

    @pytest.mark.whole
    def test_nvml_is_what_the_device_grew_by(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen = self.perform(monkeypatch, tmp_path, FakeGpu(processes=None), self.REPORTED)
        assert (seen.outcome, seen.contaminated) == ("ok", None)
        assert seen.footprint is not None
        assert seen.footprint.nvml_bytes == 7661 * MIB
        assert seen.footprint.context_bytes == 767 * MIB
        assert seen.device.reserve_bytes == 615 * MIB

    @pytest.mark.whole
    def test_somebody_else_during_the_run_is_told(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        gpu = FakeGpu(processes=None)

        def come() -> None:
            gpu.used += 3000 * MIB

        seen = self.perform(monkeypatch, tmp_path, gpu, self.REPORTED, meanwhile=come)
        assert seen.contaminated is not None
        assert "3,146 MiB more than" in seen.contaminated

    @pytest.mark.whole
    @pytest.mark.parametrize("recipe", ["plain", "zero3"])
    def test_the_memory_of_its_process_group_is_its_own(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str
    ) -> None:
        """NCCL takes its memory outside of torch's allocator, like another process."""
        gpu = FakeGpu(processes=None)

        def come() -> None:
            gpu.used += 950 * MIB

        seen = self.perform(monkeypatch, tmp_path, gpu, self.REPORTED, meanwhile=come, recipe=recipe)
        assert (seen.contaminated is None) is (recipe == "zero3")

    @pytest.mark.whole
    def test_somebody_else_before_is_told(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen = self.perform(monkeypatch, tmp_path, FakeGpu(processes=[(17, 40 * MIB)]), self.REPORTED)
        assert "before the run process 17 (40 MiB)" in str(seen.contaminated)

    @pytest.mark.whole
    def test_one_out_of_memory_keeps_its_peaks(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        died = replace(
            self.REPORTED, outcome="oom:torch", seconds=(), message="OutOfMemoryError: CUDA out of memory."
        )
        seen = self.perform(monkeypatch, tmp_path, FakeGpu(processes=None), died, code=1)
        assert (seen.outcome, seen.timing) == ("oom:torch", None)
        assert seen.footprint is not None
        assert seen.footprint.reserved_bytes == 6894 * MIB
        assert "CUDA out of memory" in seen.message

    @pytest.mark.whole
    def test_a_mistake_that_only_the_child_sees_is_the_users(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        refused = ChildResult(outcome="refused", message="This loop does not do that.")
        with pytest.raises(UsageError, match="This loop does not do that"):
            self.perform(monkeypatch, tmp_path, FakeGpu(processes=None), refused, code=1)


@pytest.mark.parametrize(
    ("said", "code", "bytes_used"),
    [("7664", 0, 7664 * MIB), ("[N/A]", 0, None), ("", 9, None), ("12\n13", 0, None), ("1024", 6, None)],
)
def test_nvidia_smi(tmp_path: Path, said: str, code: int, bytes_used: int | None) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\nexit {code}\n")
    command.chmod(0o755)
    assert child_room.smi_used_bytes("GPU-1", str(command)) == bytes_used
    assert child_room.smi_used_bytes("GPU-1", str(tmp_path / "none")) is None


def test_a_step_that_one_of_several_ranks_was_disturbed_in_is_disturbed_for_all() -> None:
    ranks = [(True, True, False, True), (True, False, True, True)]
    results = [ChildResult(outcome="ok", seconds=(1.0,) * 4, quiet=quiet) for quiet in ranks]
    assert quiet_on_all(results) == [True, False, False, True]
    assert quiet_on_all(results[:1]) == list(ranks[0])
