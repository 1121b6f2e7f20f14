"""The installation: declared packages, a small core, and one line for a package that is not installed."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from small_models import small_job
from snugfit import measure, train
from snugfit.cli.main import run
from snugfit.errors import EXTRAS, UsageError, missing_package_message, require_packages
from source_trees import FILES, nodes_of, tree_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

IMPORTED_AS = {
    "PIL": "pillow",
    "cpuinfo": "py-cpuinfo",
    "huggingface_hub": "huggingface-hub",
    "liger_kernel": "liger-kernel",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
"""Packages by the name under which Python imports them, where it is another one."""

OF_THE_USER = {"IPython", "torch_tensorrt"}
"""Packages that are imported only where the user has installed them: a notebook, and TensorRT."""


def names(requirements: list[str]) -> set[str]:
    return {Requirement(text).name for text in requirements}


def imported() -> Iterator[str]:
    """Yield the packages that the source imports, in functions too."""
    for path in FILES:
        for node in nodes_of(tree_of(path)):
            modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from (module.partition(".")[0] for module in modules)


def test_each_imported_package_is_declared() -> None:
    packages = set(imported()) - sys.stdlib_module_names - OF_THE_USER - {"snugfit"}
    declared = names(PROJECT["dependencies"]).union(*map(names, PROJECT["optional-dependencies"].values()))
    assert {"torch", "psutil"} <= packages
    assert {IMPORTED_AS.get(package, package) for package in packages} - declared == set()


def test_the_core_has_fewer_than_ten_packages() -> None:
    assert len(PROJECT["dependencies"]) < 10


def test_the_extra_of_a_message_installs_the_package() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, argument in EXTRAS.items():
        [extra] = [name for name in extras if argument == f'"snugfit[{name}]"']
        assert IMPORTED_AS.get(package, package) in names(extras[extra])


def test_all_has_each_extra() -> None:
    [whole] = PROJECT["optional-dependencies"]["all"]
    parts = Requirement(whole).extras
    own = set().union(*(names(PROJECT["optional-dependencies"][part]) for part in parts))
    for name, requirements in PROJECT["optional-dependencies"].items():
        assert name in ("all", "dev", "docs") or names(requirements) <= own | {"snugfit"}


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the packages of extras, as in an installation without them."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in EXTRAS else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "measure bert-base-uncased",
            'snugfit measure needs psutil, which is not installed. Try: pip install "snugfit[train]"',
        ),
        (
            "predict bert-base-uncased --plot a.png",
            '--plot needs matplotlib, which is not installed. Try: pip install "snugfit[plots]"',
        ),
    ],
)
def test_a_command_names_its_extra_in_one_line(
    command: str, message: str, light: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"snugfit: {message}"


def test_a_function_names_its_extra(light: None, tmp_path: Path) -> None:
    job = small_job("bert", 1)
    for call in (lambda: measure(job), lambda: train(job, "plain", [], output_dir=tmp_path)):
        with pytest.raises(UsageError, match=r'needs psutil.*"snugfit\[train\]"'):
            call()


def test_an_import_that_fails_later_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'nothing_here.part'", name="nothing_here.part")

    monkeypatch.setattr("snugfit.features.doctor.examine.examine", fail)
    assert run(["doctor"]) == 2
    message = "snugfit doctor needs nothing_here, which is not installed. Try: pip install nothing_here"
    assert capsys.readouterr().err == f"snugfit: {message}\n"


def test_an_installed_package_is_not_required_again() -> None:
    require_packages("A test", "numpy", "yaml")
    assert missing_package_message("A test", ModuleNotFoundError("No module named 'numpy.nothing'")) is None
