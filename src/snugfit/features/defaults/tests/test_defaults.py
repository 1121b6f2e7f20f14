"""The user's own defaults complete a command, and everything that the user gives overrides them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from snugfit.cli.main import run
from snugfit.cli.request import Request

ALL: dict[str, Any] = dict.fromkeys(("gpu", "headroom", "memory", "job_file", "settings"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "snugfit" / "config.yaml"
    file.parent.mkdir()
    file.write_text("gpu: rtx 4090\nheadroom: 1GiB\n")
    return file


def read(**given: Any) -> Request:
    return Request.read({**ALL, "model": "bert-base-uncased", **given})


def gpu_of(request: Request) -> str | None:
    return request.gpu and request.gpu.key


def test_the_file_completes_a_command_and_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = read()
    assert (gpu_of(request), request.headroom) == ("RTX4090", "1GiB")
    assert f"gpu: rtx 4090, from {config}" in capsys.readouterr().err


def test_variables_override_the_file_and_all_else_overrides_both(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNUGFIT_GPU", "l4")
    assert gpu_of(read()) == "L4"
    assert "from SNUGFIT_GPU" in capsys.readouterr().err
    job = tmp_path / "job.yaml"
    job.write_text("gpu: a10g\n")
    assert gpu_of(read(job_file=job)) == "A10G"
    assert gpu_of(read(gpu="v100-16gb", job_file=job)) == "V100-SXM2-16"
    assert gpu_of(read(memory="24GiB")) is None, "this memory describes another GPU"
    assert "gpu:" not in capsys.readouterr().err
    here = {key: value for key, value in ALL.items() if key != "memory"}
    measured = Request.read({**here, "model": "bert-base-uncased"})
    assert gpu_of(measured) is None, "such a command runs on the GPU that is there"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus: 2", "'gpus' has no default of your own. Did you mean 'gpu'? Allowed: gpu, headroom."),
        ("- gpu", "Write lines such as `gpu: rtx 4090`"),
        ("gpu: [l4]", "gpu is ['l4']; it must be a text"),
        ("gpu: l4\ngpu: l4", "config.yaml, line 2"),
    ],
)
def test_a_wrong_file_is_one_error(
    text: str, told: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    assert run(["predict", "bert-base-uncased"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert str(config) in error


def test_an_empty_file_is_none(config: Path) -> None:
    config.write_text("# nothing yet\n")
    assert gpu_of(read()) is None
