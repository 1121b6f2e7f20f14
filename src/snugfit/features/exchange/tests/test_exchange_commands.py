"""`check`, `export`, `--arguments`, `--export` and transformers' flags on the command line: read or
refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snugfit.cli.main import run
from test_cli import BERT, empty_folder, refused
from test_docs import OF_FEATURES, OF_GPU_GROUPS, answered, commands
from test_keep import JOB
from test_plan_command import ASK, asked

__all__ = ["answered", "asked", "empty_folder"]

EXPORT = ["export", "bf16", *BERT, "--to", "hf"]
TYPED = {
    "no choice": (EXPORT[:-2], "'--to'. Choose from: hf, accelerate,"),
    "force of no folder": ([*EXPORT, "--force"], "in the folder of --output"),
    "an export that evaluates": ([*EXPORT, "--set", "phase=evaluate"], "train"),
    "an export in a file": ([*EXPORT, "--output", sys.executable], "a file."),
    "an export of several recipes": (
        ["predict", *BERT, "--export", "hf", "out", "--compare", "bf16"],
        "--export writes one recipe",
    ),
    "an export for several GPUs": ([*ASK, "--gpus", "2", "--export", "hf", "out"], "does not take --export"),
    "an export while verifying": ([*ASK, "--verify", "1", "--export", "hf", "out"], "--verify"),
    "an unknown export": ([*ASK, "--export", "torc", "out"], "Did you mean 'torch'?"),
    "a recipe by a flag": (["export", "--recipe", "bf16"], "without a flag: snugfit export RECIPE."),
    "a file by a flag": (["check", "--file", "a.json"], "Write the file without a flag: snugfit check FILE."),
    "an option of nothing": (["export", "bf16", "--recip"], "No such option: --recip. Try: snugfit export"),
    "a misspelt flag": (["predict", "gpt2", "--bf61", "4"], "Did you mean --bf16? Try: snugfit predict"),
    "a diff": (["check", "a.json", "--output", "b"], "writes no diff any more"),
    "a script for a model": (["predict", "train.py"], "--arguments train.py"),
    "a flag without a model": (["gpus", "--per_device_train_batch_size", "4"], "No model given"),
}


@pytest.mark.parametrize("name", TYPED)
def test_a_mistake_is_one_message_and_exit_2(
    name: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    arguments, told = TYPED[name]
    assert told in refused(arguments, capsys, empty_folder)


def test_another_library_s_whole_file_is_named(
    capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    (empty_folder / "job.yaml").write_text("micro_batch_size: 4\nbase_model: gpt2\nsequence_len: 8\n")
    assert "This looks like" in refused(["predict", "--job", "job.yaml"], capsys, empty_folder)


def test_a_plan_starts_from_the_user_s_own_recipe(asked: list[Any], tmp_path: Path) -> None:
    written = {"output_dir": "out", "bf16": True, "per_device_train_batch_size": 8}
    (tmp_path / "mine.json").write_text(json.dumps(written))
    assert run([*ASK, "--arguments", "mine.json"]) == 0
    assert str(asked[0]["start"]) == "bf16 + adamw_fused"
    assert run(ASK) == 0
    assert asked[1]["start"] is None, "another question"


def test_the_answer_is_exported(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ASK, "--export", "hf", "out"]) == 0
    assert json.loads((tmp_path / "out" / "training_arguments.json").read_text())["bf16"] is True
    assert "Written: out/training_arguments.py" in capsys.readouterr().err
    assert run([*ASK, "--export", "trl", "out"]) == 2
    assert "sequence-classification" in capsys.readouterr().err
    assert len(asked) == 1, "before the search"


def test_plans_for_many_gpus_start_from_it_too(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> None:
    questions: list[dict[str, Any]] = []

    def search(*_: Any, **how: Any) -> Any:
        questions.append(how)
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_folder / "cache"))
    monkeypatch.setattr("snugfit.planning.fleet.search_gpus.plan_gpus", search)
    (empty_folder / "mine.json").write_text(json.dumps({"output_dir": "out", "bf16": True}))
    run(["gpus", "h200", "--for", *JOB, "--free", "optimizer", "--arguments", "mine.json"])
    assert (questions[0]["start"], questions[0]["free"]) == ("bf16 + adamw_fused", "optimizer")


@pytest.mark.parametrize(
    "command",
    [
        one
        for one in commands()
        if OF_FEATURES.match(one)
        and not OF_GPU_GROUPS.match(one)
        and not one.startswith(("guide", "why-oom", "lengths"))
    ],
)
def test_a_command_of_the_docs_is_understood(
    command: str, answered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {0, 3} if command.startswith("check") else {0}  # 3 means that it found something
    assert run(shlex.split(command)) in answers, capsys.readouterr().err


CHECKS = """
import json, sys
from snugfit.cli.main import run
from snugfit.frontends.one_of_several import OWN_PROCESS
OWN_PROCESS.set(True)
print("FOUND", json.dumps([run(["check", "ds.json"]), "torch" in sys.modules]))
"""


@pytest.mark.whole
def test_a_file_without_arguments_of_transformers_is_checked_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 0, "offload_optimizer": {}}}')
    # A fork of the tests' bare process may have torch, which another test's child imported there.
    done = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.rpartition("FOUND ")[2]) == [3, False]


def test_a_missing_file_has_the_names_of_similar_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training.yaml").touch()
    assert run(["predict", "--arguments", str(tmp_path / "trainig.yaml")]) == 2
    assert "no such file. Did you mean 'training.yaml'?" in capsys.readouterr().err
    assert run(["predict", "--arguments", str(tmp_path / "training.yaml")]) == 2
    assert "and this one is empty. Write" in capsys.readouterr().err
