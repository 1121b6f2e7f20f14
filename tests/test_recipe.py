"""Law 4: the recipe's notation round-trips, and each refusal names the place and the cure."""

from __future__ import annotations

import json
import random

import pytest

from any_recipe import any_recipe
from snugfit.errors import RecipeError
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.techniques import roster, technique
from snugfit.techniques.notation import _echo_alias
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.technique import Slot, Technique


def job(**changes: object) -> Job:
    fields = {"model": Model.find("bert-base-uncased"), "task": Task.SEQUENCE_CLASSIFICATION, **changes}
    return Job(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200))
def test_text_and_json_round_trip(seed: int) -> None:
    recipe = any_recipe(random.Random(seed))
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    setup = recipe.setup()
    assert Setup.from_json(json.loads(json.dumps(setup.to_json()))) == setup


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", "plain"),
        ("  ", "plain"),
        ("plain", "plain"),
        ("fp32 + adamw", "fp32"),
        ("as_loaded + adamw", "plain"),
        ("adamw_8bit+bf16", "bf16 + adamw_8bit"),
        ("bf16 + tf32 + every_layer + micro_batches(4) + adamw_8bit", None),
        ("micro_batches(n=4)", "micro_batches(4)"),
        ("every_nth_layer(2)", "every_nth_layer"),
        ("every_nth_layer(3)", "every_nth_layer(n=3)"),
        ("segments(k=none)", "segments"),
        ("sgd( momentum = 0.5 )", "sgd(momentum=0.5)"),
        ("sgd(.5)", "sgd(momentum=0.5)"),
        ("sgd(5e-1)", "sgd(momentum=0.5)"),
        ("adamw_8bit(8)", "adamw_8bit(embeddings=8)"),
        ("lora()", "lora"),
        ("lora(16, q_proj|v_proj)", "lora(r=16, targets=q_proj|v_proj)"),
        ("lora(16, targets=all-linear)", "lora(r=16, targets=all-linear)"),
        (r"lora(targets='.*[.]layers[.]\d+[.](q|v),{1}(?=x)') + bf16", None),
        ("lora(targets=q_proj, layers=1|20)", None),
        (
            "lora(rank_pattern='down_proj:4'|'a=b:2', save=lm_head)",
            "lora(save=lm_head, rank_pattern='down_proj:4'|'a=b:2')",
        ),
        ("frozen('a=b')", "frozen(parts='a=b')"),
    ],
)
def test_text_is_understood_and_printed(text: str, printed: str | None) -> None:
    assert str(Recipe.parse(text)) == (text if printed is None else printed)


