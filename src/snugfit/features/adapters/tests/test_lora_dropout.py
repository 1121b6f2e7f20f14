"""LoRA's dropout is predicted to allocate as much as a real step does (law 1), and more than without
dropout."""

from __future__ import annotations

import pytest

from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import hold_to_reports, job
from tiers import slow_but


@pytest.mark.whole
@pytest.mark.parametrize("family", slow_but(["bert", "llama"], 1))
def test_a_real_step_with_dropout_allocates_what_its_trace_says(family: str) -> None:
    hold_to_reports(job(family), Recipe.parse("lora(targets=all-linear, dropout=0.1)"))


def test_dropout_keeps_a_mask_and_an_input_for_each_matrix() -> None:
    without, dropping = (
        predict(job("llama"), recipe, gpu="h200").footprint.requested_bytes
        for recipe in ("lora(targets=all-linear)", "lora(targets=all-linear, dropout=0.1)")
    )
    assert dropping > without
