"""Users' files, read into a job and a recipe: no key is skipped silently, executed or guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from in_roster import missing_techniques
from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.exchange.account import Reading
from snugfit.features.exchange.dialect import DIALECTS, dialect
from snugfit.features.exchange.installed import checkpointing_name, defaults
from snugfit.features.exchange.module_names import TRAINED
from snugfit.features.exchange.processes import RAW
from snugfit.features.exchange.read import BATCH_OF_GPU, PROMPT, read_arguments
from snugfit.job.architectures import heads
from snugfit.job.inputs import added_task, setting_keys
from snugfit.techniques import roster
from snugfit.techniques.translate import read_slots

GUIDE = """
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

default_args = {
    "output_dir": "tmp",
    "eval_strategy": "steps",
    "num_train_epochs": 1,
    "log_level": "error",
    "report_to": "none",
}
raise SystemExit("this file was executed")
model = AutoModelForSequenceClassification.from_pretrained("bert-large-uncased").to("cuda")
training_args = TrainingArguments(
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    fp16=True,
    **default_args,
)
"""
"""The training script of Hugging Face's guide "Efficient training on a single GPU", with a trap in it."""

AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
adapter: lora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 2
micro_batch_size: 2
optimizer: adamw_8bit
learning_rate: 2e-4
bf16: auto
tf32: true
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
special_tokens:
  pad_token: <|end_of_text|>
"""

DEEPSPEED = {
    "fp16": {"enabled": True, "loss_scale": 0},
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999]}},
    "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8},
}

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
downcast_bf16: 'no'
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 1
use_cpu: false
"""


def read(folder: Path, name: str, content: Any) -> Reading:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_arguments(file)


def keys(lines: Any) -> set[str]:
    return {line.key for line in lines}


