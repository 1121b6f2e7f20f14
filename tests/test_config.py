"""Bad configs, from broken JSON to remote code and config bombs. Each gives one `ModelError`, runs no code,
shows no prompt and opens no socket."""

from __future__ import annotations

import builtins
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from snugfit.errors import ModelError
from snugfit.job.build import Construction
from snugfit.job.config import DTYPES, LARGEST_FILE, check_facts, parse_config
from snugfit.job.find import preset_names, read_preset
from snugfit.job.model import Model

BERT = read_preset("google-bert/bert-base-uncased")


@pytest.fixture(autouse=True)
def closed_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a socket is opened or the terminal is read while a config is parsed."""

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a socket was opened, or the user was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(builtins, "input", refuse)


def changed(**keys: Any) -> bytes:
    return json.dumps(BERT | keys).encode()


BAD_CONTENT = {
    "empty file": (b"", "not a config.json: it is empty"),
    "blank file": (b" \n", "not a config.json: it is empty"),
    "empty object": (b"{}", "model_type"),
    "half an object": (b"{", "not a config.json"),
    "a list": (b"[]", "a list"),
    "null": (b"null", "null"),
    "UTF-16": ('{"model_type": "bert"}'.encode("utf-16"), "UTF-8"),
    "nested without end": (b"[" * 100_000, "nested"),
    "nested objects": (b'{"model_type": "bert", "a": ' + b'{"a":' * 40 + b"1" + b"}" * 41, "nested"),
    "a key twice": (b'{"model_type": "bert", "model_type": "gpt2"}', "'model_type' is given twice"),
    "unknown architecture": (changed(model_type="brt"), "Did you mean 'bert'"),
    "does not know the architecture": (json.dumps({"hidden_size": 768}).encode(), "model_type"),
    "architecture is a number": (changed(model_type=3), '3 is not a "model_type"'),
    "architecture is a list": (changed(model_type=["bert"]), '["bert"] is not a "model_type"'),
    "remote code": (changed(model_type="own", auto_map={"AutoModel": "modeling.Evil"}), "does not run code"),
    "remote code, nested": (changed(text_config={"trust_remote_code": True}), "trust_remote_code"),
    "text model is a text": (changed(text_config="bert"), '"text_config" is "bert"; it must be an object'),
    "text model is a list": (changed(text_config=[]), '"text_config" is []; it must be an object'),
    "kernels from the hub": (changed(_attn_implementation="evil/repo"), "_attn_implementation"),
    "kernels for a part": (changed(attn_implementation={"": "evil/repo"}), "attn_implementation"),
    "internal key": (changed(_attn_implementation_internal="evil/repo"), "_attn_implementation_internal"),
    "nested": (changed(text_config={"_attn_implementation_internal": "evil/repo"}), "evil/repo"),
    "experts": (changed(_experts_implementation="kernels-community/x"), "_experts_implementation"),
    "no heads": (changed(num_attention_heads=0), "num_attention_heads"),
    "shared heads": (
        changed(num_key_value_heads=5),
        '"num_key_value_heads" is 5, which does not divide "num_attention_heads", 12',
    ),
    "no shared heads": (changed(num_key_value_heads=0), '"num_key_value_heads" is 0'),
    "more experts asked than there are": (
        changed(num_local_experts=2, num_experts_per_tok=4),
        '"num_experts_per_tok" is 4, more than "num_local_experts", which is 2',
    ),
    "uneven heads": (changed(num_attention_heads=7), 'does not divide "hidden_size", 768'),
    "negative layers": (changed(num_hidden_layers=-1), "num_hidden_layers"),
    "no layers": (changed(num_hidden_layers=0), "num_hidden_layers"),
    "a million layers": (changed(num_hidden_layers=10**6), "from 1 to 1,000"),
    "vocabulary": (changed(vocab_size=10**12), "vocab_size"),
    "width": (changed(hidden_size=10**9), "hidden_size"),
    "nested width": (changed(text_config={"hidden_size": 10**9}), "hidden_size"),
    "in a list": (changed(image_size=[224, 10**9]), "image_size"),
    "a base of letters": (changed(rope_theta="9" * 100_000), "allowed are numbers above 0"),
    "a nested base": (changed(rope_parameters={"full": {"rope_theta": 0}}), '"rope_theta" is 0'),
    "text": (changed(hidden_size="32"), '"hidden_size" is "32"'),
    "fraction": (changed(hidden_size=32.5), "32.5"),
    "true": (changed(hidden_size=True), "true"),
    "NaN": (b'{"model_type": "bert", "hidden_size": NaN}', "NaN"),
    "infinite": (b'{"model_type": "bert", "hidden_size": 1e999}', "allowed are whole numbers"),
    "endless number": (
        b'{"model_type": "bert", "hidden_size": ' + b"9" * 5000 + b"}",
        "not a config.json",
    ),
    "dtype": (changed(dtype="float99"), "float99"),
    "old key": (changed(torch_dtype="int8"), "torch_dtype"),
    "weights by network": (changed(use_pretrained_backbone=True), "download"),
    "too large": (b'{"model_type": "bert", "x": "' + b"x" * LARGEST_FILE + b'"}', "4 MiB"),
}


@pytest.mark.parametrize("case", BAD_CONTENT)
def test_bad_content_is_one_clear_error(case: str, tmp_path: Path) -> None:
    content, expected = BAD_CONTENT[case]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Model.find(str(tmp_path))
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize("name", ["nobody/has-this", "bert-larg-uncased", "no_such_model"])
def test_an_unknown_name_opens_no_socket(name: str) -> None:
    with pytest.raises(ModelError, match="forbids to ask the hub"):
        Model.find(name, online=False)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [a_fifo, a_dangling_link, a_folder, a_device])
@pytest.mark.parametrize("what", ["config.json", "the model"])
def test_what_is_no_file_is_refused_without_waiting(make: Any, what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    make(path)
    asked = tmp_path if what == "config.json" else path
    with pytest.raises(ModelError, match=r"not a regular file|broken link|has no config.json"):
        Model.find(str(asked))


def test_a_model_folder_that_is_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"\x80weights")
    with pytest.raises(ModelError, match="UTF-8"):
        Model.find(str(path))


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is injected, because root can read any file."""
    (tmp_path / "config.json").write_bytes(changed())

    def denied(*arguments: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ModelError, match="permission denied"):
        Model.find(str(tmp_path / "config.json"))


