"""`snugfit train` from the command line: a folder with a model, a tokenizer and a file of samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_home import JOB, write_home
from snugfit.cli.main import run
from tensorboards import logs_under, scalars_in


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_home(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.whole
def test_it_trains_and_goes_on(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.yaml", "--report-to", "tensorboard"]) == 0
    out, told = capsys.readouterr()
    assert out == f"finished after step 12: {at_home / 'out'}\n"
    assert "step 5 of 12" in told
    assert "accuracy" in told
    assert (at_home / "out" / "checkpoint-12" / "model.safetensors").exists()
    (log,) = logs_under(at_home / "out")
    assert [step for step, _ in scalars_in(log)["train/loss"]] == [5, 10]
    assert run(["train", "--job", "job.yaml"]) == 0
    assert "continues after step 12" in capsys.readouterr().err


MISTAKES = (
    (["train", "job.yaml", "--set", "seed=x"], "seed"),
    (["train", "job.yaml", "--set", "num_train_epoch=2"], "Did you mean 'num_train_epochs'?"),
    (["train", "job.yaml", "--set", "warmup_ratio=0.1"], "write warmup_steps"),
    (["train", "job.yaml", "--set", "lr_scheduler_type=linaer"], "Did you mean 'linear'"),
    (["train", "job.yaml", "--set", "max_steps=0"], "max_steps is 0"),
    (
        ["train", "job.yaml", "--set", "load_best_model_at_end=true", "--set", "eval_strategy=no"],
        "evaluations",
    ),
    (["train", "job.yaml", "--set", "on_loss_spike=halt"], "warn, stop, skip"),
    (["train", "job.yaml", "--dataset", "none.jsonl"], "none.jsonl"),
    (["train", "job.yaml", "--columns", "text"], "ROLE=NAME"),
    (["train", "job.yaml", "--columns", "text=review"], "review"),
    (["train", "job.yaml", "--device", "gpu"], "cpu, cuda or cuda:1"),
    (["train", "job.yaml", "--device", "cuda:7"], "GPUs here. Try cpu"),
    (["train", "job.yaml", "--weights", "./model"], "--from-scratch means random weights"),
    (["train", "job.yaml", "--set", "from_scratch=false"], "model has no weights"),
    (["train", "job.yaml", "--set", "from_scratch=false", "--weights", "./model"], "has no weights"),
    (["train", "--job", "job.yaml", "bert-base-uncased", "--set", "from_scratch=false"], "hf download"),
    (["train", "job.yaml", "--loop", "trainer"], "its own loop"),
    (["train", "job.yaml", "--dataset", "none.jsonl", "--output-dir", "data.jsonl"], "is a file. Name a"),
    (["train", "job.yaml", "--phase", "evaluate"], "evaluate"),
    (["train", "job.yaml", "--recipe", "micro_batches(3)"], "cannot be cut into 3 equal pieces"),
    (["train", "job.yaml", "--tokenizer", "./nowhere"], "nowhere"),
    (["train", "none.yaml"], "none.yaml"),
    (["train", "job.yaml", "--resume-from-checkpoint", "out/checkpoint-9"], "has none"),
    (["train", "job.yaml", "--dry-run", "--resume-from-checkpoint", "out/checkpoint-9"], "has none"),
    (["train"], "No model"),
)


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=lambda value: str(value)[-30:])
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(
    words: list[str], told: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert "Traceback" not in shown
    assert not (at_home / "out").exists()


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(
    at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(at_home.rglob("*"))
    assert run(["train", "job.yaml", "--dry-run", "--gpu", "h200"]) == 0
    words = capsys.readouterr().out
    assert "12 steps of" in words
    assert "starts from random weights" in words
    assert "predicted for NVIDIA H200, which this run would not use: " in words
    assert "reserved" in words
    assert "Dry run: nothing was trained or written." in words
    assert sorted(at_home.rglob("*")) == before
    assert run(["train", "job.yaml", "--dry_run", "--dataset", "none.jsonl"]) == 2
    (at_home / "job.yaml").write_text((at_home / "job.yaml").read_text().replace("gpu: rtx 4090\n", ""))
    assert run(["train", "job.yaml", "--dry-run"]) == 0
    words = capsys.readouterr().out
    assert "This run uses no GPU" in words
    assert "predicted for any" not in words


def test_without_a_dataset_or_a_folder(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at_home / "job.yaml").write_text("".join(line for line in JOB.splitlines(True) if "dat" not in line[:8]))
    assert run(["train", "job.yaml", "--set", "eval_strategy=no"]) == 2
    assert "--dataset" in capsys.readouterr().err


def test_evaluating_needs_data(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at_home / "job.yaml").write_text("".join(x for x in JOB.splitlines(True) if not x.startswith("eval_d")))
    assert run(["train", "job.yaml"]) == 2
    assert "no evaluation data" in capsys.readouterr().err
