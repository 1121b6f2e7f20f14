"""Commands in other Python environments, and comparisons of two environments."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.environments import changes, environment
from snugfit.features.environments.changes import EnvironmentPrediction, UpgradeCheck
from snugfit.features.environments.command import as_command
from snugfit.features.environments.environment import PythonEnvironment, find_environment
from snugfit.features.environments.pins import Pins
from snugfit.features.environments.worker import argument_names
from snugfit.report.show import render

TORCH = metadata.version("torch")


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Versions that every interpreter lists, so that no process starts. The cache is an empty folder."""
    listed = {one.name.lower().replace("_", "-"): one.version for one in metadata.distributions()}
    monkeypatch.setattr(PythonEnvironment, "installed", listed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return listed


def _folder(path: Path) -> Path:
    """Return the folder of an environment whose interpreter is this one."""
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    return path


def test_software_as_a_path_runs_the_command_in_that_environment() -> None:
    words = [
        "predict",
        "bert-base-uncased",
        "--software",
        "my env/.venv",
        "--install",
        "--recipe",
        "bf16 + sgd",
    ]
    command, name, line, install = as_command(words)
    assert (command, name, install) == ("run-in", "my env/.venv", "--install")
    assert shlex.split(line) == ["predict", "bert-base-uncased", "--recipe", "bf16 + sgd"]
    assert as_command(["plan", "x", "--software=pins.txt"]) == ["run-in", "pins.txt", "plan x"]


@pytest.mark.parametrize("value", ["installed", "published-2022", "publisht-2022", ""])
def test_the_name_of_a_profile_stays_with_the_command(value: str) -> None:
    words = ["predict", "bert-base-uncased", "--software", value]
    assert as_command(words) == words


def test_a_file_selects_the_environment_with_its_versions(present: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text(
        f"# pinned\n--index-url https://example.org\ntorch=={TORCH}  # CPU\nx==1; python_version < '3'\n"
    )
    assert find_environment(str(file)).python == Path(sys.executable)
    assert find_environment(str(_folder(tmp_path / "env"))).python == tmp_path / "env" / "bin" / "python"
    file.write_text("torch==2.0.0\nnothing-here>=1\n")
    with pytest.raises(UsageError, match=r"not ==2\.0\.0, nothing-here>=1 is not installed") as caught:
        find_environment(str(file))
    assert "--install" in str(caught.value)
    folder = environment.cached_folder(Pins.read(file))
    assert f"-m venv --clear {folder}" in str(caught.value)
    assert not folder.exists()
    # An interpreter in the cached folder lists the versions of this one, so the file's are made those.
    _folder(folder)
    present.update({"torch": "2.0.0", "nothing-here": "1.2"})
    with pytest.raises(UsageError, match=r"snugfit cannot run .* torch is 2.0.0, .* pip install"):
        find_environment(str(file))


def test_a_folder_is_compared_with_the_file_beside_it(present: dict[str, str], tmp_path: Path) -> None:
    folder = _folder(tmp_path / ".venv")
    (tmp_path / "requirements.txt").write_text("torch==2.0.0\n")
    with pytest.raises(UsageError, match=f"torch is {TORCH}, not ==2.0.0".replace("+", r"\+")):
        find_environment(str(folder))
    assert find_environment(str(folder / "bin" / "python")).python.parent == folder / "bin"


@pytest.mark.parametrize(
    ("text", "told"),
    [("-r other.txt", "line 1: '-r other.txt' is not a requirement"), ("# nothing", "names no package")],
)
def test_an_unusable_file_is_one_error(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=told):
        find_environment(str(file))


def test_no_environment_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "gpt2", "--software", str(tmp_path / "none" / "x.txt")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert run(["run-in", str(tmp_path), "predict gpt2"]) == 2
    assert "has no Python environment" in capsys.readouterr().err
    assert run(["train", "gpt2", "--software", "./pins.txt"]) == 2
    assert "use snugfit predict" in capsys.readouterr().err


def test_named_arguments_are_listed() -> None:
    def forward(self: object, ids: int, *, labels: int = 0, **rest: int) -> None: ...

    assert argument_names(forward) == ["ids", "labels"]
    assert {"python", "needed_bytes"} <= {*argument_names(EnvironmentPrediction)}


@pytest.mark.whole
def test_a_command_runs_in_the_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The interpreter is a script that adds a package, which the versions then contain."""
    extra = tmp_path / "site" / "only_there-7.0.dist-info"
    extra.mkdir(parents=True)
    (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: only-there\nVersion: 7.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}/site" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert find_environment(str(python)).installed["only-there"] == "7.0"
    assert run(["run-in", str(python), "--version"]) == 0
    assert capfd.readouterr().out.startswith("snugfit ")


def test_an_upgrade_lists_versions_bytes_kernels_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = {
        "old": EnvironmentPrediction(
            python="old", versions={"torch": "2.12.0"}, needed_bytes=1 << 30, kinds={"weights": 5, "x": 1},
            step_seconds=0.1, kernels={"element-wise": 10}, arguments={"BertConfig": ("a", "b")},
        ),
        "new": EnvironmentPrediction(
            python="new", versions={"torch": "2.13.0"}, needed_bytes=3 << 29, kinds={"weights": 5},
            step_seconds=0.2, kernels={"element-wise": 9}, arguments={"BertConfig": ("a", "c")},
        ),
    }  # fmt: skip
    monkeypatch.setattr(changes, "find_environment", lambda name, install: PythonEnvironment(Path(name)))
    monkeypatch.setattr(changes, "_predict_in", lambda one, question: sides[str(one.python)])
    checked: list[UpgradeCheck] = []
    original = changes.check_upgrade
    monkeypatch.setattr(
        changes, "check_upgrade", lambda *a, **k: checked.append(original(*a, **k)) or checked[-1]
    )
    assert run(["upgrade-check", "gpt2", "--from", "old", "--to", "new", "--json"]) == 0
    rows = {(one.unit, one.name): (one.before, one.after) for one in checked[0].changes}
    assert rows == {
        ("version", "torch"): ("2.12.0", "2.13.0"),
        ("bytes", "needed"): (1 << 30, 3 << 29),
        ("bytes", "x"): (1, None),
        ("seconds", "step"): (0.1, 0.2),
        ("kernels", "element-wise"): (10, 9),
    }
    assert [(one.added, one.removed) for one in checked[0].argument_changes] == [(("c",), ("b",))]
    assert UpgradeCheck.from_json(checked[0].to_json()) == checked[0]
    page = render(checked[0])
    assert "memory changes from 1.00 GiB to 1.50 GiB (+50.0 %)" in page.first_line