@pytest.mark.parametrize("task", [task for task in heads() if not added_task(task).is_objective])
def test_the_task_of_a_script_is_that_of_its_auto_class(task: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    auto, _ = heads()[task]
    script.write_text(f"model = {auto}.from_pretrained('somebody/model')\nTrainingArguments(bf16=True)")
    assert read_arguments(script).settings["task"] == task


def test_the_guide_s_script(tmp_path: Path) -> None:
    reading = read(tmp_path, "train.py", GUIDE)
    assert reading.settings == {
        "model": "bert-large-uncased", "task": "sequence-classification", "batch_size": 4,
        "recipe": "fp16 + every_layer + micro_batches(4) + adamw_fused", "loop": "trainer",
    }  # fmt: skip
    assert not reading.refused
    assert keys(reading.ignored) == {"output_dir", "eval_strategy", "num_train_epochs", "log_level"}
    evaluation = next(line for line in reading.ignored if line.key == "eval_strategy")
    assert "--phase evaluate" in evaluation.says
    assert "optim" in keys(reading.took)  # the default, which is not the plain recipe's


def test_an_axolotl_file(tmp_path: Path) -> None:
    reading = read(tmp_path, "lora.yml", AXOLOTL)
    assert reading.settings == {
        "model": "meta-llama/Llama-3.2-1B", "task": "causal-lm", "sequence_length": 2048, "batch_size": 4,
        "learning_rate": 2e-4, "loop": "trainer", "dtype": "bfloat16",
        "recipe": "lora(r=16, targets=all-linear, dropout=0.05, alpha=32) + flash + bf16 + tf32 + "
        "every_layer + micro_batches(2) + adamw_8bit + workers(n=1)",
    }  # fmt: skip
    assert not reading.refused
    assert "flash_attention" in keys(reading.took)
    assert "embeddings_dtype" not in keys(reading.differs), "beside adapters they are 16 bits again"
    whole = read(tmp_path, "full.yml", AXOLOTL.replace("adapter: lora", ""))
    for alpha, shown in ("32.0", "32"), ("0.5", "0.5"):
        text = AXOLOTL.replace("lora_alpha: 32", f"lora_alpha: {alpha}")
        assert f"alpha={shown})" in read(tmp_path, "f.yml", text).settings["recipe"]
    assert "embeddings_dtype" in keys(whole.differs)
    assert "special_tokens.pad_token" in keys(reading.ignored)
    assert "sample_packing" in keys(reading.differs)


def test_a_deepspeed_file(tmp_path: Path) -> None:
    reading = read(tmp_path, "ds.json", DEEPSPEED)
    assert reading.settings == {
        "batch_size": 32, "clip": 1.0, "learning_rate": 3e-5, "loop": "plain",
        "recipe": "fp16 + micro_batches(8) + adamw_fused",
    }  # fmt: skip
    assert not reading.refused
    assert {"fp16.enabled", "zero_optimization.stage"} == keys(reading.differs)


def test_an_accelerate_file(tmp_path: Path) -> None:
    reading = read(tmp_path, "acc.yaml", ACCELERATE)
    assert reading.settings == {"recipe": "bf16", "loop": "accelerate"}
    assert not reading.refused


def test_an_accelerator_in_a_script(tmp_path: Path) -> None:
    text = "accelerator = Accelerator(mixed_precision='fp16', gradient_accumulation_steps=2)"
    reading = read(tmp_path, "train.py", text)
    assert (reading.settings["recipe"], reading.settings["loop"]) == ("fp16 + micro_batches(2)", "accelerate")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_what_transformers_itself_writes_is_understood_whole(tmp_path: Path, suffix: str) -> None:
    from transformers import TrainingArguments

    name = checkpointing_name()
    made = TrainingArguments(
        str(tmp_path), use_cpu=True, optim="sgd", optim_args="momentum=0.5", per_device_train_batch_size=3,
        gradient_accumulation_steps=5, max_grad_norm=0.3, dataloader_num_workers=2,
        **{name: True, f"{name}_kwargs": {"every_n_layers": 3}},
    )  # fmt: skip
    document = {**json.loads(made.to_json_string()), "use_cpu": False}
    content = yaml.safe_dump(document) if suffix == "yaml" else json.dumps(document)
    reading = read(tmp_path, f"arguments.{suffix}", content)
    assert not reading.refused
    assert reading.settings["recipe"] == (
        "every_nth_layer(n=3) + micro_batches(5) + sgd(momentum=0.5) + workers"
    )
    assert (reading.settings["batch_size"], reading.settings["clip"]) == (15, 0.3)


REFUSED = [
    ({"torch_compile_mode": "lite"}, "torch_compile_mode"),
    ({"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}},
     "liger_kernel_config.cross_entropy"),
    ({"fsdp": "full_shard"}, "fsdp"),
    ({"deepspeed": "ds.json"}, "deepspeed"),
    ({"optim": "ademamix_8bit"}, "optim"),
    ({"optim": "galore_adamw_8bit"}, "optim"),
    ({"optim": "galore_adamw", "optim_target_modules": ".*attn.*"}, "optim_target_modules"),
    ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ({"fp16": True, "bf16": True}, "fp16"),
    ({"per_device_train_batch_size": 2.5}, "per_device_train_batch_size"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "key"), REFUSED, ids=[key for _, key in REFUSED])
def test_what_changes_memory_or_maths_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], key: str
) -> None:
    reading = read(tmp_path, "arguments.json", {"output_dir": "x", **arguments})
    assert key in keys(reading.refused)
    with pytest.raises(UsageError, match=key):
        reading.refuse()


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("ds.json", {"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ("ds.json", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
         "zero_optimization.offload_optimizer.device"),
        ("ds.json", {"train_batch_size": 4, "optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        ("ds.json", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
         "train_micro_batch_size_per_gpu"),
        ("acc.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", "distributed_type"),
        ("acc.yaml", "distributed_type: MULTI_XPU\nnum_processes: 8", "distributed_type"),
        ("acc.yaml", "distributed_type: 'NO'\nmixed_precision: mxfp4", "mixed_precision"),
        ("acc.yaml", "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: TE}",
         "fp8_config.backend"),
        ("acc.yaml", "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: TVM}",
         "dynamo_config.dynamo_backend"),
        ("q.yml", "base_model: gpt2\nload_in_8bit: true", "load_in_8bit"),
        ("q.yml", "base_model: gpt2\nadapter: lora\nlora_alpha: 0", "lora_alpha"),
        ("q.yml", "base_model: gpt2\ngradient_checkpointing: offload_disk", "gradient_checkpointing"),
        ("q.yml", "base_model: gpt2\nplugins: [axolotl.integrations.kd.KDPlugin]", "plugins[]"),
        ("t.py", "m = AutoModelForCausalLM.from_pretrained('gpt2', load_in_4bit=True)\n"
         "a = TrainingArguments('x')", "model.load_in_4bit"),
        ("t.py", "m = AutoModelForCausalLM.from_pretrained('gpt2', load_in_8bit=True)\n"
         "a = TrainingArguments('x')", "model.load_in_8bit"),
    ],
)  # fmt: skip
def test_other_libraries_techniques_are_refused_by_name(
    tmp_path: Path, name: str, content: Any, key: str
) -> None:
    assert key in keys(read(tmp_path, name, content).refused)


