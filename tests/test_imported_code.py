"""A measured run imports its code before it makes a model on the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

CODE = """
import sys
from small_models import small_job
from snugfit.measurement.child import _import_code_of
from snugfit.techniques.recipe import Recipe
for recipe in ("plain", "lora"):
    _import_code_of(small_job("bert"), Recipe.parse(recipe).setup())
    print(recipe, "peft" in sys.modules, "transformers.models.bert.modeling_bert" in sys.modules)
"""


def test_the_code_of_model_and_adapters_is_imported() -> None:
    """Else constants of peft's modules would be made on the GPU, within `with device`."""
    pytest.importorskip("peft")
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["plain False True", "lora True True"]
