"""Words that are no command, and options that are arguments, end with a message that names the right form."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from snugfit import __main__ as entry
from snugfit.cli import plan_cache
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
        (
            ["predict", "gpt2", "--headroom", "2GiB"],
            "--headroom 2GiB needs a memory limit. Add --gpu NAME or",
        ),
        (["predict", "gpt2", "--mesh", "foo=2"], "foo is not an axis along which GPUs share the work. Those"),
        (["predict", "gpt2", "--gpu", "rtx 3060 laptop"], "give its size in place of its name: --memory"),
    ],
)
def test_an_option_or_a_recipe_that_is_none_is_answered_with_why(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--gpus", "0", "--gpus is 0; allowed are whole numbers from 1 to 65,536."),
        ("--software", "nonsense", "Unknown software 'nonsense'. Known: installed"),
        ("--headroom", "-1", "headroom: '-1' is not a positive amount."),
        ("--headroom", "120%", "headroom: '120%' leaves nothing of the memory to use. Try 2%."),
    ],
)
def test_a_wrong_value_is_refused_before_the_model_is_read(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", "no-such-model", "--gpu", "h200", option, value]) == 2
    assert capsys.readouterr().err.startswith(f"snugfit: {told}")


def test_an_interrupt_during_the_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The handler of Ctrl-C ends the process inside an import, before an exception could surface there."""

    def interrupted(words: object) -> None:
        assert signal.getsignal(signal.SIGINT) is entry._end
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("snugfit.feature_folders.use_plugins", interrupted)
    monkeypatch.setattr("os._exit", sys.exit)
    before = signal.signal(signal.SIGINT, entry._end)
    try:
        with pytest.raises(SystemExit) as ended:
            entry.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capfd.readouterr().err == "snugfit: interrupted\n"


def test_without_a_home_folder_nothing_is_cached_and_its_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container may run with a user id that has no entry in the system's table of users."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", os.fspath)
    monkeypatch.chdir(tmp_path)
    plan_cache.store_result("key", SimpleNamespace(to_json=dict))
    assert not [*tmp_path.iterdir()]
    assert run(["serve", "~/model.gguf", "--gpu", "l4"]) == 2
    assert "the home folder ~ is not known" in capsys.readouterr().err
