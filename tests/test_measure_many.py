"""Measure several processes that train together: their figures are right, and none of them outlives the
run."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fake_nvml import FakeGpu, FakeNvml
from forked_children import forked_children
from snugfit.comparison.compare import compare
from snugfit.documents import read_document
from snugfit.errors import RecipeError, UsageError
from snugfit.measurement import contamination
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.experiment import run as run_room
from snugfit.measurement.experiment.request import MeasurementRequest
from snugfit.measurement.experiment.run import Children, rank_environment, run_experiment
from snugfit.measurement.measure import measure
from snugfit.measurement.process import ChildExit
from snugfit.measurement.quiet_core import QuietCore
from snugfit.measurement.target import open_targets
from snugfit.prediction.predict import predict
from snugfit.report.measurement import render
from snugfit.results.measurement import Measurement
from snugfit.techniques.recipe import Recipe
from snugfit.units import MIB
from test_measure import gone, script, tiny_job
from tiers import slow_but

A, B = (f"GPU-{digit * 8}-aaaa-bbbb-cccc-000000000000" for digit in "12")


def shown(measurement: Measurement) -> str:
    """Return the report as text."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(measurement))
    return console.export_text()


@pytest.fixture(scope="module")
def two_on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, Path]:
    """Return a run of two processes with FSDP2 on gloo, and its ledger."""
    ledger = tmp_path_factory.mktemp("runs")
    with forked_children():
        measured = measure(tiny_job(), "fsdp", device="cpu", gpus=2, warmup=1, steps=3, ledger=ledger)
    return measured, ledger


@pytest.mark.whole
def test_two_processes_are_measured_together(two_on_the_cpu: tuple[Measurement, Path]) -> None:
    seen, ledger = two_on_the_cpu
    assert (seen.outcome, seen.message, seen.gpus) == ("ok", "", 2)
    assert [rank.rank for rank in seen.ranks] == [0, 1]
    assert seen.footprint is not None
    assert seen.timing is not None
    sizes = [rank.footprint.host_bytes or 0 for rank in seen.ranks if rank.footprint]
    assert len(sizes) == 2
    assert seen.footprint.host_bytes == max(sizes)
    assert seen.timing.step_seconds == max(rank.step_seconds or 0 for rank in seen.ranks)
    assert seen.timing.samples_per_second == pytest.approx(4 / seen.timing.step_seconds)
    assert len(seen.losses) == 4
    assert seen.startup is not None
    assert seen.startup.context_seconds > 0  # the group
    assert (seen.fabric_seconds, seen.exposed_fabric_seconds) == (None, None)
    (folder,) = ledger.iterdir()
    assert Measurement.from_json(read_document(folder / "measurement.json")) == seen
    assert seen.to_rows()[0]["gpus"] == 2


@pytest.mark.slow
def test_copied_weights_train_as_sharded_ones_do(two_on_the_cpu: tuple[Measurement, Path]) -> None:
    """Both runs start with the same seed and average the same gradients."""
    copied = measure(tiny_job(), "ddp", device="cpu", gpus=2, warmup=1, steps=3, ledger=None)
    assert copied.outcome == "ok"
    assert copied.losses == pytest.approx(two_on_the_cpu[0].losses, rel=1e-5)


@pytest.mark.whole
def test_an_older_document_is_of_one_process(two_on_the_cpu: tuple[Measurement, Path]) -> None:
    document = two_on_the_cpu[0].to_json()
    for later in ("gpus", "ranks", "fabric_seconds", "exposed_fabric_seconds"):
        del document[later]
    older = Measurement.from_json(document)
    assert (older.gpus, older.ranks, older.footprint) == (1, (), two_on_the_cpu[0].footprint)


@pytest.mark.whole
def test_the_report_has_a_line_for_each_rank(two_on_the_cpu: tuple[Measurement, Path]) -> None:
    text = shown(two_on_the_cpu[0])
    assert "2 processes on" in text
    assert text.count("the worst") == 1
    assert "the group of all ranks" in text


