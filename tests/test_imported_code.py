"""A measured run imports its code before it makes a model on the GPU."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from clean_forks import forks_of
from small_models import small_job
from snugfit.measurement.child import _import_code_of
from snugfit.techniques.recipe import Recipe

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

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


def test_the_code_of_model_and_adapters_is_imported(tmp_path: Path) -> None:
    """A later import would make constants of peft's modules on the GPU, inside `with device`."""
    if not find_spec("peft"):
        pytest.skip("peft is not installed")
    forks = forks_of(__name__, bare=True)
    assert forks.ended(forks.start(imports, str(tmp_path / "told"))) == 0
    assert json.loads((tmp_path / "told").read_text()) == {"plain": [False, True], "lora": [True, True]}
