"""Frozen parts, and adapters of chosen modules: the parameters that train, and their steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fitted import quiet, spoken, trainer_of
from fitted import trained as trained_by
from small_models import small_job
from small_runs import resumed_as_whole, small_run
from snugfit import fit
from snugfit.errors import RecipeError, UsageError
from snugfit.features.adapters.feature import names_layers
from snugfit.features.adapters.freezing import FreezeHandler
from snugfit.job.gpu import find_gpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.rehearsal import few_layers
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.wishes.handler import ScriptContext
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import hold_to_reports, job


def trained(family: str, recipe: str, layers: int = 3) -> set[str]:
    """Return the names of the parameters that train."""
    model = build_model(small_job(family, layers), Recipe.parse(recipe).setup(), torch.device("meta"))
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_parts_freeze_by_name_and_by_pattern() -> None:
    whole = trained("bert", "plain")
    frozen = whole - trained("bert", "frozen(parts='bert[.]encoder[.]layer[.](0|1)[.]'|embeddings)")
    assert {name.split(".")[1] for name in frozen} == {"embeddings", "encoder"}
    assert {name.split(".")[3] for name in frozen if "encoder" in name} == {"0", "1"}
    assert trained("bert", "frozen(parts=base_model)") == {"classifier.weight", "classifier.bias"}
    assert trained("bert", "frozen(only=classifier)") == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(("last", "layers"), [(1, {"2"}), (-2, {"0", "1"})])
def test_the_last_layers_train_alone(last: int, layers: set[str]) -> None:
    assert {name.split(".")[2] for name in trained("llama", f"frozen(last={last})")} == layers


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("frozen(parts=pooler_of_none)", "matches 'pooler_of_none'"), ("frozen(last=9)", "has 3 layers")],
)
def test_a_part_that_is_not_there_is_one_clear_error(recipe: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        trained("llama", recipe)


@pytest.mark.parametrize(
    "recipe", ["frozen(parts='(')", "frozen(only=a|'[')", "lora(targets='*.q')", "lora(exclude='(?P<')"]
)
def test_a_pattern_that_is_no_regular_expression_is_refused(recipe: str) -> None:
    with pytest.raises(RecipeError, match="is not a regular expression: "):
        Recipe.parse(recipe)


def test_a_tied_weight_is_named_by_its_first_name() -> None:
    with pytest.raises(RecipeError, match=r"lm_head.weight is tied to transformer.wte.weight. Name that one"):
        trained("gpt2", "frozen(parts=lm_head)")
    assert trained("gpt2", "frozen(only=wte)") == {"transformer.wte.weight"}


def test_a_recipe_that_freezes_all_is_refused_with_a_remedy() -> None:
    setup = Recipe.parse("frozen(parts='.*')").setup()
    job = small_job("gpt2", 1)
    with pytest.raises(UsageError, match="Freeze fewer parts"):
        build_optimizer(job, setup, build_model(job, setup, torch.device("meta")))


def test_adapters_reach_the_named_modules_alone() -> None:
    pytest.importorskip("peft", reason="the extra peft is not installed")
    pattern = r"lora(targets='model[.]layers[.]\d+[.](mlp|self_attn)[.](up|q)_proj', save=lm_head)"
    names = trained("llama", pattern)
    assert {name.split(".")[-4] for name in names if "lora_" in name} == {"up_proj", "q_proj"}
    assert [name for name in names if "lora_" not in name] == [
        "base_model.model.lm_head.modules_to_save.default.weight"
    ]
    chosen = trained("llama", "lora(targets=q_proj|v_proj, layers=1, exclude=v_proj)")
    assert {(name.split(".")[4], name.split(".")[6]) for name in chosen} == {("1", "q_proj")}
    model = build_model(
        small_job("llama", 2),
        Recipe.parse("lora(targets=q_proj|v_proj, rank_pattern='q_proj:2')").setup(),
        torch.device("meta"),
    )
    ranks = {name.split(".")[6]: one.shape[0] for name, one in model.named_parameters() if "lora_A" in name}
    assert ranks == {"q_proj": 2, "v_proj": 8}


def test_weights_of_experts_get_adapters() -> None:
    pytest.importorskip("peft", reason="the extra peft is not installed")
    names = trained("mixtral", "lora(parameters=experts.gate_up_proj, targets=q_proj)")
    assert any(".experts." in name and "lora_A" in name for name in names)


@pytest.mark.parametrize(
    ("recipe", "by_number"),
    [
        ("frozen(parts=bert.encoder.layer.0)", True),
        ("frozen(last=2)", True),
        ("lora(targets=q_proj, layers=1)", True),
        ("lora(targets='.*layers.(3|7).*')", True),
        ("frozen(parts=embeddings)", False),
        (r"lora(targets='model.layers.[\d]+.mlp.*|w1', rank_pattern='w1:4')", False),
    ],
)
def test_layers_by_number_are_not_alike(recipe: str, by_number: bool) -> None:
    assert names_layers(Recipe.parse(recipe).setup()) is by_number


@pytest.mark.parametrize(("recipe", "few"), [("frozen(parts=embeddings)", True), ("frozen(last=2)", False)])
def test_few_layers_stand_for_all_only_if_all_are_alike(
    recipe: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_layers, "DEEP", 4)
    monkeypatch.setattr(few_layers, "FEWEST_PERIODS", 2)
    monkeypatch.setattr(few_layers, "WRITTEN_SHARE", 0)
    job, setup = small_job("bert", 9, batch_size=8), Recipe.parse(recipe).setup()
    policy = policy_for(find_gpu("h200"), Software())
    short = rehearse_from_few_layers(job, setup, policy)
    assert (short is not None) is few
    assert short is None or short.events == rehearse(job, setup, policy).events


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("bert", "frozen(parts=embeddings|encoder.layer.0)"),
        ("llama", "frozen(last=1) + every_layer"),
        ("llama", "lora(targets='.*1.*(up|q)_proj', save=lm_head|embed_tokens)"),
    ],
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    if "lora" in recipe:
        pytest.importorskip("peft", reason="the extra peft is not installed")
    hold_to_reports(job(family), Recipe.parse(recipe))


def test_an_exported_script_freezes_the_same_parameters() -> None:
    job = small_job("bert", 2)
    recipe = Recipe.parse("frozen(parts=base_model|'classifier[.]b.*')")
    context = ScriptContext(
        job=job, setup=recipe.setup(), recipe=recipe, target="torch", trainer=False, library="",
        checkpointing_name="", checkpointing_options=frozenset(),
    )  # fmt: skip
    lines = FreezeHandler().script(recipe.setup().freeze, context)["adapting"]
    model = build_model(job, Recipe().setup(), torch.device("meta"))
    exec("\n".join(lines), {"model": model})
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {"classifier.weight"}
    assert trained("bert", str(recipe), 2) == {"classifier.weight"}


@pytest.mark.whole
def test_a_killed_run_with_frozen_parts_goes_on(tmp_path: Path) -> None:
    recipe = "frozen(parts=embeddings|encoder.layer.0)"
    again = resumed_as_whole(small_run(tmp_path, recipe, max_steps=4, save_steps=2), 3)
    assert {one.requires_grad for one in again.model.parameters()} == {True, False}


@pytest.mark.whole
def test_fit_freezes_parts(tmp_path: Path) -> None:
    model = build_model(small_job("llama", 2), Recipe().setup(), torch.device("cpu"))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    fitted = trained_by(fit(trainer_of(tmp_path, model, spoken(22)), "frozen(last=1)", watch=quiet))
    changed = {name for name, one in fitted.model.named_parameters() if not torch.equal(one, before[name])}
    assert changed
    assert {name.split(".")[2] for name in changed} == {"1"}
