"""Names that people guess: of GPUs, options, commands, techniques and their settings."""

from __future__ import annotations

import re

import pytest

from snugfit.cli.main import run
from snugfit.errors import GpuError, RecipeError
from snugfit.job.gpu import COMMON, all_gpus, choice_of, common_card, find_gpu
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import find


def test_each_common_card_is_in_the_table() -> None:
    assert set(COMMON) <= {gpu.key for gpu in all_gpus()}


@pytest.mark.parametrize(
    ("text", "key"), [("h100", "H100-SXM"), ("a100", "A100-SXM-80"), ("v100", "V100-SXM2-16")]
)
def test_a_name_of_several_cards_is_the_common_one_and_says_so(text: str, key: str) -> None:
    assert find_gpu(text).key == key
    assert choice_of(text).startswith(f"{text} is taken as {key}")
    assert choice_of(key) == ""


def test_a_card_is_found_by_its_memory() -> None:
    assert [card and card.name for card in (common_card(24 << 30), common_card(80 * 10**9))] == [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100 80GB HBM3",
    ]
    assert common_card(23 << 30) is None


@pytest.mark.parametrize("text", ["cuda:0", "cuda", "local"])
def test_a_device_of_this_machine_is_no_model(text: str) -> None:
    with pytest.raises(GpuError, match="snugfit doctor"):
        find_gpu(text)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("9bit-adam", "'8bit_adam'"),
        ("4bit", "'qlora' keeps the frozen weights"),
        ("lora(target_modules=q_proj)", "'targets'"),
        ("xyz-zyx", "lists all"),
    ],
)
def test_a_guessed_technique_gets_at_most_three_names(recipe: str, names: str) -> None:
    with pytest.raises(RecipeError, match=names) as error:
        Recipe.parse(recipe)
    assert str(error.value).count(",") < 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predict", "gpt2", "--context", "512"], "--sequence-length"),
        (["predict", "gpt2", "--seq", "512"], "--sequence-length"),
        (["predict", "gpt2", "--gpu", "24 GB"], "--memory 24GiB"),
        (["train", "gpt2", "--data", "x.json"], "--dataset"),
        (["estimate-memory", "gpt2"], "snugfit predict MODEL"),
        (["predict", "gpt2", "--gpu", "2x h100", "--gpus", "4"], "contradict"),
        (["techniques", "qwerty"], "Unknown technique 'qwerty'. snugfit techniques lists all."),
        (["predict", "llama3-8b", "--offline"], "Presets: Llama-3.1-8B, Meta-Llama-3-8B, "),
        (["predict", "lama", "--offline"], "Presets: Llama-"),
    ],
)
def test_a_guess_gets_one_clear_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("8bit-adam", "adamw_8bit"),
        ("gradient-checkpointing", "every_layer"),
        ("flash-attention-2", "flash"),
        ("torch.compile", "compiled"),
        ("Every-Layer", "every_layer"),
    ],
)
def test_a_technique_is_found_with_other_separators(word: str, name: str) -> None:
    assert find(word).name == name


@pytest.mark.parametrize(
    ("arguments", "mark"),
    [
        (["predict", "llama3-8b", "--offline"], ","),
        (["gpus", "h1000"], " GB)"),
        (["gpus", "RTX 4900"], " GB)"),
    ],
)
def test_at_most_three_names_are_suggested(
    arguments: list[str], mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = re.split("Presets: |Similar: ", capsys.readouterr().err)[1]
    assert 1 <= shown.split(". ")[0].count(mark) <= 3


def test_techniques_are_listed_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["techniques", "attention"]) == 0
    shown = capsys.readouterr().out
    assert "sdpa" in shown
    assert "adamw" not in shown


def test_the_first_word_of_a_key_is_enough_for_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "gpt2", "--set", "batch=3"]) == 2
    assert "unknown key 'batch'. Did you mean 'batch_size'?" in capsys.readouterr().err


def test_the_version_has_a_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-V"]) == 0
    assert capsys.readouterr().out.startswith("snugfit ")
