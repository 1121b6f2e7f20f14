"""Samples: the tokens that each task makes of its rows, and errors that name the row."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from small_models import small_job
from small_tokenizers import saved, tokenizer
from snugfit.data.row_sources import read_rows
from snugfit.data.rows import Row
from snugfit.data.samples import PACKED, Samples, samples_of
from snugfit.data.tokens import load_tokenizer, padding_token
from snugfit.errors import UsageError
from snugfit.job.job import Job, Task
from snugfit.training.run.dataset import _notes_on_rows

CLASSES, WORDS = Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION
CAUSAL, MASKED, PAIRED = Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQ2SEQ_LM
MANNER = {CAUSAL: "gpt2", PAIRED: "t5"}


def job_of(task: Task, length: int = 6, **more: Any) -> Job:
    return replace(small_job(MANNER.get(task, "bert"), 1), task=task, sequence_length=length, **more)


def made(
    task: Task, rows: Sequence[Row], *, length: int = 6, job: dict[str, Any] | None = None, **more: Any
) -> Samples:
    words = more.pop("words", None) or tokenizer(MANNER.get(task, "bert"))
    return samples_of(read_rows(rows), job_of(task, length, **(job or {})), words, **more)


TEXTS = [{"text": "one two three"}, {"text": "four"}, {"text": "five six seven eight nine ten"}]
LABELLED = [{**row, "label": label} for row, label in zip(TEXTS, (1, 0, 1), strict=True)]

# [PAD] 0 [UNK] 1 [CLS] 2 [SEP] 3 [MASK] 4 <s> 5 </s> 6 one 7 two 8 three 9 four 10 five 11 ... ten 16
# . 17 - 18 u 19 s 20 of 21
MADE: dict[str, tuple[Task, list[Row], dict[str, Any], list[dict[str, Any]]]] = {
    "classes": (CLASSES, LABELLED, {}, [
        {"input_ids": [2, 7, 8, 9, 3], "label": 1},
        {"input_ids": [2, 10, 3], "label": 0},
        {"input_ids": [2, 11, 12, 13, 14, 3], "label": 1},
    ]),
    "shorter": (CLASSES, LABELLED[2:], {"length": 4}, [{"input_ids": [2, 11, 12, 3], "label": 1}]),
    "regression": (CLASSES, [{"text": "one", "label": "0.25"}], {"job": {"labels": 1}}, [
        {"input_ids": [2, 7, 3], "label": 0.25},
    ]),
    "pairs": (CLASSES, [{"sentence1": "one", "sentence2": "two three", "label": 0}], {}, [
        {"input_ids": [2, 7, 3, 8, 9, 3], "token_type_ids": [0, 0, 0, 1, 1, 1], "label": 0},
    ]),
    "a pair that is cut": (CLASSES, [{"sentence1": "one one one one", "sentence2": "two", "label": 0}], {}, [
        {"input_ids": [2, 7, 7, 3, 8, 3], "token_type_ids": [0, 0, 0, 0, 1, 1], "label": 0},
    ]),
    "words": (WORDS, [{"tokens": ["one", "u.s", "of", "ten"], "ner_tags": [1, 0, 1, 0]}], {"length": 8}, [
        {"input_ids": [2, 7, 19, 17, 20, 21, 16, 3], "labels": [-100, 1, 0, -100, -100, 1, 0, -100]},
    ]),
    "names of words": (WORDS, [{"tokens": ["one", "two"], "tags": ["O", "B"]}], {}, [
        {"input_ids": [2, 7, 8, 3], "labels": [-100, 1, 0, -100]},
    ]),
    "causal": (CAUSAL, TEXTS[:1], {}, [{"input_ids": [7, 8, 9], "labels": [7, 8, 9]}]),
    "prompts": (CAUSAL, [{"prompt": "one two ", "completion": "three"}], {}, [
        {"input_ids": [7, 8, 9, 6], "labels": [-100, -100, 9, 6]},
    ]),
    "a prompt that is cut": (CAUSAL, [{"prompt": "one two", "completion": " three four five six"}], {}, [
        {"input_ids": [7, 8, 9, 10, 11, 12], "labels": [-100, -100, 9, 10, 11, 12]},
    ]),
    "a prompt whose last word goes on": (CAUSAL, [{"prompt": "one u", "completion": "two three"}], {}, [
        {"input_ids": [7, 1, 9, 6], "labels": [-100, 1, 9, 6]},
    ]),
    "sources": (PAIRED, [{"source": "one two", "target": "three"}], {}, [
        {"input_ids": [7, 8, 6], "labels": [9, 6]},
    ]),
    "a target that is cut": (PAIRED, [{"source": "one", "target": "one " * 20}], {}, [
        {"input_ids": [7, 6], "labels": [7] * 7 + [6]},
    ]),
    "tokens with labels": (CLASSES, [{"input_ids": [2, 7, 3], "label": "1"}], {"words": None}, [
        {"input_ids": [2, 7, 3], "label": 1},
    ]),
    "tokens that are padded": (
        CAUSAL,
        [{"input_ids": [7, 8, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [7, 8, -100, -100]}],
        {},
        [{"input_ids": [7, 8], "labels": [7, 8]}],
    ),
    "tokens with types": (
        CLASSES,
        [{"input_ids": [*range(7, 15)], "token_type_ids": [0, 1] * 4, "label": 0}],
        {},
        [{"input_ids": [7, 8, 9, 10, 11, 12], "token_type_ids": [0, 1, 0, 1, 0, 1], "label": 0}],
    ),
    "tokens and a target": (PAIRED, [{"input_ids": [7, 6], "labels": [8, 9, 6]}], {}, [
        {"input_ids": [7, 6], "labels": [8, 9, 6]},
    ]),
    "tokens with masks of their own": (MASKED, [{"input_ids": [2, 4, 3], "labels": [-100, 7, -100]}], {}, [
        {"input_ids": [2, 4, 3], "labels": [-100, 7, -100]},
    ]),
    "tokens with classes": (WORDS, [{"input_ids": [2, 7, 3], "labels": [-100, 1, -100]}], {}, [
        {"input_ids": [2, 7, 3], "labels": [-100, 1, -100]},
    ]),
    "packed": (CAUSAL, TEXTS, {"pack": True, "length": 4}, [
        {"input_ids": [7, 8, 9, 6], "labels": [7, 8, 9, 6]},
        {"input_ids": [10, 6, 11, 12], "labels": [10, 6, 11, 12]},
        {"input_ids": [13, 14, 15, 16], "labels": [13, 14, 15, 16]},
    ]),
    "packed, and all of it": (CAUSAL, TEXTS[:2], {"pack": True, "length": 16}, [
        {"input_ids": [7, 8, 9, 6, 10, 6], "labels": [7, 8, 9, 6, 10, 6]},
    ]),
    "packed tokens": (CAUSAL, [{"input_ids": [7, 8]}, {"input_ids": [9, 6]}], {"pack": True, "length": 5}, [
        {"input_ids": [7, 8, 6, 9, 6], "labels": [7, 8, 6, 9, 6]},
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_rows_become_samples(name: str) -> None:
    task, rows, more, says = MADE[name]
    samples = made(task, rows, **more)
    assert list(samples) == says
    assert samples.lengths.tolist() == [len(sample["input_ids"]) for sample in says]
    assert list(pickle.loads(pickle.dumps(samples))) == says


def test_what_was_cut_is_counted() -> None:
    samples = made(CLASSES, LABELLED)
    assert (samples.cut, samples.cut_tokens, samples.left_out) == (1, 2, 0)
    packed = made(CAUSAL, TEXTS, pack=True, length=4)
    assert (packed.cut, packed.cut_tokens, len(packed), packed.notes) == (0, 1, 3, (PACKED,))
    job = replace(small_job("gpt2", 1), batch_size=3)
    assert [*_notes_on_rows(packed, job)] == []
    (few,) = _notes_on_rows(packed, replace(job, batch_size=4))
    assert "all 3 samples" in few
    both = made(PAIRED, [{"source": "one " * 9, "target": "two " * 9}])
    assert (both.cut, both.cut_tokens) == (1, 4 + 2)


def test_one_sample_far_longer_than_the_rest() -> None:
    """It is truncated like any other, and counted."""
    samples = made(CLASSES, [*LABELLED, {"text": "one " * 5000, "label": 0}])
    assert samples.lengths.max() == 6
    assert samples.cut_tokens == 2 + 5000 - 4


def test_what_teaches_nothing_is_left_out_and_counted() -> None:
    rows = [
        {"prompt": "one two three four five six ", "completion": "seven"},
        {"prompt": "one ", "completion": "two"},
    ]
    samples = made(CAUSAL, rows)
    assert list(samples) == [{"input_ids": [7, 8, 6], "labels": [-100, 8, 6]}]
    assert samples.left_out == 1
    for task, rows, ids in (
        (CAUSAL, [{"text": "one"}, {"text": ""}, {"text": "one two"}], [7, 8]),
        (MASKED, [{"text": ""}, {"text": "one two"}], [2, 7, 8, 3]),
        (WORDS, [{"tokens": [], "tags": []}, {"tokens": ["one"], "tags": [1]}], [2, 7, 3]),
    ):
        samples = made(task, rows)
        assert [samples.inputs[0], len(samples), samples.left_out] == [ids, 1, len(rows) - 1]


def test_label_names_have_one_order() -> None:
    rows = [{"text": "one", "label": name} for name in ("spam", "ham", "spam")]
    samples = made(CLASSES, rows)
    assert (samples.label_names, samples.label.tolist()) == (("ham", "spam"), [1, 0, 1])
    held_out = made(CLASSES, rows[:1], label_names=samples.label_names)
    assert held_out.label.tolist() == [1], "a split that lacks a class numbers the others as before"
    assert made(CLASSES, LABELLED).label_names == ("0", "1")


def test_a_dataset_knows_the_order_of_its_classes() -> None:
    import datasets

    named = datasets.ClassLabel(names=["yes", "no"])
    rows = datasets.Dataset.from_list(
        [{"text": "one", "label": 1}],
        features=datasets.Features({"text": datasets.Value("string"), "label": named}),
    )
    samples = made(CLASSES, rows)
    assert (samples.label_names, samples.label.tolist()) == (("yes", "no"), [1])
    assert made(CLASSES, rows, label_names=("0", "1")).label.tolist() == [1]
    with pytest.raises(
        UsageError, match=r"its classes are yes, no, in this order, but the training data has no, yes"
    ):
        made(CLASSES, rows, label_names=("no", "yes"))
    with pytest.raises(UsageError, match=r"has 3 classes \(a, b, c\), but the job has 2 labels"):
        made(CLASSES, LABELLED, label_names=("a", "b", "c"))


def test_a_mask_is_a_function_of_seed_epoch_and_index() -> None:
    rows = [{"text": "one two three four five six seven eight nine ten " * 2} for _ in range(60)]
    job = {"length": 22, "seed": 1}
    samples, again = made(MASKED, rows, **job), made(MASKED, rows, **job)
    other = made(MASKED, rows, length=22, seed=2)
    first = samples.sample(3, epoch=1)
    assert again.sample(3, epoch=1) == first
    assert first not in (samples.sample(3), samples.sample(4, epoch=1), other.sample(3, epoch=1))
    assert samples[3] == samples.sample(3, epoch=0)


def test_masks_are_berts() -> None:
    """The masks cover 15 % of a sequence's words, and at least one. They hide 80 % of these, replace 10 %,
    and keep 10 %."""
    samples = made(
        MASKED, [{"text": "one two three four five six seven eight nine ten " * 2}] * 300, length=22
    )
    ids, labels = (
        np.array([samples[index][name] for index in range(300)]) for name in ("input_ids", "labels")
    )
    original = np.array(samples.inputs[0])
    asked = labels != -100
    assert (asked.sum(axis=1) == 3).all(), "15 % of 20 words"
    assert (labels[asked] == np.broadcast_to(original, ids.shape)[asked]).all()
    assert (ids[~asked] == np.broadcast_to(original, ids.shape)[~asked]).all()
    assert not asked[:, [0, -1]].any(), "special tokens are not predicted"
    hidden, kept = (ids[asked] == 4).mean(), (ids[asked] == labels[asked]).mean()
    assert hidden == pytest.approx(0.8, abs=0.05)
    assert kept == pytest.approx(0.1 + 0.1 / 22, abs=0.04)
    assert made(MASKED, [{"text": "one"}])[0]["labels"] == [-100, 7, -100]


LIST = [{"text": "one", "label": 0}, {"text": "two", "label": 1}]
AMISS: dict[str, tuple[Task, list[Row], dict[str, Any], str]] = {
    "all labels ignored": (
        CAUSAL,
        [{"input_ids": [7, 8], "labels": [7, -100]}] * 2,
        {},
        "row 1 and every other row: there is nothing to learn",
    ),
    "all left out": (CAUSAL, [{"prompt": "one " * 9, "completion": "two"}], {}, "a prompt fills the whole"),
    "a token beyond": (
        CAUSAL,
        [{"input_ids": [7, 8]}, {"input_ids": [7, 96]}],
        {},
        "row 2: token 96; gpt2 knows tokens 0 to 95",
    ),
    "a target's token beyond": (
        PAIRED,
        [{"input_ids": [7, 6], "labels": [8, 99]}],
        {},
        "row 1: token 99; t5 knows",
    ),
    "a token below": (CAUSAL, [{"input_ids": [7, -1]}], {}, "row 1: token -1; gpt2"),
    "a token beyond 32 bits": (CAUSAL, [{"input_ids": [7, 1 << 40]}], {}, "which is not a token"),
    "a label beyond": (
        CLASSES,
        [*LIST, {"text": "x", "label": 2}],
        {},
        r"row 3: label 2; the job has 2 labels, 0 to 1. Set labels: 3",
    ),
    "a label beyond 64 bits": (
        CLASSES,
        [*LIST, {"text": "x", "label": 1 << 70}],
        {},
        "row 3: label a number of 71 bits; the job has 2 labels, 0 to 1",
    ),
    "a label below 64 bits": (CLASSES, [{"text": "x", "label": -(10**5000)}], {}, "label a number of 16,610"),
    "labels from 1": (CLASSES, [{"text": "x", "label": 1}, {"text": "x", "label": 2}], {}, "count from 0"),
    "a secret label": (CLASSES, [{"text": "x", "label": -1}], {}, "row 1: label -1.*secret labels"),
    "a name too many": (
        CLASSES,
        [{"text": "x", "label": name} for name in "abc"],
        {},
        r"row 3: there are 3 different labels \(a, b, c\).*Set labels: 3",
    ),
    "a name unknown": (
        CLASSES,
        [{"text": "x", "label": "spm"}],
        {"label_names": ("ham", "spam")},
        "row 1: label 'spm' is not one of ham, spam. Did you mean 'spam'",
    ),
    "mixed labels": (
        CLASSES,
        [{"text": "x", "label": 1}, {"text": "x", "label": "a"}],
        {},
        "row 1: its label is a number, and that of .*row 2 is text",
    ),
    "a fraction": (CLASSES, [{"text": "x", "label": 0.5}], {}, "For a regression set labels"),
    "no label": (CLASSES, [{"text": "x", "label": None}], {}, "row 1: label None is neither"),
    "several labels": (
        CLASSES,
        [{"text": "x", "label": [0, 1]}],
        {},
        "Several labels per sample are not supported",
    ),
    "no number": (
        CLASSES,
        [{"text": "x", "label": "nan"}],
        {"job": {"labels": 1}},
        "row 1: label 'nan' is not a finite number",
    ),
    "a label of words": (
        WORDS,
        [{"input_ids": [7, 8], "labels": [0, 5]}],
        {},
        "row 1: label 5; the job has 2",
    ),
    "fewer labels": (WORDS, [{"tokens": ["one", "two"], "tags": [0]}], {}, "row 1: 2 words and 1 labels"),
    "words as text": (
        WORDS,
        [{"tokens": "one two", "tags": [0, 0]}],
        {},
        "row 1: 'tokens' is 'one two'; it must be a list",
    ),
    "mixed text": (
        CLASSES,
        [*LIST, {"text": 7, "label": 0}],
        {},
        "row 3: 'text' is 7; it must be text in every row",
    ),
    "not valid text": (
        CLASSES,
        [*LIST, {"text": None, "label": 0}],
        {},
        r"row 3: 'text' is nothing \(null\)",
    ),
    "a column missing": (
        CLASSES,
        [*LIST, {"label": 0}],
        {},
        "row 3: it has no 'text', but other rows do",
    ),
    "half a surrogate": (
        CLASSES,
        [{"text": "a\ud800", "label": 0}],
        {},
        "row 1: character 2 of 'text' is half",
    ),
    "empty text": (
        CLASSES,
        [{"text": "", "label": 0}],
        {"words": tokenizer("gpt2")},
        "row 1: its text is empty",
    ),
    "ids as text": (
        CAUSAL,
        [{"input_ids": "7 8"}],
        {},
        "row 1: 'input_ids' is '7 8'; it must be a list of numbers",
    ),
    "ids in lists": (CAUSAL, [{"input_ids": [[7], [8, 9]]}], {}, "it must be a list of numbers"),
    "labels of another length": (
        CAUSAL,
        [{"input_ids": [7, 8], "labels": [7]}],
        {},
        "row 1: 2 input_ids and 1 labels",
    ),
    "types in some rows": (
        CLASSES,
        [{"input_ids": [7], "label": 0, "token_type_ids": [0]}, {"input_ids": [7], "label": 0}],
        {},
        "row 2: it has no 'token_type_ids'",
    ),
    "types from some row on": (
        CLASSES,
        [{"input_ids": [7], "label": 0}, {"input_ids": [7], "label": 0, "token_type_ids": [0]}],
        {},
        "row 2: it has 'token_type_ids', but the first row does not",
    ),
    "no room": (CLASSES, LIST, {"length": 2}, "2 tokens leave no room for text: this tokenizer adds 2"),
    "packed classes": (CLASSES, LIST, {"pack": True}, "Packing works for causal-lm on plain text"),
    "packed prompts": (
        CAUSAL,
        [{"prompt": "a", "completion": "b"}],
        {"pack": True},
        "texts must not be joined",
    ),
    "packed without an end": (
        CAUSAL,
        TEXTS,
        {"pack": True, "words": tokenizer("bert")},
        "this tokenizer has none",
    ),
    "no mask token": (
        MASKED,
        TEXTS,
        {"words": tokenizer("gpt2")},
        "this tokenizer has none. Use the model's",
    ),
}


@pytest.mark.parametrize("name", AMISS)
def test_a_row_that_would_break_a_run_is_named(name: str) -> None:
    task, rows, more, says = AMISS[name]
    with pytest.raises(UsageError, match=says):
        made(task, rows, **more)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="its rows are text, but no tokenizer was found"):
        samples_of(read_rows(LIST), job_of(CLASSES), None)
    assert len(samples_of(read_rows([{"input_ids": [7, 8]}]), job_of(CAUSAL), None)) == 1


def test_tensors_are_numbers_too() -> None:
    """The dataset is a map-style one of torch, tokenized by its user."""

    class Tokenised(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {
                "input_ids": torch.tensor([2, 7, 3, 0]),
                "attention_mask": torch.tensor([1, 1, 1, 0]),
                "labels": torch.tensor(index),
            }

    samples = samples_of(read_rows(Tokenised()), job_of(CLASSES), None)
    assert list(samples) == [{"input_ids": [2, 7, 3], "label": label} for label in (0, 1)]


def test_a_sample_is_asked_for_as_of_a_list() -> None:
    samples = made(CLASSES, LABELLED)
    assert samples[-1] == samples[2]
    assert samples[1:] == [samples[1], samples[2]]
    with pytest.raises(IndexError):
        samples[3]


# ---- tokenizers -----------------------------------------------------------------------------------------


def test_a_tokenizer_is_loaded_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a socket was opened"))
    loaded = load_tokenizer(saved(tmp_path, "bert"))
    assert loaded("one two")["input_ids"] == [2, 7, 8, 3]


def test_no_socket_is_opened_for_a_name_that_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub fetched a list of coding agents, regardless of `local_files_only`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _detect_agent

    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"))
    monkeypatch.setattr(_detect_agent, "_registry", None)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(UsageError, match="no request goes to the hub"):
        load_tokenizer("no/such")
    assert not asked
    assert constants.HF_HUB_OFFLINE is False


def _nothing(folder: Path) -> str:
    return str(folder)


def _broken(folder: Path) -> str:
    saved(folder, "bert")
    (folder / "tokenizer.json").write_text("{")
    return str(folder)


def _code_of_its_own(folder: Path) -> str:
    saved(folder, "bert")
    config = folder / "tokenizer_config.json"
    described = {**json.loads(config.read_text()), "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    config.write_text(json.dumps({**described, "tokenizer_class": "Evil"}))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\n")
    return str(folder)


def _file(folder: Path) -> str:
    (folder / "tokenizer.txt").write_text("")
    return str(folder / "tokenizer.txt")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_nothing, r"this folder has no tokenizer \(tokenizer.json\)"),
        (_broken, "transformers cannot load its tokenizer"),
        (_code_of_its_own, "transformers cannot load its tokenizer"),
        (_file, "the tokenizer is a folder with a tokenizer.json"),
        (
            lambda _: "nobody/no-such-model",
            "the local cache of the hub has no tokenizer of that name",
        ),
    ],
)
def test_a_tokenizer_that_is_not_there(
    make: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a socket was opened"))
    with pytest.raises(UsageError, match=says):
        load_tokenizer(make(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_padding_token_is_the_one_that_the_model_looks_for() -> None:
    assert padding_token(job_of(CLASSES), tokenizer("bert")) == 0
    assert padding_token(job_of(CAUSAL), tokenizer("gpt2")) == 6, "the end token, without a padding token"
    assert padding_token(job_of(CAUSAL), tokenizer("gpt2", pad_token="<s>")) == 5
    as_classifier = replace(job_of(CAUSAL), task=CLASSES)
    assert padding_token(as_classifier, tokenizer("gpt2", pad_token="<s>")) == 0, "the config's end token"
    assert padding_token(job_of(CAUSAL)) == 0


def test_a_fork_does_not_make_the_tokenizer_warn() -> None:
    made(CLASSES, LABELLED)
    assert os.environ.get("TOKENIZERS_PARALLELISM")
