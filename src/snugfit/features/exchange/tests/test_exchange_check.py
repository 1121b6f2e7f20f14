"""`snugfit check`: each finding is verified with the library that it concerns.

A file whose fixes are applied has no finding left that could be fixed.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from snugfit.cli.main import run
from snugfit.features.exchange import check as module
from snugfit.features.exchange.check import Checked, check, check_document
from snugfit.features.exchange.dialect import DIALECTS, dialect
from snugfit.features.exchange.document import Document, open_document
from snugfit.features.exchange.installed import CHECKPOINTING, OLD_CHECKPOINTING, checkpointing_name, defaults
from snugfit.features.exchange.python.read_script import read_script
from snugfit.features.exchange.read import read_arguments
from tiers import crossed

SCRIPT = """\
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

RATE = 3e-5
default_args = {
    "output_dir": "tmp",
    "evaluation_strategy": "steps",  # when
    "num_train_epochs": 1,
    "overwrite_output_dir": True,
}
model = AutoModelForSequenceClassification.from_pretrained("bert-large-uncased", dtype=torch.float32)
training_args = TrainingArguments(
    per_device_train_batch_size=1,  # é
    gradient_checkpointing=True,  # memory
    gradient_checkpointing_kwargs={"use_reentrant": True},
    fp16=True, bf16=True,
    adafactor=True,
    learning_rate=RATE,
    max_steps=100,
    fp16_backend="amp",
    half_precision_backend="auto",
    dataloader_prefetch_factor=2, **default_args
)
"""

AXOLOTL = """\
# mine
base_model: meta-llama/Llama-3.2-1B   # the model
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
# adapters
lora_r: 16
lora_target_modules:
  - q_proj
  - v_proj
evaluation_strategy: steps   # when
eval_steps: 10
evals_per_epoch: 2
micro_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 2e-4"""


def found(folder: Path, name: str, content: Any) -> Checked:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return check(file)


def correct(checked: Checked) -> Document:
    """Return the file with every fix applied, including fixes that earlier ones reveal."""
    document = open_document(Path(checked.path))
    for _ in range(4):
        values: dict[str, Any] = deepcopy(dict(document.values))
        fixes = [finding.fix for finding in checked.findings if finding.fix]
        for fix in fixes:
            for key, value in fix.set.items():
                put(values, key.split("."), value)
        for fix in fixes:
            for key in fix.remove:
                drop(values, key.split("."))
        renamed = {old: new for fix in fixes for old, new in fix.rename.items()}
        values = {renamed.get(key, key): value for key, value in values.items()}
        document = replace(document, values=values)
        checked = check_document(document)
    return document


def put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        values[name] = values = inner if isinstance(inner, dict) else {}
    values[path[-1]] = value


def drop(values: Any, path: list[str]) -> None:
    for name in path[:-1]:
        values = values.get(name) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(path[-1], None)


def about(checked: Checked, kind: str) -> set[str]:
    return {key for finding in checked.findings if finding.kind == kind for key in finding.keys}


def test_a_script_is_correct(tmp_path: Path) -> None:
    checked = found(tmp_path, "train.py", SCRIPT)
    assert about(checked, "conflict") == {"fp16", "bf16", "dataloader_prefetch_factor"}
    assert about(checked, "removed") == {"fp16_backend", "half_precision_backend", "overwrite_output_dir"}
    assert "num_train_epochs" in about(checked, "no effect")
    assert not check_document(correct(checked)).findings
    assert Path(checked.path).read_text() == SCRIPT, "snugfit writes into nobody's file"


def test_a_yaml_file_is_correct(tmp_path: Path) -> None:
    checked = found(tmp_path, "lora.yml", AXOLOTL)
    assert not check_document(correct(checked)).findings


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("TrainingArguments('x', use_ipex=True)", {"output_dir": "x"}),
        ("TrainingArguments(use_ipex=True, fp16_backend='amp')", {}),
        ("TrainingArguments(seed=1, use_ipex=True, fp16_backend='amp')", {"seed": 1}),
        ("a = dict\nTrainingArguments(adafactor=True)", {"optim": "adafactor"}),
    ],
)
def test_scripts_in_one_line(tmp_path: Path, script: str, values: dict[str, Any]) -> None:
    assert correct(found(tmp_path, "a.py", script)).values == values


def test_an_accelerator_s_old_arguments(tmp_path: Path) -> None:
    """The cases are from Hugging Face's guide; a value computed at run time is left to the user."""
    checked = found(tmp_path, "a.py", "accelerator = Accelerator(cpu=False, fp16=True)")
    assert about(checked, "renamed") == {"fp16"}
    assert correct(checked).values == {"cpu": False, "mixed_precision": "fp16"}
    (finding,) = found(tmp_path, "a.py", "Accelerator(fp16=training_args.fp16)").findings
    assert (finding.keys, finding.fix) == (("fp16",), None)