def test_what_a_recipe_decides_is_left_out_of_the_facts() -> None:
    facts = parse_config(
        changed(
            dtype="bfloat16",
            _attn_implementation="flash_attention_2",
            id2label={"0": "a", "1": "b", "2": "c"},
            transformers_version="4.6.0",
            text_config={"torch_dtype": "float16", "_experts_implementation": "eager", "hidden_size": 32},
        ),
        location="here",
    )
    assert facts == BERT | {"text_config": {"hidden_size": 32}, "dtype": "bfloat16"}


def test_infinite_numbers_are_read_as_python_and_as_transformers_write_them() -> None:
    """Mamba-2 and its hybrids have a `time_step_limit` of (0, infinity)."""
    for written in ("Infinity", '{"__float__": "Infinity"}'):
        content = f'{{"model_type": "mamba2", "time_step_limit": [0.0, {written}]}}'
        model = Model.from_config(parse_config(content.encode(), location="here"), name="mamba2")
        json.loads(model.facts, parse_constant=pytest.fail)
        assert model.transformers_config("causal-lm", 2).time_step_limit == [0.0, float("inf")]


def test_what_is_beside_a_known_architecture_is_ignored_and_said() -> None:
    """DeepSeek-V3, Kimi-K2 and Phi-4-mini refer to code of their own, gpt-oss and DeepSeek to a
    quantization."""
    config = changed(auto_map={"AutoModel": "evil.Model"}, quantization_config={"quant_method": "mxfp4"})
    model = Model.from_config(parse_config(config, location="here"), name="bert")
    built = model.transformers_config("sequence-classification", 2)
    assert not hasattr(built, "auto_map")
    assert not hasattr(built, "quantization_config")
    again = Model.from_json(json.loads(json.dumps(model.to_json())))
    assert ["auto_map" in sentence for sentence in again.doubts] == [True]
    doubts = Construction(dtype="float32", autocast=None).doubts
    assert ["mxfp4" in sentence for sentence in doubts(again.config)] == [True]
    plain = Model.find("gpt2")
    assert not (*plain.doubts, *doubts(plain.config))


@pytest.mark.parametrize(
    "facts",
    [
        {"model_type": "gpt2", "n_inner": None},
        {"model_type": "deberta-v2", "type_vocab_size": 0},
        {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 8},
        {"model_type": "vit", "image_size": [224, 256]},
        {"model_type": "musicflamingo", "max_position_embeddings": 1200.0},
        {"model_type": "glm", "hidden_size": 4096, "num_attention_heads": 96},
        {"model_type": "glm4_moe", "hidden_size": 4096, "num_attention_heads": 96},
    ],
    ids=lambda facts: facts["model_type"],
)
def test_facts_that_stand_as_they_are(facts: dict[str, Any]) -> None:
    """Sizes may be absent, 0, lists or floats. In GLM only the class defines the head width; in GLM-4.5 it is
    cut."""
    assert check_facts(facts, where="here") == facts


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_facts_only(name: str) -> None:
    """A preset holds sizes, not weights. Reading retains every key of the file, including the dtype of the
    weights."""
    from importlib import resources

    file = resources.files("snugfit.job").joinpath("presets", *f"{name}.json".split("/"))
    document = json.loads(file.read_bytes())
    assert document["dtype"] in DTYPES
    assert document == read_preset(name)
