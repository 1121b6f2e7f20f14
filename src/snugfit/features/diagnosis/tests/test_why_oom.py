"""The command `why-oom`: its input, its report, its JSON, and the tensor of a predicted step."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from json_schema_faults import faults
from snugfit.cli.main import run
from snugfit.features.diagnosis.result import (
    Diagnosis,
    FailureKind,
    Ledger,
    LiveTensors,
    RequestedTensor,
    SegmentUse,
    SuggestedChange,
)
from snugfit.results.prediction import Prediction
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut

pytestmark = pytest.mark.stored_rehearsals

ROOT = Path(__file__).parents[5]
JOB = ["--for", "distilbert-base-uncased", "--task", "sequence-classification", "--batch-size", "64",
       "--sequence-length", "256"]  # fmt: skip
LOG = (
    "RuntimeError: CUDA out of memory. Tried to allocate {size} (GPU 0; 11.91 GiB total capacity; {live} GiB "
    "already allocated; 11.00 MiB free; 11.60 GiB reserved in total by PyTorch)"
)


def answered(log: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["why-oom", str(log), *options, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "run.log"
    path.write_text(LOG.format(size="192.00 MiB", live="5.47"))
    return path


def test_the_tensor_is_found_in_the_predicted_step(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """192 MiB are 64 × 256 × 3,072 fp32 numbers: activations of the MLP. The bytes of live tensors select one
    of them.
    """
    first = answered(log, *JOB, capsys=capsys)["candidates"][0]
    assert first["module"].startswith("distilbert.transformer.layer.*.ffn")
    assert (first["phase"], first["bytes"], first["count"]) == ("backward", 64 * 256 * 3072 * 4, 6)
    assert "×3072" in first["shapes"]
    log.write_text(LOG.format(size="192.00 MiB", live="1.60"))
    assert answered(log, *JOB, capsys=capsys)["candidates"][0]["phase"] == "forward"


def test_a_size_that_the_step_lacks_is_stated(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(LOG.format(size="1.30 GiB", live="5.47"))
    document = answered(log, *JOB, capsys=capsys)
    assert document["candidates"] == []
    assert any(note.startswith("No tensor of the predicted step has this size") for note in document["notes"])


def test_a_job_comes_from_a_configuration(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "args.json"
    script.write_text(json.dumps({"per_device_train_batch_size": 64, "max_grad_norm": 0, "output_dir": "o"}))
    model = [
        "--for",
        "distilbert-base-uncased",
        "--task",
        "sequence-classification",
        "--sequence-length",
        "256",
    ]
    document = answered(log, *model, "--arguments", str(script), capsys=capsys)
    assert {"16384×768, 768×3072"} & {one["shapes"] for one in document["candidates"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.log"], "no such log or snapshot"),
        (["{empty}"], "empty"),
        (["{zipped}"], "Unpack it first"),
        (["{packed}"], "Unpack it first"),
        (["{log}", "--batch-size", "4"], "--batch-size needs a model. Add --for MODEL."),
        (["{log}", "--gpu", "h200"], "--gpu needs a model"),
        (["{log}", *JOB, "--recipe", "auto"], "auto"),
        (["."], "not a regular file"),
    ],
)
def test_a_mistake_is_one_error(
    words: list[str], message: str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "zipped").write_bytes(b"\x1f\x8b\x08abc")
    (tmp_path / "packed").write_bytes(b"\xfd7zXZ\x00abc")
    files = {name: str(tmp_path / name) for name in ("empty", "zipped", "packed")} | {"log": str(log)}
    assert run(["why-oom", *(word.format(**files) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_the_shown_answer_is_the_command_s_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = importlib.import_module("write_docs")
    monkeypatch.chdir(ROOT)
    [(command, text)] = [one for one in written.shown_answers() if one[0].startswith("snugfit why-oom")]
    assert run(command.split()[1:]) == 0
    assert written.as_shown(capsys.readouterr().out, text) == text, "run: python lab/write_docs.py answers"


def test_a_failure_of_the_host_is_not_compared_with_the_job(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text("run.sh: line 2: 77 Killed   python t.py")
    assert "job was not compared" in answered(log, *JOB, capsys=capsys)["notes"][-1]


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"run.sh: line 2: 77 Killed   python t.py"))
    )
    assert run(["why-oom", "-"]) == 0
    assert "Memory of the host." in capsys.readouterr().out


def test_changes_fit_the_memory_that_other_processes_leave(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[int | None] = []

    def searched(prediction: Prediction, **_: Any) -> WaysOut | None:
        limits.append(prediction.memory_bytes)
        return everything().ways_out

    monkeypatch.setattr("snugfit.features.ways_out.search.ways_out", searched)
    log.write_text(
        "CUDA out of memory. Tried to allocate 192.00 MiB. GPU 0 has a total capacity of 11.63 GiB of "
        "which 90.00 MiB is free. Process 5 has 6.60 GiB memory in use. Including non-PyTorch memory, this "
        "process has 4.94 GiB memory in use. Of the allocated memory 4.20 GiB is allocated by PyTorch, and "
        "100.00 MiB is reserved by PyTorch but unallocated."
    )
    assert run(["why-oom", str(log), *JOB, "--gpu", "rtx 3060"]) == 0
    printed = capsys.readouterr().out
    assert limits == [pytest.approx((11.63 - 6.60) * 2**30)]
    assert "that fit, the cheapest first" in printed
    assert "General changes" not in printed


def test_a_run_that_needs_more_than_its_prediction_gets_changes_with_more_room(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The predicted step fits a GPU of 7 GiB, but the run needed 600 MiB more and failed."""
    limits: list[tuple[bool | None, int]] = []

    def searched(prediction: Prediction, **_: Any) -> WaysOut | None:
        limits.append((prediction.fits, prediction.memory_bytes or 0))
        return everything().ways_out

    monkeypatch.setattr("snugfit.features.ways_out.search.ways_out", searched)
    log.write_text(
        LOG.format(size="600.00 MiB", live="6.35").replace("11.91", "7.00").replace("11.60", "6.36")
    )
    document = answered(log, *JOB, "--gpu", "rtx 3060", capsys=capsys)
    [(fits, limit)] = limits
    assert fits is False
    assert limit < 7 * 2**30
    assert any("The changes leave as much free" in one for one in document["notes"])


