"""Words that are no command, and options that are arguments, end with a message that names the right form."""

from __future__ import annotations

import pytest

from snugfit.cli.main import NO_COMMANDS, run


@pytest.mark.parametrize("word", NO_COMMANDS)
def test_what_is_no_command_is_answered_with_what_is_meant(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([word, "more"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"snugfit: No such command '{word}'. It is ") or "snugfit predict" in err
    assert err.count("\n") == 1


def test_a_misspelt_command_is_still_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prdict"]) == 2
    assert "Did you mean 'predict'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["predict", "--model", "gpt2"], "Write the model without a flag: snugfit predict MODEL."),
        (["predict", "gpt2", "--recipe", "deepspeed"], "DeepSpeed on one GPU is 'zero2' or 'zero3'"),
        (["predict", "--mod", "gpt2"], "No such option: --mod."),
    ],
)
def test_an_option_or_a_recipe_that_is_none_is_answered_with_why(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert told in capsys.readouterr().err