def test_a_corrected_script_is_taken_by_the_real_class(tmp_path: Path) -> None:
    """transformers' class refuses the file before its correction, and accepts it afterwards."""
    from transformers import TrainingArguments

    def taken(arguments: dict[str, Any]) -> TrainingArguments:
        own = {key: value for key, value in arguments.items() if "." not in key}
        return TrainingArguments(**own | {"output_dir": str(tmp_path), "use_cpu": True})

    with pytest.raises(TypeError):
        taken(read_script(SCRIPT, "train.py").arguments)
    made = taken(correct(found(tmp_path, "train.py", SCRIPT)).values)
    assert (made.optim, made.bf16, getattr(made, checkpointing_name())) == ("adafactor", True, True)


CONFLICTS = [
    {"fp16": True, "bf16": True},
    {"fp16_full_eval": True, "bf16_full_eval": True},
    {"load_best_model_at_end": True},
    {"dataloader_prefetch_factor": 2},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"logging_steps": 0},
    {"optim": "adamw_nope"},
    {"lr_scheduler_type": "liner"},
    {"eval_strategy": "epochs"},
]


@pytest.mark.parametrize("arguments", CONFLICTS, ids="+".join)
def test_a_conflict_is_one_that_the_real_class_refuses(tmp_path: Path, arguments: dict[str, Any]) -> None:
    from transformers import TrainingArguments

    whole = {"output_dir": str(tmp_path), "use_cpu": True, **arguments}
    with pytest.raises(ValueError, match=r"."):
        TrainingArguments(**whole)
    checked = found(tmp_path, "arguments.json", whole)
    assert about(checked, "conflict") & set(arguments)
    if all(finding.fix for finding in checked.findings):
        TrainingArguments(**correct(checked).values)


def test_names_that_are_said_to_be_gone_are_gone() -> None:
    """The installed class has none of the old names (except as an alias), and all of the new ones.

    An older transformers has only the old name of checkpointing.
    """
    facts = module._facts("trainer")
    for old, entry in facts["renamed"].items():
        if entry["to"].startswith(CHECKPOINTING) and checkpointing_name() == OLD_CHECKPOINTING:
            assert old in defaults()
            continue
        assert entry["to"] in defaults()
        assert (old in defaults()) == bool(entry.get("alias"))
    assert not set(facts["removed"]) & set(defaults())
    from transformers.training_args import OptimizerNames

    names = {one.value for one in OptimizerNames}
    for old, new in facts["values"]["optim"].items():
        assert old not in names
        assert new in names


@pytest.mark.parametrize("name", ["trainer", "accelerate", "deepspeed", "axolotl"])
def test_rules_speak_of_what_the_library_has(name: str) -> None:
    facts = module._facts(name)
    known = module._installed_names(name)
    for rule in facts["rules"]:
        words = {*rule.get("when", {}), *rule.get("given", [])}
        assert words
        assert rule["says"]
        assert not known or {word.split(".")[0] for word in words} <= known | {
            "model",
            "job",
            "dynamo_backend",
            "adapters",
            *(CHECKPOINTING, f"{CHECKPOINTING}_kwargs"),  # names in an older version
        }
        for condition in rule.get("when", {}).values():
            assert not isinstance(condition, dict) or set(condition) <= set(module._CONDITIONS)


def test_an_older_version_is_not_told_of_names_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = {key: value for key, value in defaults().items() if not key.startswith("activation_")}
    monkeypatch.setattr(module, "_installed_names", lambda name: frozenset(older))
    document = {"output_dir": "x", "gradient_checkpointing": True}
    assert not found(tmp_path, "arguments.json", document).findings


