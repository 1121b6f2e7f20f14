"""A measured run imports its code before it makes a model on the GPU."""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clean_forks import forks_of
from small_models import small_job
from snugfit.job import architectures
from snugfit.measurement.child import _import_code_of
from snugfit.techniques.recipe import Recipe

MODEL = "transformers.models.vit.modeling_vit"


def imports(told: str) -> int:
    """Write the modules, of these two, that a plain run and one with adapters import; the process starts
    with neither."""
    assert not {MODEL, "peft"} & sys.modules.keys()
    seen = {}
    for recipe in ("plain", "lora"):
        _import_code_of(small_job("vit"), Recipe.parse(recipe).setup())
        seen[recipe] = ["peft" in sys.modules, MODEL in sys.modules]
    Path(told).write_text(json.dumps(seen))
    return 0


@pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
def test_the_code_of_model_and_adapters_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later import would make constants of peft's modules on the GPU, inside `with device`."""
    classes: list[Any] = []
    packages: list[str] = []
    class_of, import_module = architectures.class_of, importlib.import_module

    def note_class(*asked: Any) -> Any:
        classes.append(class_of(*asked))
        return classes[-1]

    def note_package(name: str, *more: Any) -> Any:
        if name != "peft":
            return import_module(name, *more)
        return packages.append(name)

    monkeypatch.setattr(architectures, "class_of", note_class)
    monkeypatch.setattr(importlib, "import_module", note_package)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    for recipe, asked in (("plain", []), ("lora", ["peft"])):
        _import_code_of(small_job("vit"), Recipe.parse(recipe).setup())
        assert (classes.pop().__module__, packages) == (MODEL, asked)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
def test_the_code_of_model_and_adapters_is_imported(tmp_path: Path) -> None:
    forks = forks_of(__name__, bare=True)
    assert forks.ended(forks.start(imports, str(tmp_path / "told"))) == 0
    assert json.loads((tmp_path / "told").read_text()) == {"plain": [False, True], "lora": [True, True]}
