"""Files for GitHub, pre-commit and containers run the commands of this repository, with its versions."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from snugfit.cli.main import run
from test_examples import figures, run_cell, stored

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / ".pre-commit-hooks.yaml").exists():
    pytest.skip("a copy without the hidden files of the repository", allow_module_level=True)
DOCKERFILES = sorted((ROOT / "container").glob("*.Dockerfile"))


def test_the_workflow_runs_the_steps_of_ci() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands[2:] == re.findall(r"^make .*", (ROOT / ".ci/run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("file", [".github/workflows/ci.yml", "action.yml"])
def test_foreign_actions_are_pinned_by_commit(file: str) -> None:
    uses = re.findall(r"uses: (\S+)", (ROOT / file).read_text())
    assert uses
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one) for one in uses)


def checks() -> list[str]:
    """Return the commands of the hook and of the Action, as they begin before the names of the files."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    *_, step = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    return [hook["entry"], step["run"].strip().removesuffix(" $FILES")]


@pytest.mark.parametrize("command", checks())
def test_hook_and_action_check_several_files(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("snugfit.features.exchange", reason="the feature exchange is not there")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("eval_strategy: steps\nmax_steps: 3\n")
    bad.write_text("evaluation_strategy: steps\nmax_steps: 3\n")
    program, *words = shlex.split(command)
    assert program == "snugfit"
    assert run([*words, str(good), str(good)]) == 0
    assert run([*words, str(good), str(bad)]) == 3
    told = capsys.readouterr().out
    assert "good.yaml (TrainingArguments): nothing found." in told
    assert "rename evaluation_strategy to eval_strategy" in " ".join(told.split())


def test_the_hook_names_its_files() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    names = ["conf/training_args.json", "ds_config_zero3.json", "deepspeed.yml", "axolotl-8b.yaml"]
    assert all(re.search(hook["files"], name) for name in names)
    assert not any(
        re.search(hook["files"], name) for name in ["package.json", "src/model.py", "axolotl/a.md"]
    )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_has_the_tested_torch_and_no_root(path: Path) -> None:
    lines = path.read_text().splitlines()
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if "torch==" in line)
    assert any(line.endswith(f" {torch}") for line in lines)
    assert [line for line in lines if line.startswith("USER ")] == ["USER snugfit"]
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", path.read_text(), re.MULTILINE)


def test_an_image_installs_the_dependencies_of_the_package() -> None:
    requirements = runpy.run_path(str(ROOT / "container/dependencies.py"))["requirements"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(requirements(project, [])) == project["dependencies"]
    nested = {"name": "p", "dependencies": ["a"], "optional-dependencies": {"x": ["b"], "y": ["c", "p[x]"]}}
    assert list(requirements(nested, ["y"])) == ["a", "c", "b"]
    with pytest.raises(SystemExit, match=r"'z' is no extra of p\. Extras: x, y"):
        list(requirements(nested, ["z"]))


@pytest.mark.slow
@pytest.mark.whole
def test_the_notebook_that_starts_from_a_wheel_shows_what_its_cells_compute() -> None:
    notebook = json.loads((ROOT / "examples/start.ipynb").read_text())
    install, *cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert install["source"][-1] == "%pip install --quiet {wheel}"
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        printed, _ = run_cell("".join(cell["source"]), names)
        assert figures(printed) == figures(stored(cell, "stream"))
