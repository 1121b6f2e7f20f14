"""Plans of generation: kinds of caches as techniques, and slots that the phase does not use."""

from __future__ import annotations

import pytest
from generating_models import generating_job

from kept import kept
from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import RecipeError
from snugfit.planning.search.search import plan
from snugfit.planning.search.space import space_of
from snugfit.prediction.predict import predict
from snugfit.report.plan.next_steps import job_words
from snugfit.techniques.recipe import Recipe, unused_slots
from snugfit.techniques.technique import Fidelity, Slot

LARGE_CACHE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.stored_rehearsals
@pytest.mark.whole
def test_a_plan_takes_a_smaller_cache_only_where_the_fastest_does_not_fit() -> None:
    job = generating_job("llama", facts=LARGE_CACHE, prompt=2000, batch_size=64)
    free = kept(but="cache attention")
    roomy = plan(job, gpu="h200", keep=free, workers=1)
    assert roomy.best is not None
    assert roomy.best.recipe == "kv_cache(static)"
    assert roomy.verified
    (cache,) = (reason for reason in roomy.reasons if reason.slot == "cache")
    assert cache.against == "given_cache"
    assert cache.step_seconds is not None
    assert cache.step_seconds > roomy.best.step_seconds
    # It is slower alone, so no recipe combines it with another cache.
    assert "eager" in {one.what for one in roomy.refused}
    assert roomy.counts.passes == 6
    few = predict(job, "kv_cache(quantized)", gpu="h200").needed_bytes
    assert few < roomy.best.needed_bytes
    tight = plan(
        job, gpu="h200", memory_bytes=(few + roomy.best.needed_bytes) // 2, keep=free, workers=1, headroom=0
    )
    assert tight.best is not None
    assert tight.best.recipe == "kv_cache(quantized)"
    assert tight.best.needed_bytes == few


def test_a_recipe_and_the_job_name_the_same_cache() -> None:
    named = predict(generating_job("llama", cache="static"), "plain", gpu="h200")
    chosen = predict(generating_job("llama"), "kv_cache(static)", gpu="h200")
    assert chosen.footprint.requested_bytes == named.footprint.requested_bytes


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [("mamba2", {}, "no quantized cache"), ("llama", {"cache": "static"}, "")],
)
def test_caches_that_a_model_lacks_or_the_job_excludes_are_no_candidates(
    family: str, settings: dict[str, str], why: str
) -> None:
    job = generating_job(family, **settings)
    offered = [str(one) for one in space_of(job, fidelity=Fidelity.ROUNDS).offers(Slot.CACHE)]
    assert "kv_cache(quantized)" not in offered
    if why:
        with pytest.raises(RecipeError, match=why):
            Recipe.parse("kv_cache(quantized)").check(job)


def test_a_phase_uses_its_own_slots_alone() -> None:
    generation, training = generating_job("llama"), small_job("bert", 2)
    assert Slot.CACHE not in unused_slots(generation)
    assert {Slot.OPTIMIZER, Slot.BATCHING, Slot.CHECKPOINTING} <= unused_slots(generation)
    assert unused_slots(training) == {Slot.CACHE}
    with pytest.raises(RecipeError, match="the phase train has no cache"):
        Recipe.parse("kv_cache(static)").check(training)
    warnings = Recipe.parse("sgd").check(generation)
    assert "sgd: it changes nothing in the phase generate. Leave it out." in warnings


def test_settings_without_effect_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--phase", "generate", "--new-tokens", "2", "--clip", "1", "--recipe", "sgd", "--quiet"]
    assert run(["predict", "gpt2", *words]) == 0
    assert "clip, sgd: no effect in the phase generate, so leave it out" in capsys.readouterr().err


def test_commands_for_a_generation_have_its_phase_and_settings() -> None:
    assert job_words(generating_job("llama")).endswith("--phase generate --new-tokens 6")
    # A model with few positions has no job with the default number of new tokens.
    drawn = generating_job("llama", facts={"max_position_embeddings": 32}, sample=True, top_k=5)
    assert job_words(drawn).endswith("--new-tokens 6 --sample --top-k 5")