@pytest.mark.stored_rehearsals
def test_what_is_computed_must_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch that is computed at run time must be given; an output folder need not be."""
    file = tmp_path / "train.py"
    file.write_text(
        "size = int(input())\nargs = TrainingArguments(output_dir=sys.argv[1], "
        "per_device_train_batch_size=size, fp16=size > 3)"
    )
    reading = read_arguments(file)
    assert keys(reading.refused) == {"per_device_train_batch_size", "fp16"}
    line = ["predict", "distilbert-base-uncased", "--task", "masked-lm", "--arguments", str(file)]
    assert run([*line, "--batch-size", "2"]) == 2
    assert "fp16" in capsys.readouterr().err
    assert run([*line, "--batch-size", "2", "--recipe", "bf16", "--sequence-length", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["job"]["batch_size"], document["recipe"]) == (2, "bf16")


@pytest.mark.stored_rehearsals
def test_the_command_starts_from_the_file_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(GUIDE.replace("bert-large-uncased", "distilbert-base-uncased"))
    line = ["predict", "--arguments", str(file), "--sequence-length", "32", "--json"]
    assert run([*line, "--recipe", "bf16 + micro_batches(2)"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["recipe"], document["loop"]) == ("bf16 + micro_batches(2)", "trainer")
    assert (document["job"]["batch_size"], document["job"]["sequence_length"]) == (4, 32)
    assert "gradient_checkpointing" in err
    assert "every_layer" in err


def test_a_folder_is_answered_with_its_files(tmp_path: Path) -> None:
    for name in ("train.py", "notes.txt", "ds.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=r"is a folder.* Name one of its files: ds.json, train.py"):
        read_arguments(tmp_path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_accelerate_itself_writes_is_understood_whole(tmp_path: Path, suffix: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    made = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="fp16", use_cpu=False,
        debug=False, num_processes=1,
    )  # fmt: skip
    file = tmp_path / f"config.{suffix}"
    (made.to_yaml_file if suffix == "yaml" else made.to_json_file)(str(file))
    reading = read_arguments(file)
    assert (reading.settings, reading.refused) == ({"recipe": "fp16", "loop": "accelerate"}, ())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "fp16: true", "its name must end in"),
        ("a.json", "{", "line 1"),
        ("a.json", "[1]", "one mapping"),
        ("a.json", '{"bf16": true, "bf16": false}', "is given twice"),
        ("a.json", '{"learning_rate": NaN}', "NaN"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.json", '{"colour": "red"}', "none of its keys"),
        ("a.yaml", "", "one mapping"),
        ("a.yaml", "optim: !!python/object:os.system x", "tag"),
        ("a.yaml", "a: &a [1]\nb: *a", "anchors"),
        ("a.yaml", "optim: sgd\noptim: sgd", "is given twice"),
        ("a.yaml", "fp16: 2026-13-45", "month"),
        ("a.py", "def f(:", "not valid Python"),
        ("a.py", "x = 1", "a script must call TrainingArguments"),
        ("a.py", "a = TrainingArguments('x')\nb = TrainingArguments('y')", "lines 1, 2"),
        ("a.py", "a = BCOConfig(output_dir='x')", "BCOConfig trains on preferences"),
        ("a.py", "x\0 = TrainingArguments()", "not valid Python"),
    ],
)
def test_what_is_no_configuration_is_one_clear_error(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path, name, content)


def test_another_library_s_file_as_a_job_file_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("output_dir: x\nper_device_train_batch_size: 2\noptim: sgd\n")
    assert run(["predict", "--job", str(file)]) == 2
    assert "TrainingArguments: read such a file with --arguments" in capsys.readouterr().err


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError):
            read_arguments(path)


def test_every_argument_of_the_installed_class_is_known() -> None:
    """A new argument of a new version fails here until it is taken, ignored with a reason, or refused."""
    table = dialect("trainer")
    decided = {
        key for technique in roster.techniques() for one in technique.counterparts for key in one.arguments
    }
    decided |= {"per_device_train_batch_size", *(key.split(".")[0] for key in decided)}
    lost = [
        name
        for name in defaults()
        if name not in decided | {*table.becomes, *table.differs}
        and not table.refusal(name)
        and not table.reason_to_ignore(name)
    ]
    assert not lost


def test_the_plain_defaults_ask_for_exactly_one_technique_a_slot() -> None:
    arguments = {**defaults(), **dialect("trainer").defaults, "optim": "adamw_torch"}
    assert [found.technique for found in read_slots(arguments)] == [
        roster.plain(found.slot) for found in read_slots(arguments)
    ]


OWNERS = {
    "layers": "fp8", "lora": "lora", "parallel": "fsdp", "sharding": "zero2", "loss_type": "chunked_loss",
    "liger_kernel_config": "liger",
}  # fmt: skip
"""Technique of a deletable feature, by the prefix of the technique's arguments."""


@pytest.mark.parametrize("name", DIALECTS)
def test_tables_translate_into_words_that_exist(name: str) -> None:
    """Each translation is a field of TrainingArguments or the job, or a technique's argument, or is refused
    by name.
    """
    from dataclasses import fields

    from snugfit.job.job import Job

    of_job = [*(field.name for field in fields(Job)), *setting_keys()]
    known = {*defaults(), *(f"job.{key}" for key in of_job), *dialect("trainer").defaults}
    known |= {
        key for technique in roster.techniques() for one in technique.counterparts for key in one.arguments
    }
    known |= {
        "lora.peft_type",
        BATCH_OF_GPU,
        PROMPT,
        TRAINED,
        "job.vocab_size",
        *RAW,
        *(key for refusal in dialect("trainer").refused for key in refusal["keys"]),
        *(key for refusal in dialect(name).refused for key in refusal["keys"]),
    }
    for meaning in dialect(name).becomes.values():
        words = [meaning] if isinstance(meaning, str) else [key for one in meaning.values() for key in
                 ([one] if isinstance(one, str) else one)]  # fmt: skip
        unknown = set(words) - known
        if "dpo" not in heads():  # settings of tasks whose feature is deleted
            unknown = {word for word in unknown if not word.startswith("job.")}
        owners = {"compiled" if "compile" in word else OWNERS[word.partition(".")[0]] for word in unknown}
        assert all(map(missing_techniques, owners))