@pytest.mark.whole
def test_a_text_is_diagnosed_without_torch_in_two_seconds(log: Path) -> None:
    code = (
        "import sys, resource; from snugfit.cli.main import run; run(['why-oom', sys.argv[1]]);"
        "use = resource.getrusage(resource.RUSAGE_SELF);"
        "print(not {'torch', 'transformers', 'numpy'} & set(sys.modules), use.ru_utime + use.ru_stime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(log)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    light, seconds = done.stdout.split()[-2:]
    assert light == "True"
    assert float(seconds) < 2


def everything() -> Diagnosis:
    """Return a diagnosis in which no part is empty."""
    way = WayOut(
        recipe="bf16",
        changes=("bf16",),
        needed_bytes=1,
        spare_bytes=1,
        step_seconds=None,
        slowdown=None,
        fidelity="rounds",
    )
    larger = LargerGpu(gpu="h200", memory_bytes=2, recipe="bf16", needed_bytes=1, step_seconds=None)
    return Diagnosis(
        kind=FailureKind.SHORTAGE,
        summary="Too little.",
        source="text",
        line=1,
        ledger=Ledger(total_bytes=5),
        candidates=(
            RequestedTensor(
                module="", operator="mm", phase="forward", kind="activations", bytes=1, count=1, shapes="1",
                live_bytes=None, guess=False,
            ),
        ),
        live=(LiveTensors(code="f (a.py:1)", bytes=1, count=1),),
        segments=SegmentUse(
            segments=1, partly_used=1, unallocated_bytes=1, largest_free_bytes=1, expandable=False
        ),
        changes=(SuggestedChange(change="a", effect="b"),),
        ways_out=WaysOut(ways=(way,), larger_gpu=larger),
        notes=("one",),
    )  # fmt: skip


def test_the_json_is_valid_against_the_schema() -> None:
    schema = pytest.importorskip("snugfit.features.schema.json_schema").schema_of("why-oom")
    seen: set[tuple[str, str]] = set()
    assert faults(schema, json.loads(json.dumps(everything().to_json())), seen) == []
    known = {(owner, name) for owner, one in schema["$defs"].items() for name in one["properties"]}
    assert known - seen == set()
    assert all(
        value.get("description") for one in schema["$defs"].values() for value in one["properties"].values()
    )
