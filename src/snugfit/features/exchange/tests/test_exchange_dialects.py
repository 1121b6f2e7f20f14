"""Users' files: TRL's, LLaMA-Factory's and unsloth's configurations, and command lines of scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from in_roster import needs_techniques
from snugfit.cli.main import run
from snugfit.cli.request import Request
from snugfit.errors import UsageError
from snugfit.features.exchange.account import Reading
from snugfit.features.exchange.command_line import split_flags
from snugfit.features.exchange.dialect import dialect
from snugfit.features.exchange.read import read_arguments

SFT = """
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=dataset,
    args=SFTConfig(output_dir="out", per_device_train_batch_size=2, max_length=2048, packing=True),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
"""

LLAMA_FACTORY = """
model_name_or_path: meta-llama/Llama-3.2-1B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 1024
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
some_new_argument: 3
"""

UNSLOTH = """
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B-Instruct", max_seq_length=max_seq_length, load_in_4bit={four},
)
model = FastLanguageModel.get_peft_model(
    model, r=32, target_modules=["q_proj", "v_proj"], bias="none",
    use_gradient_checkpointing=True, random_state=3407, use_rslora=False,
)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset,
    args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit"),
)
"""

SHELL = """#!/bin/bash
#SBATCH --gres=gpu:1
export MODEL=gpt2
BATCH=4
mkdir -p out
{launcher} examples/run_clm.py \\
    --model_name_or_path $MODEL --dataset_name wikitext \\
    --per_device_train_batch_size ${{BATCH}} --gradient_accumulation_steps=2 \\
    --block_size 256 --do_train --bf16 --my_own_flag 3 --learning_rate 1e-4