@pytest.mark.parametrize(
    ("text", "marked", "message"),
    [
        ("bf16 + adamw_8bits", "adamw_8bits", "Did you mean 'adamw_8bit'"),
        ("bf16 + fp16", "fp16", "both precision"),
        ("bf16 + bf16_pure", "bf16_pure", "both precision"),
        ("sgd + sgd", "sgd", "named twice"),
        ("lora(rank=4)", "rank=4", "Did you mean 'r'\\? Settings: r, targets"),
        ("lora(target=q)", "target=q", "Did you mean 'targets'"),
        ("adamw_8bit(8, 9)", "9", "no setting after embeddings"),
        ("lora(targets='q.*)", "'q.*)", "quote is never closed"),
        ("lora(targets='q|k'|v)", "lora(targets='q|k'|v)", "and not both"),
        ("frozen", "frozen", "needs parts"),
        ("lora(r=4, q)", "q", "give its name too"),
        ("lora(r=4, r=5)", "r=5", "twice"),
        ("lora(r=4,)", "", "between the commas"),
        ("fp32(1)", "1", "no settings"),
        ("micro_batches", "micro_batches", "needs n"),
        ("micro_batches(4.5)", "4.5", "not a whole number"),
        ("micro_batches(four)", "four", "not a whole number"),
        ("micro_batches(٤)", "٤", "not a whole number"),
        ("micro_batches(0)", "micro_batches(0)", "from 1 to"),
        ("micro_batches(-1)", "micro_batches(-1)", "from 1 to"),
        ("micro_batches(1000000000000)", "micro_batches(1000000000000)", "from 1 to"),
        ("sgd(momentum=nan)", "momentum=nan", "not a number"),
        ("sgd(1.5)", "sgd(1.5)", "from 0.0 to 1.0"),
        ("adamw_8bit(16)", "16", "not 32 or 8"),
        ("micro_batches(4", "(", "never closed"),
        ("bf16)", ")", "never opened"),
        ("sgd((0.5))", "(", "cannot contain other parentheses"),
        ("bf16 tf32", "tf32", "joined by '\\+'"),
        ("bf16, tf32", ",", "joined by '\\+'"),
        ("bf16 +", "", "name of a technique is missing here"),
        ("+ bf16", "", "name of a technique is missing here"),
        ("(4)", "(4)", "name of a technique is missing here"),
        ("plain + bf16", "plain", "nothing can be added"),
        ("apollo_adamw", "apollo_adamw", "licence"),
        ("optim=adamw_hf", "", "joined"),
    ],
)
def test_error_shows_the_text_and_marks_the_word(text: str, marked: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.parse(text)
    shown, marker, _ = str(caught.value).split("\n", 2)
    assert shown == text
    start, length = len(marker) - len(marker.lstrip()), marker.count("^")
    assert length >= 1
    if marked:
        assert text[start : start + length] == marked


def test_a_word_of_another_library_is_taken_and_said(logged: list[str]) -> None:
    _echo_alias.cache_clear()
    for _ in range(2):
        recipe = Recipe.parse("gradient_checkpointing + bf16_mixed + gradient_accumulation_steps(4)")
        assert str(recipe) == "bf16 + every_layer + micro_batches(4)"
    assert logged == [
        "recipe: gradient_checkpointing is called every_layer here",
        "recipe: bf16_mixed is called bf16 here",
        "recipe: gradient_accumulation_steps is called micro_batches here",
    ]


def test_hostile_text_is_one_clear_error() -> None:
    for text in ("(" * 5000, "a+" * 5000, "\x1b[31mbf17", "bf16\n+ bf17", "bf16\0", "a" * 1999):
        with pytest.raises(RecipeError) as caught:
            Recipe.parse(text)
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 3 * 2000 + 1000


def test_plain_recipe_is_the_default_setup() -> None:
    assert Recipe().setup() == Setup()
    assert Recipe.parse("plain") == Recipe()
    assert [technique.plain for technique in Recipe()] == [True] * len(Slot)


def test_a_setup_answers_for_its_recomputation() -> None:
    plain, every, nth = (
        Recipe.parse(text).setup() for text in ("plain", "every_layer", "every_nth_layer(2)")
    )
    in_bf16 = Recipe.parse("bf16 + every_layer").setup()
    setups = (plain, every, nth, in_bf16)
    assert [setup.recomputes for setup in setups] == [False, True, True, True]
    assert [setup.saves_memory for setup in setups] == [False, True, True, True]
    assert [setup.keeps_only_inputs for setup in setups] == [False, True, False, False]
    assert [setup.recomputes_as(every) for setup in setups] == [False, True, False, True]
    assert [setup.with_equal_layers() for setup in setups] == [plain, every, every, in_bf16]


def test_a_recipe_is_one_technique_per_slot() -> None:
    recipe = Recipe.parse("bf16 + adamw_8bit")
    assert [technique.slot for technique in recipe] == list(Slot)
    assert str(recipe["optimizer"]) == "adamw_8bit"
    assert str(recipe[Slot.MATMUL]) == "ieee"
    changed = recipe.with_(roster.find("tf32")())
    assert str(changed) == "bf16 + tf32 + adamw_8bit"
    assert str(recipe) == "bf16 + adamw_8bit"
    with pytest.raises(RecipeError, match="both precision"):
        Recipe((roster.find("bf16")(), roster.find("fp16")()))


def test_technique_refuses_nonsense_at_birth() -> None:
    micro = roster.find("micro_batches")
    for wrong in (0, True, "4", None, 2.0):
        with pytest.raises(RecipeError, match="whole number"):
            micro(n=wrong)  # type: ignore[call-arg]
    with pytest.raises(RecipeError, match="joined by"):
        roster.find("lora")(targets=("q v",))  # type: ignore[call-arg]
    with pytest.raises(RecipeError, match="joined by"):
        roster.find("lora")(targets=())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("recipe", "batch", "tries"),
    [
        ("micro_batches(3)", 16, r"micro_batches\(2\) or micro_batches\(4\)"),
        ("micro_batches(32)", 16, r"Try micro_batches\(16\)\."),
        ("micro_batches(2)", 1, r"Try micro_batches\(1\)\."),
        ("micro_batches(5)", 12, r"micro_batches\(4\) or micro_batches\(6\)"),
    ],
)
def test_pieces_must_divide_the_batch(recipe: str, batch: int, tries: str) -> None:
    """A batch of sixteen cannot be split into three equal micro-batches."""
    with pytest.raises(RecipeError, match=tries):
        Recipe.parse(recipe).check(job(batch_size=batch))


