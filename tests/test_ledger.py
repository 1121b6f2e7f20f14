"""The ledger: a run is a complete folder, and no name leads to a path outside of it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from snugfit.errors import SnugfitError, UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement import ledger
from snugfit.results.footprint import Footprint, Timing
from snugfit.results.measurement import Device, Measurement
from snugfit.techniques.recipe import Recipe

FACTS = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def measured(name: str = "bert-tiny") -> Measurement:
    job = Job(model=Model.from_config(FACTS, name=name), task=Task.MASKED_LM, sequence_length=16)
    return Measurement(
        job=job,
        recipe=Recipe.parse("bf16 + micro_batches(2)"),
        loop="plain",
        device=Device(
            type="cuda", name="NVIDIA H200", uuid="GPU-1", total_bytes=1 << 37, reserve_bytes=1 << 29
        ),
        outcome="ok",
        footprint=Footprint(
            requested_bytes=1, allocated_bytes=512, reserved_bytes=1 << 21, nvml_bytes=1 << 29
        ),
        timing=Timing(step_seconds=0.1, spread=0.01, samples_per_second=40.0, steps=2, seconds=(0.1, 0.1)),
        versions={"torch": "2.13.0"},
        when="2026-11-20T13:50:00+00:00",
        losses=(0.7, 0.6),
    )


def read(folder: Path) -> Measurement:
    return Measurement.from_json(json.loads((folder / "measurement.json").read_text()))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = ledger.write(tmp_path, measured(), "last words\n")
    assert read(folder) == measured()
    assert sorted(os.listdir(folder)) == ["measurement.json", "stderr.txt"]
    assert (folder / "stderr.txt").read_text() == "last words\n"


def test_a_dead_run_is_kept_too(tmp_path: Path) -> None:
    died = replace(measured(), outcome="signal:SEGV", footprint=None, timing=None, losses=(), message="Fatal")
    assert read(ledger.write(tmp_path, died, "")) == died


def test_a_loss_that_is_no_number_is_null_in_the_file(tmp_path: Path) -> None:
    folder = ledger.write(tmp_path, replace(measured(), losses=(0.5, math.nan, math.inf)), "")
    text = (folder / "measurement.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["losses"] == [0.5, None, None]
    assert math.isnan(read(folder).losses[1])


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/abs",
        "a/b",
        "..",
        ".hidden",
        "",
        "\x00",
        "CON",
        "x" * 400,
        "名前",
        "<script>",
        "a\nb",
        "-rf",
    ],
)
def test_no_name_leads_out_of_the_ledger(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    with ledger.open_ledger(root):
        folder = ledger.write(root, measured(name), "")
    assert folder.parent == root
    assert os.listdir(tmp_path) == ["runs"]
    assert folder.name.isascii()
    assert set(folder.name.lower()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(folder.name) < 100


def test_runs_of_one_second_do_not_meet(tmp_path: Path) -> None:
    assert len({ledger.write(tmp_path, measured(), "") for _ in range(20)}) == 20


def test_a_disk_that_fails_leaves_no_half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SnugfitError, match="No space left on device"):
        ledger.write(tmp_path, measured(), "")
    assert os.listdir(tmp_path) == []


def test_a_ledger_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="cannot be created"), ledger.open_ledger(tmp_path / "runs"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="Requires: [a user whom the file system can refuse]")
def test_a_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o500)
    with pytest.raises(UsageError, match="cannot be written"), ledger.open_ledger(tmp_path / "runs"):
        pass


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="Requires: [Linux's /proc]")
def test_a_ledger_that_takes_no_file_from_anyone() -> None:
    with pytest.raises(UsageError, match="nothing can be written"), ledger.open_ledger(Path("/proc")):
        pass


def test_a_run_that_leaves_nothing_to_keep_leaves_no_folder(tmp_path: Path) -> None:
    def interrupted(root: Path) -> None:
        with ledger.open_ledger(root):
            assert root.is_dir()
            raise KeyboardInterrupt

    for root in (tmp_path / "new" / "runs", tmp_path):
        with pytest.raises(KeyboardInterrupt):
            interrupted(root)
    assert os.listdir(tmp_path) == []