def test_what_transformers_itself_writes_has_no_findings(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    text = TrainingArguments(str(tmp_path), use_cpu=True, gradient_accumulation_steps=4).to_json_string()
    assert not found(tmp_path, "arguments.json", text).findings


@pytest.mark.parametrize(
    ("name", "content", "kind", "key"),
    [
        ("a.json", {"output_dir": "x", "warmup_stepss": 3}, "unknown", "warmup_stepss"),
        ("a.json", {"optim": "adamw_hf"}, "renamed", "optim"),
        ("a.json", {"max_steps": 5, "group_by_length": True}, "renamed", "group_by_length"),
        ("a.json", {"lr_scheduler_type": "constant", "warmup_steps": 10}, "no effect", "warmup_steps"),
        ("a.json", {"optim": "adafactor", "adam_beta2": 0.95}, "no effect", "adam_beta2"),
        ("a.json", {"output_dir": "x", "eval_steps": 10}, "no effect", "eval_steps"),
        ("a.json", {"optim": "galore_adamw_layerwise", "gradient_accumulation_steps": 2}, "conflict",
         "optim"),
        ("a.json", {"output_dir": "x", "optim": "galore_adamw"}, "conflict", "optim"),
        ("a.json", {"output_dir": "x", "auto_find_batch_size": True}, "trap", "auto_find_batch_size"),
        ("a.json", {"per_device_train_batch_size": "eight"}, "conflict", "per_device_train_batch_size"),
        ("a.json", {"per_device_train_batch_size": 8.5}, "conflict", "per_device_train_batch_size"),
        ("a.json", {"per_device_train_batch_size": 0}, "conflict", "per_device_train_batch_size"),
        ("a.json", {"output_dir": "x", "gradient_accumulation_steps": True}, "conflict",
         "gradient_accumulation_steps"),
        ("a.json", {"output_dir": "x", "learning_rate": "nan"}, "conflict", "learning_rate"),
        ("a.yaml", "output_dir: x\nbf16: maybe", "conflict", "bf16"),
        ("a.yaml", "output_dir: x\nlearning_rate: 1e-5", "trap", "learning_rate"),
        ("a.py", "m = AutoModelForCausalLM.from_pretrained('gpt2')\nTrainingArguments(bf16=True)", "trap",
         "from_pretrained"),
        ("a.py", "m = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.float16)\n"
         "TrainingArguments(fp16=True)", "conflict", "fp16"),
        ("d.json", {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 8}, "conflict", "train_batch_size"),
        ("d.json", {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {}},
         "conflict", "fp16.enabled"),
        ("d.json", {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "no effect",
         "zero_optimization.offload_param"),
        ("d.json", {"zero_optimization": {"stage": 2}}, "trap", "zero_optimization.stage"),
        ("x.yaml", "base_model: a/b\nsample_packing: true\nmicro_batch_size: 1", "trap", "sample_packing"),
        ("x.yaml", "base_model: a/Mixtral-8x7B\nload_in_4bit: true", "trap", "load_in_4bit"),
        ("x.yaml", "base_model: a/b\nmicro_batch_size: 1\neval_batch_size: 8", "trap", "eval_batch_size"),
        ("f.yaml", "stage: sft\nfinetuning_type: lora\npacking: true", "trap", "packing"),
        ("f.yaml", "model_name_or_path: a/Qwen3-30B-A3B\nfinetuning_type: lora\nquantization_bit: 4", "trap",
         "quantization_bit"),
        ("s.py", "a = SFTConfig('o', packing=True)\nSFTTrainer('gpt2', a)", "trap", "packing"),
        ("s.py", "a = SFTConfig('o', eval_strategy='epoch', per_device_train_batch_size=2)\n"
         "SFTTrainer('gpt2', a)", "trap", "per_device_eval_batch_size"),
        ("c.yaml", "mixed_precision: bf16", "conflict", "distributed_type"),
        ("c.yaml", "distributed_type: 'NO'\nfp16: true", "renamed", "fp16"),
        ("c.yaml", "distributed_type: 'NO'\ndeepspeed_config: {zero_stage: 2}", "no effect",
         "deepspeed_config"),
        ("c.yaml", "distributed_type: 'NO'\nnum_proceses: 1", "unknown", "num_proceses"),
    ],
)  # fmt: skip
def test_findings(tmp_path: Path, name: str, content: Any, kind: str, key: str) -> None:
    checked = found(tmp_path, name, content)
    assert key in about(checked, kind)
    again = check_document(correct(checked))
    assert not [one for one in again.findings if one.fix]


@pytest.mark.parametrize(
    "arguments",
    [{"save_steps": 0.5}, {"bf16": 1}, {"learning_rate": 1}, {"seed": None}, {"report_to": ["wandb"]},
     {"optim": "adamw_torch"}, {"activation_checkpointing": True}, {"dataloader_num_workers": 0}],
    ids=str,
)  # fmt: skip
def test_values_that_the_class_takes_are_no_finding(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert not about(found(tmp_path, "a.json", {"output_dir": "x", **arguments}), "conflict")


def test_packing_with_a_kernel_that_separates_texts_is_no_finding(tmp_path: Path) -> None:
    flash = "attn_implementation: flash_attention_2"
    text = f"base_model: a/b\nsample_packing: true\n{flash}\nload_in_4bit: true\nadapter: qlora"
    assert not found(tmp_path, "x.yaml", text).findings
    neat = "stage: sft\nfinetuning_type: lora\npacking: true\nneat_packing: true\nquantization_bit: 4"
    assert not found(tmp_path, "f.yaml", neat).findings


def test_what_only_running_a_script_would_tell_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text("args = TrainingArguments('x', learning_rate=rate * 2, **more)\n")
    assert check(file).unread == ("learning_rate=rate * 2", "**more")
    assert run(["check", str(file)]) == 0
    assert "Not checked, because the script computes it while it runs: learning_rate=rate * 2, **more." in (
        capsys.readouterr().out
    )


def test_a_corrected_accelerate_config_is_loaded_by_accelerate(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    text = "compute_environment: LOCAL_MACHINE\nfp16: true\ndynamo_backend: INDUCTOR\nnum_processes: 1\n"
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="distributed_type"):
        load_config_from_file(str(file))
    file.write_text(yaml.safe_dump(correct(check(file)).values))
    config = load_config_from_file(str(file))
    assert (config.mixed_precision, config.dynamo_config) == ("fp16", {"dynamo_backend": "INDUCTOR"})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("evaluation_strategy: steps\nmax_steps: 3\n")
    assert run(["check", str(file)]) == 3
    assert "rename evaluation_strategy to" in capsys.readouterr().out
    assert run(["check", str(file), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["findings"][0]["fix"]["rename"] == {"evaluation_strategy": "eval_strategy"}
    assert run(["check", str(file), str(file), "--json"]) == 2
    assert "2 files are given. Give one file." in capsys.readouterr().err
    for gone in (["--output", str(tmp_path / "a.diff")], ["--force"]):
        assert run(["check", str(file), *gone]) == 2
        assert "--json gives it as `fix`" in capsys.readouterr().err
    assert file.read_text().startswith("evaluation_strategy")
    assert run(["check", str(tmp_path / "none.yaml")]) == 2
    file.write_text("eval_strategy: steps\nmax_steps: 3\n")
    assert run(["check", str(file)]) == 0


ODD = [
    None, True, False, 0, -3, 2.5, "", "no", "auto", "x y", "1e-5", [], ["a"], {}, {"a": 1},
    {"enabled": True}, [{"b": None}], 10**30, "NO", "steps", "lora", "é",
]  # fmt: skip
"""Values that no key of a configuration file accepts everywhere."""


def odd_document(name: str, rng: random.Random) -> dict[str, Any]:
    """Return a configuration with keys of one library's table, mostly with values of the wrong type."""
    document: dict[str, Any] = {}
    for key in rng.sample(dialect(name).words(), 8):
        *outer, last = key.split(".")
        inner = document
        for part in outer:
            inner = inner.setdefault(part, {}) if isinstance(inner.get(part, {}), dict) else {}
        inner[last] = deepcopy(rng.choice(ODD))  # shared ones would become aliases
    return document | {dialect(name).known_by[0]: deepcopy(rng.choice(ODD))}


@pytest.mark.parametrize(
    ("name", "suffix"), crossed([name for name in DIALECTS if dialect(name).known_by], ["json", "yaml"])
)
def test_odd_values_are_read_checked_and_fixed_without_an_accident(
    tmp_path: Path, name: str, suffix: str
) -> None:
    """The result is a reading or a message, never a traceback; a corrected file has no fixable finding
    left."""
    rng = random.Random(f"{name}.{suffix}")
    file = tmp_path / f"odd.{suffix}"
    for _ in range(8):
        document = odd_document(name, rng)
        file.write_text(json.dumps(document) if suffix == "json" else yaml.safe_dump(document))
        read_arguments(file)
        checked = check(file)
        assert not [one for one in check_document(correct(checked)).findings if one.fix]


def test_frozen_parts_of_a_script_are_no_unknown_argument(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments\n"
        "model = AutoModelForSequenceClassification.from_pretrained('bert-base-uncased', dtype='float32')\n"
        "model.bert.requires_grad_(False)\n"
        "Trainer(model, TrainingArguments('out')).train()\n"
    )
    assert not check(file).findings