def test_pieces_that_divide_the_batch_pass() -> None:
    assert Recipe.parse("micro_batches(4)").check(job(batch_size=16)) == ()


def test_tf32_before_ampere_is_refused() -> None:
    """The HF Trainer refuses tf32 before Ampere, too."""
    recipe = Recipe.parse("tf32")
    with pytest.raises(RecipeError, match=r"compute capability 8\.0.* 7\.0.*'ieee'"):
        recipe.check(job(), (7, 0))
    assert recipe.check(job(), (8, 0)) == ()
    assert recipe.check(job()) == ()


@pytest.mark.parametrize("name", ["bf16", "bf16_pure"])
def test_bf16_before_ampere_is_warned_of(name: str) -> None:
    """V100 and T4 have no bf16 arithmetic of their own."""
    recipe = Recipe.parse(name)
    assert any("emulates" in warning for warning in recipe.check(job(), (7, 5)))
    assert not any("emulates" in warning for warning in recipe.check(job(), (8, 6)))


def test_all_objections_come_together() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse("tf32 + micro_batches(3)").check(job(batch_size=4), (7, 0))
    assert "tf32: " in str(caught.value)
    assert "micro_batches(3): " in str(caught.value)


def test_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.parse("adamw_8bit")
    monkeypatch.setattr(technique, "version_of", lambda package: None)
    cure = r'adamw_8bit needs bitsandbytes>=0\.50, which is not installed\. Try: pip install "snugfit\[bnb\]"'
    with pytest.raises(RecipeError, match=cure):
        recipe.check(job())
    assert recipe.check(job(), installed=False) == ()
    monkeypatch.setattr(technique, "version_of", lambda package: "0.41.0")
    with pytest.raises(RecipeError, match=r"but 0\.41\.0 is installed"):
        recipe.check(job())


def test_evaluation_says_what_it_leaves_unused() -> None:
    warnings = Recipe.parse("bf16 + every_layer + adamw_fused").check(job(phase=Phase.EVALUATE))
    assert [warning.split(":")[0] for warning in warnings] == ["every_layer", "adamw_fused"]


BESIDE = {"adamw_stochastic": "bf16_pure", "budget": "compiled"}
"""Techniques that some others require: bfloat16 weights, which the job lacks, or a compiler."""


@pytest.mark.parametrize("technique", roster.techniques(), ids=lambda technique: technique.name)
def test_what_a_planner_may_try_is_lawful(technique: type[Technique]) -> None:
    this = job(batch_size=12)
    tried = list(technique.settings(this))
    # The grades of first_layers replace it.
    assert tried or technique.planning_objection(this) or technique.name == "every_nth_layer"
    if technique.planning_objection(this) or not technique.searched:
        return  # the planner never tries it alone
    for setting in tried:
        beside = [roster.find(BESIDE[setting.name])()] if setting.name in BESIDE else []
        recipe = Recipe((setting, *beside))
        recipe.check(this, installed=False)


@pytest.mark.parametrize(
    ("wish", "layers", "spans"),
    [
        (CheckpointWish(), 3, [(0, 1), (1, 2), (2, 3)]),
        (CheckpointWish(every=2), 5, [(0, 1), (2, 3), (4, 5)]),
        (CheckpointWish(first=2), 5, [(0, 1), (1, 2)]),
        (CheckpointWish(first=9), 2, [(0, 1), (1, 2)]),
        (CheckpointWish(layers_per_span=2), 5, [(0, 2), (2, 4), (4, 5)]),
        (CheckpointWish(layers_per_span=0), 24, [(0, 5), (5, 10), (10, 15), (15, 20), (20, 24)]),
        (CheckpointWish(layers_per_span=0, spans=3), 7, [(0, 3), (3, 5), (5, 7)]),
        (CheckpointWish(layers_per_span=0, spans=9), 2, [(0, 1), (1, 2)]),
        (CheckpointWish(), 0, []),
    ],
)
def test_a_stack_is_cut_into_spans(wish: CheckpointWish, layers: int, spans: list[tuple[int, int]]) -> None:
    assert [(span.start, span.stop) for span in wish.cut(layers)] == spans
