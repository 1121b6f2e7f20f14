"""Techniques that can be combined with activation offloading, and those that cannot."""

from __future__ import annotations

import pytest

from in_roster import needs_techniques
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.job.gpu import find_gpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.rehearsal import few_layers
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import hold_to_reports, job


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("host(what=all) + captured", "was not tested in a step that is recorded"),
        ("host(what=all) + compiled(what=model)", "not moved"),
        ("hsdp(2) + host(all)", "is not simulated together with host"),
        ("zero3 + host(all)", "is not simulated together"),
    ],
)
def test_what_it_does_not_go_with_is_named(recipe: str, why: str) -> None:
    needs_techniques(recipe)
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job("llama"), installed=False)


def test_its_step_is_simulated_at_the_whole_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "DEEP", 4)
    monkeypatch.setattr(few_layers, "FEWEST_PERIODS", 2)
    monkeypatch.setattr(few_layers, "WRITTEN_SHARE", 0)
    deep, policy = small_job("bert", 9, batch_size=8), policy_for(find_gpu("h200"), Software())
    assert few_layers.rehearse_from_few_layers(deep, Recipe.parse("bf16").setup(), policy) is not None
    assert few_layers.rehearse_from_few_layers(deep, Recipe.parse("host(all)").setup(), policy) is None


@pytest.mark.whole
@pytest.mark.slow
def test_inputs_of_the_first_layers_wait_on_the_host() -> None:
    hold_to_reports(job("t5"), Recipe.parse("bf16 + first_layers(1) + host(checkpoints)"))
