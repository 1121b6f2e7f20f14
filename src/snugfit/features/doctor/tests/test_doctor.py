"""The examination of a machine with and without GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fake_nvml import H200_RESERVE, FakeGpu, FakeNvml
from snugfit.cli.main import run
from snugfit.features.doctor.environment import environment
from snugfit.features.doctor.environment import render as render_environment
from snugfit.features.doctor.examine import GpuStatus, examine
from snugfit.features.doctor.feature import DoctorFeature
from snugfit.features.doctor.tables import render
from snugfit.report.text.terminal import as_text
from snugfit.units import MIB
from test_reference import hold_to_schema

A, B = (f"GPU-{digit * 8}-aaaa-bbbb-cccc-000000000000" for digit in "12")


def machine(**first: Any) -> FakeNvml:
    return FakeNvml(FakeGpu(uuid=A, used=4000 * MIB, **first), FakeGpu(uuid=B, used=50 * MIB))


def test_the_doctor_tells_what_is_there() -> None:
    found = examine(library=machine(processes=[(1, None)]), environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert found.nvml is None
    assert [(gpu.uuid, gpu.processes) for gpu in found.gpus] == [(A, 1), (B, 0)]
    assert found.gpus[0].reserve_bytes == H200_RESERVE
    assert all(package.version for package in found.packages if package.required)
    assert found.visible_devices == "1"
    assert json.loads(json.dumps(found.to_json()))["what"] == "doctor"


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [
        ("Linux", "5.15.153.1-microsoft-standard-WSL2", True),
        ("Linux", "4.4.0-19041-Microsoft", True),
        ("Windows", "11", True),
        ("Linux", "6.8.0-45-generic", False),
    ],
)
def test_a_driver_that_goes_on_in_the_host_s_memory_is_told(
    system: str, release: str, spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.release", lambda: release)
    found = examine(library=machine())
    assert (found.spills is not None) == spills
    shown = " ".join(as_text(render(found)).split())
    assert ("instead of refusing it" in shown) == spills


def test_the_doctor_knows_extras_from_the_roster() -> None:
    extras = {extra.name: extra for extra in examine(library=machine()).extras}
    assert extras
    assert all(extra.techniques for extra in extras.values())


@pytest.mark.parametrize(
    ("build", "library", "environment", "reason"),
    [
        (None, machine(), {}, "without CUDA"),
        ("13.0", FakeNvml(absent=True), {}, "no NVIDIA driver was found: .*Not Found"),
        ("13.0", FakeNvml(), {}, "finds no GPU"),
        ("13.0", machine(), {"CUDA_VISIBLE_DEVICES": "-1"}, "hides every GPU"),
    ],
)
def test_the_doctor_tells_why_not(
    monkeypatch: pytest.MonkeyPatch,
    build: str | None,
    library: FakeNvml,
    environment: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.setattr("snugfit.features.doctor.examine.torch_cuda", lambda: build)
    found = examine(library=library, environment=environment)
    assert not found.cuda_usable
    assert found.cuda_reason is not None
    assert re.search(reason, found.cuda_reason)


def test_the_doctor_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.features.doctor.examine.torch_cuda", lambda: "13.0")
    found = examine(library=machine(), environment={})
    assert (found.cuda_usable, found.cuda_reason, found.driver) == (True, None, "580.159.04")


def test_a_gpu_that_does_not_answer_is_found_with_its_fault() -> None:
    (gpu,) = examine(library=FakeNvml(FakeGpu(lost=True)), environment={}).gpus
    assert gpu.total_bytes is None
    assert "lost" in str(gpu.fault)


def test_the_document_is_that_of_the_schema() -> None:
    card = GpuStatus(
        name="H200", uuid="GPU-1", compute_capability=(9, 0), total_bytes=1, used_bytes=0, reserve_bytes=None,
        processes=0,
    )  # fmt: skip
    found = replace(examine(library=machine()), gpus=(card,))
    reported = environment(machine())
    hold_to_schema(DoctorFeature().documents(), [("doctor --json", found), ("env --json", reported)])


def test_a_bug_report_has_versions_builds_and_gpus_but_no_uuid(capsys: pytest.CaptureFixture[str]) -> None:
    found = environment(machine())
    assert {"python", "snugfit", "torch", "transformers"} <= set(found.versions)
    assert [(gpu.name, gpu.compute_capability) for gpu in found.gpus] == [("NVIDIA H200", (9, 0))] * 2
    shown = as_text(render_environment(found))
    assert re.search(r"GPU +NVIDIA H200, 140\.40 GiB, compute capability 9\.0", shown)
    assert A not in shown + json.dumps(found.to_json())
    assert run(["env"]) == 0
    assert f"torch        {found.versions['torch']} (" in capsys.readouterr().out
    assert run(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == found.versions


@pytest.mark.parametrize(
    ("origin", "build"),
    [
        (None, "package index"),
        ('{"url": "file:///a", "dir_info": {"editable": true}}', "editable"),
        ('{"url": "file:///a.whl", "archive_info": {}}', "local file"),
        ('{"url": "https://a", "vcs_info": {"vcs": "git", "commit_id": "1f"}}', "commit 1f"),
    ],
)
def test_a_bug_report_has_the_origin_of_the_installation(
    origin: str | None, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str) -> SimpleNamespace:
        return SimpleNamespace(read_text=lambda file: {"direct_url.json": origin}[file])

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    assert environment(machine()).build == build


def test_the_command_prints_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "doctor"
    assert run(["doctor"]) == 0
    assert "This machine" in capsys.readouterr().out