@pytest.mark.whole
def test_one_is_not_compared_with_two(two_on_the_cpu: tuple[Measurement, Path]) -> None:
    seen = two_on_the_cpu[0]
    alone = predict(tiny_job(), "bf16")
    with pytest.raises(UsageError, match="gpus is 1 predicted and 2 measured"):
        compare(alone, replace(seen, recipe=alone.recipe))


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 fails in its second step, while rank 0 waits for its gradients."""
    body = """
        from snugfit.measurement import child
        from snugfit.step.plain_loop import PlainStep
        accumulate, steps = PlainStep._accumulate, []
        def fail(self, built):
            steps.append(1)
            if len(steps) == 2:
                raise ValueError("a fault of rank 1 alone")
            return accumulate(self, built)
        PlainStep._accumulate = fail
        child.main()
        """
    command = run_room.child_command

    def with_fault(request: Path, result: Path) -> list[str]:
        if read_document(request)["rank"] == 0:
            return command(request, result)
        return [sys.executable, *script(body)[2:], str(request), str(result)]

    monkeypatch.setattr(run_room, "child_command", with_fault)
    seen = measure(tiny_job(), "ddp", device="cpu", gpus=2, warmup=1, steps=3, ledger=tmp_path)
    assert seen.outcome == "exit:1"
    assert seen.message == "Rank 1 of 2: ValueError: a fault of rank 1 alone"
    assert seen.timing is None
    (folder,) = tmp_path.iterdir()
    assert "--- rank 1 ---" in (folder / "stderr.txt").read_text()


class TestChildren:
    """Processes without torch: a failure of one ends all."""

    WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"

    def run(self, *bodies: str, seconds: float = 60) -> tuple[Children, list[ChildExit]]:
        commands = [script(body) for body in bodies]
        with Children(commands, [os.environ] * len(bodies)) as children:
            return children, children.wait(seconds)

    @pytest.mark.whole
    @pytest.mark.parametrize(
        ("end", "code"), slow_but([("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3)], 1)
    )
    def test_one_that_dies_takes_the_others_along(self, end: str, code: int) -> None:
        began = time.monotonic()
        dies = f"import os, time; time.sleep(0.1); {end}"
        children, exits = self.run(self.WAITS, dies, self.WAITS)
        assert time.monotonic() - began < 30
        assert [exited.returncode for exited in exits] == [-signal.SIGKILL, code, -signal.SIGKILL]
        assert children.first_cause(lambda number: None) == 1
        assert all(gone(int(exits[number].tail)) for number in (0, 2))

    @pytest.mark.whole
    def test_one_that_is_done_waits_for_nobody(self) -> None:
        children, exits = self.run("pass", "import time; time.sleep(0.2); print('late')")
        assert [exited.returncode for exited in exits] == [0, 0]
        assert exits[1].tail == "late\n"
        assert children.first_cause(lambda number: 0.0) is None

    @pytest.mark.whole
    def test_a_deadline_ends_all(self) -> None:
        children, exits = self.run(self.WAITS, self.WAITS, seconds=0.5)
        assert any(exited.timed_out for exited in exits)
        assert all(exited.returncode < 0 for exited in exits)
        assert children.first_cause(lambda number: None) is None
        assert all(gone(int(exited.tail)) for exited in exits if exited.tail)

    @pytest.mark.whole
    def test_ctrl_c_leaves_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pids = []

        def interrupt(self: Children, deadline_seconds: float) -> list[ChildExit]:
            pids.extend(child.pid for child in self._children)
            os.kill(os.getpid(), signal.SIGINT)
            return waits(self, deadline_seconds)

        waits = Children.wait
        monkeypatch.setattr(Children, "wait", interrupt)
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background job has no such handler
        try:
            with pytest.raises(KeyboardInterrupt):
                self.run(self.WAITS, self.WAITS)
        finally:
            signal.signal(signal.SIGINT, before)
        assert all(gone(pid) for pid in pids)

    def test_the_earliest_failure_is_the_cause(self) -> None:
        """Choose the earlier of two failures found at the same time. A killed process reports no time and
        comes first."""
        children = Children([], [])
        children.failed = [0, 1]
        assert children.first_cause({0: 7.5, 1: 7.4}.get) == 1
        assert children.first_cause({0: 7.5, 1: None}.get) == 1


FAKE_CHILD = """
import json, os, sys, time
from pathlib import Path
folder = Path({folder!r})
request = json.loads(Path(sys.argv[1]).read_text())
reported = json.loads({reported!r})[request["rank"]]
seen = [os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE")]
(folder / ("seen" + str(request["rank"]))).write_text(json.dumps([*seen, request["device"], request["uuid"]]))
while not (folder / "go").exists():
    time.sleep(0.01)
if (folder / "peaks_at").exists() and request["rank"] == 0:
    reported["peaks_at"] = float((folder / "peaks_at").read_text())
Path(sys.argv[2]).write_text(json.dumps(reported))
sys.exit(int(reported["outcome"] != "ok"))
"""

REPORTED = ChildResult(
    outcome="ok",
    seconds=(0.1, 0.1, 0.1),
    reserved_bytes=6000 * MIB,
    retries=0,
    host_bytes=900 * MIB,
    first_context_bytes=621 * MIB,
    communication_bytes=300 * MIB,
    fabric_seconds=0.03,
    exposed_fabric_seconds=0.01,
)
USED = (7000, 7200)
"""Used memory of the two GPUs in MiB while the children live."""


@pytest.mark.whole
class TestOnTwoGpus:
    """The parent's half of a run on two GPUs, with invented NVML and invented children."""

    def perform(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *reported: ChildResult, profiler: int = 0
    ) -> Measurement:
        """`profiler` is the memory in MiB that the first GPU uses in addition after its peaks were read."""
        gpus = [FakeGpu(uuid=A, processes=None), FakeGpu(uuid=B, processes=None)]
        library, readings, go = FakeNvml(*gpus), [0], tmp_path / "go"
        texts = json.dumps([one.to_json() for one in reported])
        body = FAKE_CHILD.format(reported=texts, folder=str(tmp_path))
        monkeypatch.setattr(
            run_room,
            "child_command",
            lambda request, result: [sys.executable, "-S", "-c", body, str(request), str(result)],
        )
        monkeypatch.setattr(contamination, "MAX_WAIT_SECONDS", 0.0)
        monkeypatch.setattr("snugfit.measurement.target.torch_cuda", lambda: "13.0")

        def read() -> None:
            readings[0] += 1
            if readings[0] == 20 and profiler:
                (tmp_path / "peaks_at").write_text(repr(time.monotonic()))
                gpus[0].used += profiler * MIB
            if readings[0] > 40 and (tmp_path / "seen1").exists() and (tmp_path / "seen0").exists():
                go.touch()

        waits = Children.wait

        def wait(self: Children, seconds: float) -> list[ChildExit]:
            for gpu, used in zip(gpus, USED, strict=True):
                gpu.used = used * MIB
            library.before_reading = read
            exits = waits(self, seconds)
            library.before_reading = lambda: None
            for gpu in gpus:
                gpu.used = 3 * MIB
            return exits

        monkeypatch.setattr(Children, "wait", wait)
        request = MeasurementRequest(
            job=tiny_job(),
            recipe=Recipe.parse("fsdp"),
            loop="plain",
            warmup=0,
            steps=3,
            deadline_seconds=60,
            history=None,
            gpus=2,
        )
        with open_targets("cuda", 0, 2, environment={}, library=library) as targets:
            return run_experiment(request, targets)[0]

    def test_each_gpu_is_counted_and_the_worst_is_shown(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        slower = replace(REPORTED, seconds=(0.2, 0.2, 0.2), fabric_seconds=None)
        seen = self.perform(monkeypatch, tmp_path, REPORTED, slower)
        assert (seen.outcome, seen.contaminated, seen.gpus) == ("ok", None, 2)
        footprints = [rank.footprint for rank in seen.ranks]
        assert [shape.nvml_bytes for shape in footprints if shape] == [(used - 3) * MIB for used in USED]
        assert seen.footprint == footprints[1]
        assert footprints[1] is not None
        assert footprints[1].communication_bytes == 300 * MIB
        assert footprints[1].context_bytes == (7197 - 6000 - 300) * MIB
        assert [(rank.gpu_index, rank.uuid) for rank in seen.ranks] == [(0, A), (1, B)]
        assert seen.device.uuid == B
        assert seen.timing is not None
        assert seen.timing.step_seconds == pytest.approx(0.2)
        assert seen.timing.samples_per_second == pytest.approx(20)
        assert (seen.fabric_seconds, seen.exposed_fabric_seconds) == (0.03, 0.01)
        text = shown(seen)
        assert "2 x NVIDIA H200" in text
        assert "30.0 ms" in text
        for rank in range(2):
            told = json.loads((tmp_path / f"seen{rank}").read_text())
            assert told == [f"{A},{B}", str(rank), str(rank), "2", f"cuda:{rank}", (A, B)[rank]]

    def test_what_the_profiler_takes_is_no_peak(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        seen = self.perform(monkeypatch, tmp_path, REPORTED, REPORTED, profiler=5000)
        assert seen.contaminated is None
        assert [rank.footprint.nvml_bytes for rank in seen.ranks if rank.footprint] == [
            (used - 3) * MIB for used in USED
        ]

    def test_a_gpu_that_was_shared_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        less = replace(REPORTED, reserved_bytes=4000 * MIB)
        seen = self.perform(monkeypatch, tmp_path, REPORTED, less)
        assert str(seen.contaminated).startswith("GPU 1: during the run the device used 2,276 MiB more than")
        assert [bool(rank.contaminated) for rank in seen.ranks] == [False, True]

    def test_the_first_that_runs_out_of_memory_is_the_outcome(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        lost = replace(
            REPORTED, outcome="exit:1", seconds=(), failed_at=20.0, message="DistBackendError: closed"
        )
        full = replace(lost, outcome="oom:torch", failed_at=19.9, message="OutOfMemoryError: CUDA")
        seen = self.perform(monkeypatch, tmp_path, lost, full)
        assert seen.outcome == "oom:torch"
        assert seen.message.startswith("Rank 1 of 2: OutOfMemoryError")


@pytest.mark.parametrize(
    ("recipe", "options", "error", "words"),
    [
        ("fsdp", {"gpus": 0}, UsageError, "gpus is 0; it must be a whole number"),
        ("fsdp", {"gpus": "2"}, UsageError, "gpus is '2'"),
        ("fsdp", {"gpus": True}, UsageError, "gpus is True"),
        ("bf16", {"gpus": 2}, UsageError, "2 GPUs were named, but the recipe trains on one.*ddp"),
        ("ddp", {}, UsageError, "--gpus 2"),
        ("ddp", {"gpus": 3}, UsageError, "batch of 4 cannot be shared evenly by 3 GPUs. Try 3 or 6"),
        ("zero1", {"gpus": 2, "loop": "trainer"}, UsageError, "ZeroRedundancyOptimizer"),
        ("ddp + micro_batches(4)", {"gpus": 2}, RecipeError, "a batch of 2 cannot be cut into 4"),
        ("hsdp(3)", {"gpus": 4}, UsageError, "hsdp"),
        ("ddp", {"gpus": 20, "job": {"batch_size": 20}}, UsageError, "20 processes on the CPU.*16"),
    ],
)
def test_what_several_cannot_measure(
    tmp_path: Path, recipe: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    job = tiny_job(**options.pop("job", {}))
    with pytest.raises(error, match=words):
        measure(job, recipe, **{"device": "cpu", "ledger": tmp_path / "runs"} | options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("device", "environment", "first", "words"),
    [
        (None, {}, 0, r"3 GPUs were requested, and CUDA shows 2 here: 0: NVIDIA H200.*--gpus N"),
        ("cuda:1", {}, 0, "3 GPUs were requested, from GPU 1 on, and CUDA shows 2"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, 0, "CUDA shows 1 here"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "7"}, 0, "CUDA_VISIBLE_DEVICES='7' shows no GPU"),
    ],
)
def test_more_gpus_than_there_are(
    monkeypatch: pytest.MonkeyPatch, device: str | None, environment: dict[str, str], first: int, words: str
) -> None:
    monkeypatch.setattr("snugfit.measurement.target.torch_cuda", lambda: "13.0")
    library = FakeNvml(FakeGpu(uuid=A), FakeGpu(uuid=B))
    with (
        pytest.raises(UsageError, match=words),
        open_targets(device, first, 3, environment=environment, library=library),
    ):
        pass
    assert library.open == 0


def test_gpus_are_taken_in_cudas_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.measurement.target.torch_cuda", lambda: "13.0")
    library = FakeNvml(FakeGpu(uuid=A), FakeGpu(uuid=B))
    shuffled = {"CUDA_VISIBLE_DEVICES": "1,0"}
    with open_targets(None, 0, 2, environment=shuffled, library=library) as targets:
        assert [target.card.uuid for target in targets if target.card] == [B, A]
        assert [target.torch_device for target in targets] == ["cuda:0", "cuda:1"]
        assert {target.visibility["CUDA_VISIBLE_DEVICES"] for target in targets} == {f"{B},{A}"}
    with open_targets(None, 1, 1, environment=shuffled, library=library) as (alone,):
        assert (alone.visibility, alone.torch_device) == ({"CUDA_VISIBLE_DEVICES": A}, "cuda:0")


def test_each_rank_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert rank_environment({}, 0, 1) == {}
    assert rank_environment({}, 1, 4)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({}, 1, 32)["OMP_NUM_THREADS"] == "1"
    assert rank_environment({"OMP_NUM_THREADS": "2"}, 1, 4)["OMP_NUM_THREADS"] == "2"
    halves = [set(QuietCore((rank, 2))._candidates) for rank in range(2)]
    assert halves == [set(range(0, 16, 2)), set(range(1, 16, 2))]