"""


def read(folder: Path, name: str, text: str) -> Reading:
    file = folder / name
    file.write_text(text)
    return read_arguments(file)


def keys(lines: Any) -> set[str]:
    return {line.key for line in lines}


def test_adapters_have_the_defaults_of_trl_s_model_config(tmp_path: Path) -> None:
    file = "model_name_or_path: gpt2\ndataset_text_field: text\nuse_peft: true\n"
    assert read(tmp_path, "a.yaml", file).settings["recipe"].startswith("lora(r=16, dropout=0.05, alpha=32) ")
    some = read(tmp_path, "b.yaml", f"{file}lora_r: 4\nlora_alpha: 2.5\n").settings["recipe"]
    assert some.startswith("lora(r=4, dropout=0.05, alpha=2.5) ")
    assert "lora" not in read(tmp_path, "c.yaml", file.replace("true", "false")).settings["recipe"]


def test_an_sft_script_has_the_defaults_of_sft(tmp_path: Path) -> None:
    reading = read(tmp_path, "sft.py", SFT)
    assert reading.settings == {
        "model": "Qwen/Qwen3-0.6B", "task": "causal-lm", "sequence_length": 2048, "batch_size": 2,
        "learning_rate": 2e-5, "loop": "trainer", "dtype": "float32",
        "recipe": "lora(r=16, targets=all-linear) + bf16 + chunked_loss + every_layer + adamw_fused",
    }  # fmt: skip
    assert not reading.refused
    assert "packing" in keys(reading.differs)
    plain = read(tmp_path, "off.py", "SFTConfig(fp16=True, gradient_checkpointing=False)")
    assert plain.settings["recipe"] == "fp16 + chunked_loss + adamw_fused"


def test_a_llama_factory_file(tmp_path: Path) -> None:
    reading = read(tmp_path, "llama3_lora_sft.yaml", LLAMA_FACTORY)
    assert reading.settings == {
        "model": "meta-llama/Llama-3.2-1B", "task": "causal-lm", "sequence_length": 1024, "batch_size": 8,
        "learning_rate": 1e-4, "loop": "trainer",
        "recipe": "lora(r=16, targets=q_proj|v_proj, alpha=32) + bf16 + every_layer + micro_batches(8) + "
        "adamw_fused",
    }  # fmt: skip
    assert not reading.refused
    assert {"template", "dataset"} <= keys(reading.ignored)
    assert keys(reading.unread) == {"some_new_argument"}
    whole = read(
        tmp_path, "full.yaml", LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    )
    assert "lora" not in whole.settings["recipe"]
    eight = read(tmp_path, "e.yaml", LLAMA_FACTORY + "quantization_bit: 8\n")
    assert not eight.refused
    assert eight.settings["recipe"].startswith("qlora(r=16, targets=q_proj|v_proj, alpha=32, bits=8) + ")


def dtype_of(folder: Path, name: str, text: str) -> str | None:
    dtype: str | None = read(folder, name, text).settings.get("dtype")
    return dtype


def test_trl_loads_a_model_that_it_is_named_in_float32(tmp_path: Path) -> None:
    """The source is TRL's `create_model_from_path`. Cases have no dtype in `model_init_kwargs`, or a command
    line."""
    chosen = SFT.replace("packing=True", "model_init_kwargs={{'dtype': {}}}")
    assert dtype_of(tmp_path, "named.py", SFT) == "float32"
    assert dtype_of(tmp_path, "said.py", chosen.format("torch.bfloat16")) == "bfloat16"
    assert dtype_of(tmp_path, "auto.py", chosen.format("'auto'")) is None
    assert dtype_of(tmp_path, "made.py", SFT.replace('"Qwen/Qwen3-0.6B"', "model")) is None
    shell = "trl sft --model_name_or_path Qwen/Qwen3-0.6B --output_dir out"
    assert dtype_of(tmp_path, "run.sh", shell) == "float32"
    assert dtype_of(tmp_path, "half.sh", f"{shell} --dtype bfloat16") == "bfloat16"
    unsure = read(tmp_path, "unsure.py", SFT.replace("packing=True", "model_init_kwargs=make()"))
    assert "dtype" in {line.instead for line in unsure.refused}


def test_llama_factory_casts_what_trains(tmp_path: Path) -> None:
    """Its `init_adapter` casts trained weights to 32 bits unless pure_bf16; frozen ones stay as loaded."""
    full = LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    assert dtype_of(tmp_path, "lora.yaml", LLAMA_FACTORY) is None
    assert dtype_of(tmp_path, "full.yaml", full) == "float32"
    assert dtype_of(tmp_path, "pure.yaml", f"{full}pure_bf16: true\n") is None
    pure = read(tmp_path, "pure.yaml", full.replace("bf16: true", "pure_bf16: true"))
    assert "bf16" not in pure.settings["recipe"]


def test_llama_factory_checkpoints_by_re_entry_unless_told(tmp_path: Path) -> None:
    reading = read(tmp_path, "default.yaml", LLAMA_FACTORY)
    assert "use_reentrant_gc" in keys(reading.differs)
    other = read(tmp_path, "said.yaml", f"{LLAMA_FACTORY}use_reentrant_gc: false\n")
    assert "every_layer" in other.settings["recipe"]
    assert "use_reentrant_gc" not in keys(other.differs)
    none = read(tmp_path, "none.yaml", f"{LLAMA_FACTORY}disable_gradient_checkpointing: true\n")
    assert "every_layer" not in none.settings["recipe"]
    assert "use_reentrant_gc" not in keys(none.differs)
    assert "neat_packing" in keys(read(tmp_path, "n.yaml", f"{LLAMA_FACTORY}neat_packing: true\n").differs)


def test_no_switch_of_llama_factory_is_overlooked(tmp_path: Path) -> None:
    """Each `use_...` of its source, and each switch that enlarges the embeddings, is in the table, mostly
    refused."""
    needs_techniques("lora")
    tools = json.loads((Path(__file__).parent / "data" / "finetuning_tools.json").read_text())
    switches = [key for key in tools["llamafactory"]["keys"] if key.startswith("use_")]
    table = dialect("llamafactory")
    assert switches
    elsewhere = {"use_distributed_optimizer", "use_packed_sequences"}  # of Megatron, refused as a whole
    for key in sorted({*switches, "resize_vocab", "add_tokens"} - elsewhere - {"use_audio_in_video"}):
        assert key in table.becomes or table.refusal(key) or table.reason_to_ignore(key), key
    for line in ("add_tokens: <a>,<b>", "use_kt: true", "use_eaft_loss: true"):
        refused = read(tmp_path, "switched.yaml", f"{LLAMA_FACTORY}{line}\n").refused
        assert keys(refused) == {line.partition(":")[0]}


def test_an_unsloth_script(tmp_path: Path) -> None:
    reading = read(tmp_path, "tune.py", UNSLOTH.format(four=False))
    assert reading.settings["model"] == "unsloth/Llama-3.2-1B-Instruct"
    assert reading.settings["sequence_length"] == 2048
    assert reading.settings["batch_size"] == 8
    assert reading.settings["recipe"] == (
        "lora(r=32, targets=q_proj|v_proj, alpha=16) + bf16 + chunked_loss + every_layer + micro_batches(4) "
        "+ adamw_8bit"
    )
    assert not reading.refused
    assert "unsloth.load_in_4bit" in keys(reading.differs)


@pytest.mark.parametrize("launcher", ["python", "CUDA_VISIBLE_DEVICES=0 accelerate launch", "torchrun"])
def test_the_command_line_of_a_script(launcher: str, tmp_path: Path) -> None:
    reading = read(tmp_path, "run.sh", SHELL.format(launcher=launcher))
    assert reading.settings == {
        "model": "gpt2", "task": "causal-lm", "sequence_length": 256, "batch_size": 8, "learning_rate": 1e-4,
        "recipe": "bf16 + micro_batches(2) + adamw_fused", "loop": "trainer",
    }  # fmt: skip
    assert not reading.refused
    assert "dataset_name" in keys(reading.ignored)
    assert keys(reading.unread) == {"my_own_flag"}


def test_a_variable_of_the_shell_may_have_a_default(tmp_path: Path) -> None:
    text = SHELL.format(launcher="python").replace("gpt2", "${1:-gpt2}")
    assert "${1:-gpt2}" in text
    assert read(tmp_path, "run.sh", text).settings["model"] == "gpt2"


def test_launchers_say_how_many_gpus_there_are(tmp_path: Path) -> None:
    several = read(tmp_path, "run.sh", SHELL.format(launcher="torchrun --nproc_per_node 8 --nnodes=2"))
    assert not several.refused
    assert (several.settings["gpus"], several.settings["batch_size"]) == (16, 8 * 16)
    assert several.settings["recipe"] == "bf16 + micro_batches(2) + adamw_fused + ddp"
    launcher = "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE"
    of_slurm = SHELL.format(launcher=launcher).replace("--gres=gpu:1", "--gres=gpu:a100:8\n#SBATCH --nodes=2")
    assert read(tmp_path, "job.slurm", of_slurm).settings["gpus"] == 16
    half = SHELL.format(launcher="accelerate launch --mixed_precision fp16").replace("--bf16", "")
    assert "fp16" in read(tmp_path, "half.sh", half).settings["recipe"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.sh", "echo hello", "has none"),
        ("a.sh", "python a.py --bf16\npython b.py --bf16", "has 2; keep one"),
        ("a.sh", "python 'a.py --bf16", "not a shell command"),
        ("a.py", "BCOConfig(output_dir='x')", "trains on preferences"),
        ("a.py", "parser = HfArgumentParser(ModelArguments)", "from the command line"),
    ],
)
def test_what_cannot_be_read_is_said(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path, name, text)


def test_flags_are_ours_or_the_trainer_s() -> None:
    own = {"--batch-size", "--recipe", "--gpu", "--max-steps"}
    line = "bert --batch-size=4 --bf16 --optim adafactor --max-steps 9 --gpu h200 --bf61 --tf32 True"
    assert split_flags(line.split(), own) == (
        ["bert", "--batch-size=4", "--max-steps", "9", "--gpu", "h200", "--bf61"],
        ["bf16=true", "optim=adafactor", "tf32=True"],
    )
    assert split_flags(["--bf16", "bert"], own) == (["bert"], ["bf16=true"])


def test_arguments_on_the_command_line_go_before_the_file_s(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SHELL.format(launcher="python"))
    reading = read_arguments(file, {"per_device_train_batch_size": 1, "optim": "adafactor", "max_steps": 5},
                             options=("max_steps",))  # fmt: skip
    assert reading.settings["batch_size"] == 2
    assert "adafactor" in reading.settings["recipe"]
    assert reading.settings["max_steps"] == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--batch_size 32 --per_device_train_batch_size 4", "batch_size 4 and batch size 32"),
        ("--recipe every_layer --bf16", "--bf16 True and recipe every_layer"),
        ("--model_name_or_path gpt2", "--model_name_or_path gpt2 and model bert-base-uncased"),
        ("--bf61", "No such option: --bf61"),
    ],
)
def test_contradictions_are_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "bert-base-uncased", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_flags_of_the_run_are_no_configuration() -> None:
    flags = {"model": "bert-base-uncased", "task": "masked-lm", "dataset": None}
    request = Request.read({**flags, "trainer_arguments": ["warmup_steps=3"]})
    assert (request.configuration, request.training["warmup_steps"]) == (None, 3)
    request = Request.read({**flags, "trainer_arguments": ["warmup_steps=3", "bf16=true", "tf32=true"]})
    assert request.configuration is not None
    assert str(request.recipe) == "bf16 + tf32 + adamw_fused"
    assert request.training["warmup_steps"] == 3


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("predict Qwen3-0", "Qwen3-0.6B"),
        ("plan x --gpu h2", "h200"),
        ("predict x --task ca", "causal-lm"),
        ("predict x --recipe every_l", "every_layer"),
    ],
)
def test_the_shell_completes(
    words: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SNUGFIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"snugfit {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    run([])
    assert completed in capsys.readouterr().out.split()


def test_what_completes_a_gpu_is_understood() -> None:
    from snugfit.cli.arguments import _complete_gpu
    from snugfit.job.gpu import find_gpu

    assert all(find_gpu(name) for name in _complete_gpu(""))
