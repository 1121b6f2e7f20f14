"""Default modules for adapters without targets in a recipe, and errors for names without a module."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.adapters import low_rank
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from test_bad_input_models import BERT, job_of


@pytest.mark.parametrize("facts", [BERT | {"model_type": "modernbert"}, {"model_type": "vit"}])
def test_lora_without_known_targets_adapts_all_linear_layers_and_says_so(facts: dict[str, Any]) -> None:
    task = "image-classification" if facts["model_type"] == "vit" else "masked-lm"
    (said,) = Recipe.parse("lora").check(job_of(facts, task))
    assert re.search(rf"no default targets for {facts['model_type']}.*lora\(targets=all-linear\)", said)
    assert not Recipe.parse("lora(targets=all-linear)").check(job_of(facts, task))
    assert not Recipe.parse("lora").check(job_of(BERT, "masked-lm"))


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("lora(r=4)", [2, 2]),
        ("lora(r=4, alpha=12.0)", [3, 3]),
        ("lora(r=4, alpha=0.5)", [0.125, 0.125]),
        ("lora(r=4, rslora=true, alpha=12)", [6, 6]),
        ("lora(r=4, alpha_pattern='value:2.5')", [2, 0.625]),
    ],
)
def test_updates_are_scaled_by_alpha(text: str, scales: list[float]) -> None:
    pytest.importorskip("peft", reason="the extra peft is not installed")
    job, recipe = small_job("bert", 1), Recipe.parse(text)
    model = build_model(job, recipe.setup(), torch.device("meta"))
    scaled = [layer for layer in model.modules() if hasattr(layer, "scaling") and hasattr(layer, "lora_A")]
    assert [layer.scaling["default"] for layer in scaled] == scales
    written = recipe[Slot.ADAPTERS].code(job)[-1]
    assert ("lora_alpha=12" in written) == ("alpha=12" in text)
    assert ('alpha_pattern={"value": 2.5}' in written) == ("alpha_pattern" in text)
    assert str(recipe) == text.replace(".0", "")


@pytest.mark.parametrize("word", ["alpha=0", "alpha_pattern='value:0'", "alpha_pattern='value:x'"])
def test_an_invalid_alpha_is_named(word: str) -> None:
    with pytest.raises(RecipeError, match=f"lora: {word.partition('=')[0]} "):
        Recipe.parse(f"lora({word})")


def test_peft_s_table_read_from_its_source_is_the_imported_one() -> None:
    peft = pytest.importorskip("peft.utils.constants", reason="the extra peft is not installed")
    assert low_rank.pefts_table() == peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


def test_a_target_that_is_not_there_is_one_clear_error() -> None:
    pytest.importorskip("peft", reason="the extra peft is not installed")
    with pytest.raises(RecipeError, match=r"nothing to adapt.*all-linear"):
        build_model(
            job_of(BERT, "masked-lm"), Recipe.parse("lora(targets=q_proj)").setup(), torch.device("meta")
        )
