"""Features of third parties: a small plugin is predicted, planned and trained, and a wrong one is refused."""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from clean_forks import Forks
from small_models import small_job
from snugfit import feature_folders
from snugfit.cli.main import run
from snugfit.cli.plan_cache import key_of
from snugfit.cli.plugins import named_plugins, without_plugins
from snugfit.errors import SnugfitError
from snugfit.versions import versions

FILES = {
    "__init__.py": """
INTERFACE = 1
__version__ = "0.3"
""",
    "fields.py": """
from snugfit.techniques.wish import Wish

FROZEN = Wish("frozen_biases", bool, False)
""",
    "thin.py": """
from dataclasses import dataclass

from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Thin(Technique):
    '''Leaves biases as they are loaded.'''

    fidelity = Fidelity.LEARNS
    source = "a test"

    def install(self, setup):
        return setup.with_fields(frozen_biases=True)
""",
    "feature.py": """
from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import Feature, InstallStage
from snugfit.techniques.technique import Slot

from .fields import FROZEN


class FrozenHandler(Handler):
    wish, slot, stage = FROZEN.name, Slot.KERNELS, InstallStage.ADAPT

    def replace_model(self, value, model):
        for name, weight in model.named_parameters() if value else ():
            weight.requires_grad_(not name.endswith("bias"))
        return model


class ThinBiases(Feature):
    techniques = {Slot.KERNELS: ("thin",)}

    def handlers(self):
        return (FrozenHandler(),)

    def first_step_seconds(self, setup, kernels, in_programs):
        return 100.0 if FROZEN.of(setup) else 0.0
""",
}
"""A technique that freezes biases, whose first step takes 100 seconds longer."""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    folder = tmp_path / "thin_biases"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def use_plugin(plugin: str, folder: str) -> int:
    """Import snugfit anew with the plugin, and use it. torch and transformers stay imported."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in {"snugfit", "small_models", "small_runs"}:
            del sys.modules[name]
    importlib.import_module("plugin_in_use").main(plugin, folder)
    return 0


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_plugin_is_predicted_planned_and_trained(plugin: Path, tmp_path: Path, forks: Forks) -> None:
    with (tmp_path / "printed").open("w+") as printed:
        process = forks.start(
            use_plugin, str(plugin), str(tmp_path / "run"), streams={1: printed.fileno(), 2: printed.fileno()}
        )
        code = forks.ended(process)
        printed.seek(0)
        text = printed.read()
    assert code == 0, text
    told = json.loads(text.splitlines()[-1])
    assert told["seconds"] == pytest.approx(100, abs=1)
    assert told["bytes"] > 0, "biases have no gradients and no states"
    assert told["version"].startswith("0.3+")
    assert "thin" in told["planned"][0]
    assert told["planned"][1] == told["version"]
    assert told["frozen"]
    assert all(name.endswith("bias") for name in told["frozen"])


def test_words_of_plugins_are_taken_from_anywhere_in_a_command(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: bert-large-uncased\nplugin: c, d\n")
    given = ["--plugin", "a", "predict", "--job", str(file), "--plugin=b"]
    assert named_plugins(given) == ["a", "b", "c", "d"]
    assert without_plugins(given) == ["predict", "--job", str(file)]


def test_a_digest_of_its_source_is_a_part_of_its_version(plugin: Path) -> None:
    before = feature_folders._digest(plugin)
    (plugin / "thin.py").write_text("")
    assert feature_folders._digest(plugin) != before


def test_stored_answers_and_journals_belong_to_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    job, keys = small_job("bert", 2), set[str | None]()
    for version in ("1", "2"):
        plugin = feature_folders.Plugin("thin", "thin", version)
        monkeypatch.setattr(feature_folders, "plugins", lambda plugin=plugin: (plugin,))
        keys.add(key_of(job))
        assert versions()["plugin thin"] == version
    assert len(keys) == 2


def loaded(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> feature_folders.Plugin:
    """Load the plugin for this test alone."""
    monkeypatch.delitem(sys.modules, plugin.name, raising=False)
    return feature_folders._load(str(plugin))


def test_a_plugin_that_is_not_there_is_refused() -> None:
    with pytest.raises(SnugfitError, match=r"No plugin 'thinner'.*installed: none.*folder"):
        feature_folders._load("thinner")


@pytest.mark.parametrize(("interface", "behind"), [("0", "the plugin"), ("2", "snugfit")])
def test_a_plugin_of_another_interface_is_refused(
    plugin: Path, monkeypatch: pytest.MonkeyPatch, interface: str, behind: str
) -> None:
    (plugin / "__init__.py").write_text(f"INTERFACE = {interface}")
    with pytest.raises(
        SnugfitError, match=rf"interface {interface}, and this snugfit has 1.*Update {behind}"
    ):
        loaded(plugin, monkeypatch)


def test_a_broken_import_of_a_plugin_is_one_error(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plugin / "fields.py").write_text("import no_such_package")
    found = loaded(plugin, monkeypatch)
    monkeypatch.setattr(feature_folders, "plugins", lambda: (found,))
    with pytest.raises(SnugfitError, match=r"thin_biases cannot be imported: ModuleNotFoundError: .*no_such"):
        feature_folders.import_feature("thin_biases.fields")
    (plugin / "__init__.py").write_text("1 / 0")
    with pytest.raises(SnugfitError, match="thin_biases cannot be imported: ZeroDivisionError"):
        loaded(plugin, monkeypatch)


def test_two_plugins_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(feature_folders.feature_packages()), "twin")
    twin = feature_folders.Plugin(name, "elsewhere", "1")
    monkeypatch.setattr(feature_folders, "plugins", lambda: (twin, twin))
    with pytest.raises(SnugfitError, match=f"Two features are called {name}"):
        feature_folders.feature_packages.__wrapped__()
    two = [SimpleNamespace(name="thin", dist=SimpleNamespace(name=package)) for package in ("one", "two")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: two)
    with pytest.raises(SnugfitError, match="Two packages have a plugin 'thin': one and two"):
        feature_folders._load("thin")


def test_a_folder_with_the_name_of_a_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "feature.py").write_text("")
    with pytest.raises(SnugfitError, match="a name that no Python module has"):
        feature_folders._load(str(tmp_path / "json"))


def test_a_plugin_that_comes_too_late_is_refused(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feature_folders.feature_packages()
    assert run(["techniques", "--plugin", str(plugin)]) == 2
    assert "comes too late" in capsys.readouterr().err
