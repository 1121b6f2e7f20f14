"""Common mistakes of new users about models, from Python and on the command line. Each gives one clear error
and no traceback; harmless input works."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from snugfit.cli.main import run
from snugfit.errors import JobError, ModelError, RecipeError, RehearsalError, SnugfitError
from snugfit.job.batch import synthetic
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record import recorder
from snugfit.rehearsal.record.shape_cache import ShapeCache
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe

BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
    "vocab_size": 96,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip


def job_of(facts: dict[str, Any], task: str, **settings: Any) -> Job:
    model = Model.from_config(check_facts(facts, where="tiny"), name="tiny")
    return Job(model=model, task=Task.parse(task), **{"sequence_length": 8, "target_length": 8} | settings)


def trace_of(job: Job, recipe: str = "plain") -> Trace:
    return rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_a_missing_package_is_named_with_its_cure(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm of Gemma 3n, natten of DiNAT: the message replaces the advice to check the config's sizes."""

    def require(*_: Any, **__: Any) -> None:
        raise ImportError("\nBertModel requires the natten library but it was not found. You can install it")

    monkeypatch.setattr(BertModel, method, require)
    with pytest.raises(ModelError, match=r"^tiny needs natten.*not installed. Try: pip install natten$"):
        trace_of(job_of(BERT, "masked-lm"))


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libparts.so.3: cannot open shared object file", name="lib"),
        ImportError("cannot import name 'newer' from 'torch'", name="torch"),
        ModuleNotFoundError("No module named 'torch.newer'", name="torch.newer"),
    ],
)
def test_a_package_that_is_there_and_does_not_load_is_not_said_to_be_missing(
    error: ImportError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(BertModel, "forward", fail)
    with pytest.raises(RehearsalError, match=re.escape(error.msg)) as told:
        trace_of(job_of(BERT, "masked-lm"))
    assert "pip install" not in str(told.value)


# T5 and its relatives ----------------------------------------------------------------------------


def test_a_config_without_a_start_token_gets_the_pad_token() -> None:
    """T5's documentation defines it so. A config written by hand omits the token, and no byte depends on
    it."""
    whole = trace_of(job_of(T5 | {"decoder_start_token_id": 0, "pad_token_id": 0}, "seq2seq-lm"))
    for lacking in ({}, {"pad_token_id": None}, {"decoder_start_token_id": None}):
        assert trace_of(job_of(T5 | lacking, "seq2seq-lm")) == whole


@pytest.mark.parametrize("end", [None, 96, -1])
def test_a_classifier_that_reads_the_end_token_needs_one(end: int | None) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        trace_of(job_of(T5 | {"eos_token_id": end}, "sequence-classification"))


def test_each_sequence_ends_in_one_end_token_and_has_no_other() -> None:
    """transformers refuses a batch whose sequences hold different numbers of end tokens."""
    job = job_of(T5 | {"eos_token_id": 90}, "sequence-classification", sequence_length=64)
    ids = synthetic(job, 16)["input_ids"]
    assert (ids == 90).sum(1).tolist() == [1] * 16
    assert (ids[:, -1] == 90).all()


def test_a_classifier_counts_the_end_tokens_that_its_padding_makes() -> None:
    """If padding and end are one token, each sequence holds several of it, and all equally many."""
    config = T5 | {"pad_token_id": 1, "eos_token_id": 1}
    trace = trace_of(job_of(config, "sequence-classification", padding=0.25))
    assert trace.doubts == ()
    assert trace.syncs > 0, "it reads a value"


@pytest.mark.parametrize("recipe", ["segments", "segments(2)"])
def test_layers_that_hand_on_a_position_bias_are_not_joined(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"position bias.*'every_layer'"):
        Recipe.parse(recipe).check(job_of(T5, "seq2seq-lm"))
    trace_of(job_of(T5, "seq2seq-lm"), "every_nth_layer(2)")  # the message suggests this recipe


# Errors of a rehearsal ---------------------------------------------------------------------------


def test_a_key_that_the_config_lacks_is_named() -> None:
    with pytest.raises(ModelError, match=r'config has no "no_such_key".*in Net\.forward ') as told:
        trace_of(of_python("a key"))
    assert told.value.exit_code == 2


def test_targets_need_a_decoder_of_their_own() -> None:
    with pytest.raises(JobError, match=r"t5.* has no decoder of its own"):
        trace_of(job_of(T5 | {"is_encoder_decoder": False}, "seq2seq-lm"))


def test_a_model_that_fails_on_its_shapes_is_told_with_its_own_line() -> None:
    facts = MIXTRAL | {"num_local_experts": 0}
    with pytest.raises(
        RehearsalError, match=r"MixtralTopKRouter\.forward .*topk.*sizes in the config match"
    ) as told:
        trace_of(job_of(facts, "causal-lm"))
    assert "bug in snugfit" not in str(told.value)


@pytest.mark.parametrize("mistake", [KeyError, AttributeError, TypeError, IndexError, ZeroDivisionError])
def test_our_own_mistakes_are_called_ours(mistake: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": recorder.__name__, "mistake": mistake}
    exec("def cost(*_):\n    raise mistake('lost')\n", names)  # as if it were defined in that file
    monkeypatch.setattr(ShapeCache, "cost", names["cost"])
    with pytest.raises(RehearsalError, match=r"bug in snugfit \d.*lost.*Please report it") as told:
        trace_of(job_of(BERT, "masked-lm"))
    assert mistake.__name__ in str(told.value)
    assert told.value.exit_code == 1
    assert len(str(told.value).splitlines()) == 1


class Net(nn.Module):
    """A user's own module with a configurable output."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.layer, self.gives = nn.Linear(4, 4), gives

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        if self.gives == "a mistake":
            return y @ y
        if self.gives == "a key":
            return y * BertConfig().no_such_key
        return {"loss": y.sum(), "none": None, "number": 1.0, "text": "loss", "tuple": (y.sum(), y)}[
            self.gives
        ]


def of_python(gives: str, task: Any = "custom") -> Job:
    return Job(model=Model.from_module(Net(gives), {"x": torch.ones(2, 4)}), task=task, batch_size=2)


@pytest.mark.parametrize("gives", ["none", "number"])
def test_a_module_without_a_loss_is_told_what_a_loss_is(gives: str) -> None:
    with pytest.raises(RehearsalError, match=r"output has no loss .*`\.loss`") as told:
        trace_of(of_python(gives))
    assert "bug in snugfit" not in str(told.value)


def test_a_module_that_fails_is_told_with_its_own_line() -> None:
    with pytest.raises(
        RehearsalError, match=r"in Net\.forward \(test_bad_input_models\.py, line \d+: `return y @ y`"
    ):
        trace_of(of_python("a mistake"))


def test_the_task_of_a_module_may_be_written_as_text() -> None:
    assert of_python("tuple").task is Task.CUSTOM
    assert trace_of(of_python("tuple")).peak()[0]
    with pytest.raises(JobError, match="its task must be 'custom'"):
        of_python("loss", "causal-lm")
    with pytest.raises(JobError, match=r"no head for custom.*Tasks it has: sequence-classification"):
        job_of(BERT, "custom")


# Search for a model ------------------------------------------------------------------------------


def test_a_folder_without_a_config_says_so_and_where_one_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"this folder has no config\.json\. A model is"):
        Model.find(str(tmp_path))
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"There is one in 'checkpoint-500': write .*/checkpoint-500\."):
        Model.find(str(tmp_path))


def test_a_folder_that_may_not_be_looked_into_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is injected, because root may read any folder."""

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "lstat", denied)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read \(permission denied\)"):
        Model.find(f"{tmp_path}/")


@pytest.mark.parametrize("name", ["./no-such", "no-such.json", "/no/such/folder", "~/no-such-folder"])
def test_a_path_to_nothing_says_what_a_model_is(name: str) -> None:
    with pytest.raises(ModelError, match=r"no such file or folder\. A model is the name of a preset"):
        Model.find(name)


@pytest.mark.slow
def test_predicting_fetches_no_kernels(tmp_path: Path) -> None:
    """bitsandbytes imports `kernels` if it is installed, to download compiled code (on CPUs with
    AVX512-BF16). accelerate and the Trainer import peft, and peft imports bitsandbytes. One process runs
    every loop, starting with the one that imports least. `test_remembered` covers a process that has imported
    all."""
    fetched = tmp_path / "fetched"
    (tmp_path / "kernels.py").write_text(f"def get_kernel(*_, **__):\n    open({str(fetched)!r}, 'w')\n")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    typed = ["predict", str(tmp_path), "--task", "masked-lm", "--sequence-length", "8", "--loop"]
    code = "import sys; from snugfit.cli.main import run\n"
    code += "sys.exit(any([run([*sys.argv[1:], loop]) for loop in ('plain', 'accelerate', 'trainer')]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *typed],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert (done.returncode, done.stderr) == (0, f"snugfit: predicting {tmp_path} ...\n" * 3)
    assert not fetched.exists()


# The command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "told"), [
    ("vit-large-patch16-224 --task image-classification --sequence-length 99", "sequence length is 99"),
    ("whisper-medium --task speech-to-text --sequence-length 99", "sequence length is 99"),
    ("bert-base-uncased --task masked-lm --target-length 9", "target length is 9"),
    ("gpt2 --task causal-lm --labels 3", "labels is 3"),
    (
        "vit-large-patch16-224 --task image-classification --gpu h200 --largest sequence-length",
        "--largest batch",
    ),
])  # fmt: skip
def test_what_a_task_has_not_is_refused_rather_than_ignored(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "input", None)
    assert run(["predict", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "does not use it" in err or "has no sequences" in err


def test_a_recipe_s_marker_stands_under_its_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "gpt2", "--task", "causal-lm", "--recipe", "bf16 + fp61"]) == 2
    text, marker, *_ = capsys.readouterr().err.splitlines()
    assert text[marker.index("^") : marker.rindex("^") + 1] == "fp61"


def test_advice_about_another_trainer_s_optimizer_is_one_line_a_key(tmp_path: Path) -> None:
    from snugfit.cli.jobfile import read_job_file

    file = tmp_path / "job.yaml"
    file.write_text("optim: adamw_hf\nlearning_rate_scheduler: cosine\n")
    with pytest.raises(SnugfitError) as told:
        read_job_file(file)
    first, second, keys, *_ = str(told.value).splitlines()
    assert first.endswith("write the optimizer in the recipe. Here: recipe: adamw.")
    assert second.startswith("learning_rate_scheduler")
    assert keys.startswith("Keys are options")


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("text-classification", "sequence-classification"),
        ("SEQ_CLS", "sequence-classification"),
        ("Causal LM", "causal-lm"),
        ("masked_lm", "masked-lm"),
        ("automatic-speech-recognition", "speech-to-text"),
    ],
)
def test_a_task_is_taken_as_others_write_it(written: str, ours: str) -> None:
    assert Task.parse(written) is Task(ours)


def test_more_labels_than_transformers_can_name_are_refused() -> None:
    with pytest.raises(JobError, match="labels is 16000000; allowed are whole numbers from 1 to 262,144"):
        job_of(BERT, "sequence-classification", labels=16_000_000)
