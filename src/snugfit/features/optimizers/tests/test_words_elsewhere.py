"""Optimizer names of other libraries are mapped to a technique of snugfit, or to an error with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from snugfit.cli.jobfile import read_job_file
from snugfit.errors import RecipeError, UsageError
from snugfit.techniques import roster

REASONS = {
    "apollo_adamw": "CC BY-NC",
    "galore_adamw_8bit": "'galore'",
    "adamw_torch_4bit": "torchao",
    "adalomo": "'sgd \\+ released' updates each weight in the backward pass",
    "paged_lion_8bit": "bits=8",
    "offload_optimizer": "'host_adamw'",
}


@pytest.mark.parametrize("word", REASONS)
def test_a_word_of_a_recipe_is_answered_with_the_reason(word: str) -> None:
    with pytest.raises(RecipeError, match=REASONS[word]):
        roster.find(word)


def test_a_misspelt_word_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="'adamw_8bit'"):
        roster.find("adamw_8bits")


def test_a_key_of_a_job_file_is_answered_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("optim: apollo_adamw\n")
    with pytest.raises(UsageError, match="licence"):
        read_job_file(file)
