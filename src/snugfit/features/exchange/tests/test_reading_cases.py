"""Scripts, notebooks, commands and configurations as people write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snugfit.errors import UsageError
from snugfit.features.exchange.account import UnsupportedJobError
from snugfit.features.exchange.check import check
from snugfit.features.exchange.python.read_script import code_of_notebook, read_script
from snugfit.features.exchange.read import read_arguments
from snugfit.job.inputs import added_tasks

CASES = Path(__file__).parent / "data" / "reading"

TRAINER = {"loop": "trainer"}

READ: list[tuple[str, dict[str, Any]]] = [
    ("accelerate-loop-with-adapters/accel_lora.py",
     {"model": "t5-base", "task": "seq2seq-lm", "recipe": "lora(dropout=0.1, alpha=32) + bf16",
      "batch_size": 8, "loop": "accelerate"}),
    ("axolotl-harmless-keys/ax_null.yaml",
     {"model": "meta-llama/Llama-3.2-1B", "batch_size": 8,
      "recipe": "lora(r=16, targets=all-linear, alpha=32) + bf16 + every_layer + micro_batches(4) + "
      "adamw_fused + workers(n=1)"}),
    ("axolotl-liger-plugin/ax_liger.yaml",
     {"recipe": "lora(r=16, targets=all-linear, alpha=32) + flash + bf16 + liger(rope=true, "
      "rms_norm=true, swiglu=true, geglu=true, layer_norm=false, fused_linear_cross_entropy=true) + "
      "every_layer + micro_batches(4) + adamw_fused + workers(n=1)"}),
    ("llamafactory-by-script/lf2939.sh",
     {"model": "Qwen/Qwen2.5-72B", "sequence_length": 512, "gpus": 2, "batch_size": 4,
      "recipe": "qlora(r=128, targets=all-linear, alpha=256) + fp16 + every_layer + micro_batches(2) + "
      "adamw_fused + fsdp(offload=cpu)"}),
    ("notebook-file/nb.ipynb",
     {"model": "bert-base-uncased", "labels": 2, "batch_size": 16, "recipe": "fp16 + adamw_fused"}),
    ("own-export-read-back/train.py",
     {"model": "openai-community/gpt2", "batch_size": 8, "loop": "accelerate",
      "recipe": "bf16 + every_layer + micro_batches(2)"}),
    ("own-export-read-back/torch_train.py",
     {"batch_size": 8, "loop": "plain", "recipe": "bf16 + every_layer + micro_batches(2)"}),
    ("refusals-of-other-loops/plainloop.py",
     {"model": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", "batch_size": 4, "loop": "plain",
      "recipe": "every_layer"}),
    ("script-accelerate-loop/accel_sgd.py",
     {"model": "bert-large-uncased", "labels": 2, "batch_size": 64, "loop": "accelerate",
      "recipe": "fp16 + micro_batches(2) + sgd(momentum=0.0)"}),
    ("script-checkpointing-by-method/gc_enable.py", {"recipe": "bf16 + every_layer + adamw_fused"}),
    ("script-concrete-classes/concrete.py", {"task": "sequence-classification", "labels": 3}),
    ("script-concrete-classes/concrete_t5.py", {"task": "seq2seq-lm", "model": "t5-base"}),
    ("script-concrete-classes/liger_auto.py", {"recipe": "bf16 + liger + adamw_fused"}),
    ("script-environment-and-backends/alloc_env.py", {"recipe": "tf32 + adamw_fused + expandable"}),
    ("script-environment-and-backends/liger_call.py", {"recipe": "bf16 + liger + adamw_fused"}),
    ("script-environment-and-backends/resize.py", {"vocab_size": "300000"}),
    ("script-environment-and-backends/maxlen.py", {"sequence_length": 128}),
    ("script-frozen-parameters/freeze.py", {"recipe": "frozen(parts=bert) + adamw_fused"}),
    ("script-gpt-oss/gptoss.py",
     {"recipe": "lora(r=16, targets=all-linear, parameters='3.mlp.experts.gate_up_proj'|"
      "'3.mlp.experts.down_proj') + eager + bf16 + chunked_loss + every_layer + micro_batches(8) + "
      "adamw_fused"}),
    ("script-optimizer-given-to-trainer/opt8.py", {"recipe": "adamw_8bit"}),
    ("script-sft-of-2023/sft_old.py",
     {"sequence_length": 4096, "recipe": "qlora(r=64, dropout=0.1, alpha=16, double=false) + paged_adamw"}),
    ("script-sft-of-2023/sft_old_auto.py",
     {"sequence_length": 4096, "recipe": "qlora(r=64, dropout=0.1, alpha=16, double=false) + paged_adamw"}),
    ("script-small-sums/argparse_bs.py", {"batch_size": 16}),
    ("script-small-sums/computed_bs.py", {"batch_size": 32}),
    ("script-small-sums/twice_name.py", {"batch_size": 16, "model": "bert-base-uncased"}),
    ("script-small-sums/two_args.py", {"batch_size": 16}),
    ("script-unsloth-notebook/bf16_supported.py", {"recipe": "bf16 + adamw_fused", "dtype": "bfloat16"}),
    ("script-unsloth-notebook/unsloth_nb.py",
     {"model": "unsloth/llama-3-8b", "sequence_length": 2048,
      "recipe": "qlora(targets=q_proj|v_proj) + bf16 + every_layer + host(checkpoints) + micro_batches(4) + "
      "adamw_8bit"}),
    ("slurm-multi-line-quotes/quotes.slurm",
     {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "batch_size": 16, "recipe": "bf16 + adamw_fused + ddp"}),
    ("unknown-arguments-that-speak-of-memory/q4.sh",
     {"recipe": "qlora(targets=all-linear) + flash + bf16 + every_layer + micro_batches(8) + "
      "adamw_fused"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), READ, ids=[name for name, _ in READ])
def test_a_file_is_read_with_every_field_that_changes_memory(name: str, expected: dict[str, Any]) -> None:
    reading = read_arguments(CASES / name, bfloat16=True)
    assert {key: reading.settings.get(key) for key in expected} == expected
    assert not reading.refused
    assert not reading.unread


def test_a_class_of_an_added_task_has_its_task() -> None:
    if not any(one.name == "question-answering" for one in added_tasks()):
        pytest.skip("the feature that reads questions is not installed")
    reading = read_arguments(CASES / "script-concrete-classes" / "qa.py")
    assert reading.settings["task"] == "question-answering"


def test_a_concrete_class_of_sounds_has_its_task() -> None:
    if not any(one.name == "speech-to-text" for one in added_tasks()):
        pytest.skip("the feature that reads sounds is not installed")
    reading = read_arguments(CASES / "script-concrete-classes" / "whisper.py")
    assert (reading.settings["task"], reading.settings["recipe"]) == (
        "speech-to-text",
        "fp16 + every_layer + adamw_fused",
    )


REFUSED = [
    ("axolotl-several-gpus/ax_ds.yaml", "another --arguments"),
    ("axolotl-several-gpus/ax_fsdp.yaml", "--gpus"),
    ("unknown-arguments-that-speak-of-memory/lf6285.yaml", "new_special_tokens"),
]


@pytest.mark.parametrize(("name", "why"), REFUSED, ids=[name for name, _ in REFUSED])
def test_parts_that_are_not_predicted_are_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_arguments(CASES / name, bfloat16=True).refuse()


def test_the_number_of_gpus_completes_a_file() -> None:
    """The file also asks for flash."""
    reading = read_arguments(CASES / "axolotl-several-gpus" / "ax_fsdp.yaml", gpus=8)
    assert not reading.refused
    assert reading.settings["recipe"].endswith("+ fsdp + workers(n=1)")


NOT_READ = [
    ("refusals-of-other-loops/lightning.py", "Lightning.*bert-base-uncased.*snugfit predict MODEL"),
    ("refusals-of-other-loops/st.py", "SentenceTransformerTrainer runs passes of its own"),
    ("script-concrete-classes/depth.py", "AutoModelForDepthEstimation has no task here"),
    ("script-other-adapters/ia3.py", "IA3Config is not predicted"),
    ("script-parsers-of-trl/trlparser.py", "from the command line"),
    ("script-small-sums/starstar.py", "the arguments come from train.yaml"),
    ("torchtune-yaml/tt_min.yaml", "a configuration of torchtune"),
]


@pytest.mark.parametrize(("name", "why"), NOT_READ, ids=[name for name, _ in NOT_READ])
def test_another_step_is_refused_in_one_sentence(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        read_arguments(CASES / name, bfloat16=True)
    assert len(str(refused.value).splitlines()) == 1


def test_adapters_on_4_bit_weights_have_no_false_findings() -> None:
    assert check(CASES / "check-false-alarms" / "load4.py").findings == ()


def script(*lines: str) -> str:
    return "\n".join(
        (
            "import torch",
            "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments",
            "model = AutoModelForCausalLM.from_pretrained('gpt2')",
            *lines,
            "args = TrainingArguments('out')",
            "Trainer(model, args).train()",
        )
    )


@pytest.mark.parametrize(
    "line",
    [
        "model.lm_head = torch.nn.Linear(768, 9)",
        "model.transformer.h[0] = torch.nn.Identity()",
        "model.enable_some_offload()",
        "patch_attention(model)",
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.set_default_dtype(torch.bfloat16)",
        "import os; os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'",
    ],
)
def test_a_statement_that_may_change_the_step_is_listed(line: str) -> None:
    unread = read_script(script(line), "train.py").unread
    assert [(number, text in line) for number, text in unread] == [(4, True)]


@pytest.mark.parametrize(
    "line",
    [
        "model.config.use_cache = False",
        "model.print_trainable_parameters()",
        "print(sum(p.numel() for p in model.parameters()))",
        "import os; os.environ['WANDB_PROJECT'] = 'x'",
        "model.config.pad_token_id = 0",
    ],
)
def test_a_harmless_statement_is_not_listed(line: str) -> None:
    assert read_script(script(line), "train.py").unread == []


def test_the_last_run_of_a_notebook_is_read_and_the_others_are_listed() -> None:
    text = (
        script()
        + """
args = TrainingArguments("b", per_device_train_batch_size=2)
trainer = Trainer(model, args)
trainer.train()
"""
    )
    read = read_script(text, "train.py")
    assert read.arguments["per_device_train_batch_size"] == 2
    assert [line for line, _ in read.unread] == [5]


def test_a_check_of_options_does_not_end_the_reading() -> None:
    text = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--name')\n" + script(
        "options = parser.parse_args()", "if options.name is None: raise ValueError('give a name')"
    )
    assert read_script(text, "train.py").arguments["job.model"] == "gpt2"


def test_labels_that_the_script_counts_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = script().replace("from_pretrained('gpt2')", "from_pretrained('gpt2', num_labels=len(names))")
    file.write_text(text)
    reading = read_arguments(file)
    assert [line.key for line in reading.unread] == ["model.num_labels"]
    assert not reading.refused


def test_a_recipe_of_a_preference_trainer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model_name_or_path: gpt2\nbeta: 0.1\nper_device_train_batch_size: 4\n")
    with pytest.raises(UsageError, match="beta"):
        read_arguments(file).refuse()


def test_an_older_trainer_on_preferences_with_a_second_model() -> None:
    reading = read_arguments(CASES / "script-other-trainers" / "dpo_old.py")
    assert not reading.refused
    assert not reading.unread
    assert reading.settings["task"] == "dpo"
    assert reading.settings["beta"] == 0.1


ON_PREFERENCES = {
    "DPOConfig(loss_type=['ipo'], beta=0.05)": {"task": "dpo", "loss_type": "ipo", "beta": 0.05},
    "DPOConfig(precompute_ref_log_probs=True)": {"task": "dpo", "reference": "precomputed"},
    "RewardConfig(max_length=256)": {"task": "reward", "sequence_length": 256},
    "KTOConfig(desirable_weight=1.2)": {"task": "kto", "sequence_length": 1024},
    "ORPOConfig(max_completion_length=99)": {"task": "orpo", "completion_length": 99},
    "CPOConfig(loss_type='simpo', simpo_gamma=0.3)": {"task": "simpo", "gamma": 0.3},
}


@pytest.mark.parametrize("config", ON_PREFERENCES)
def test_a_trainer_on_preferences_is_its_task(config: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    name = config.partition("Config")[0]
    file.write_text(
        f"from trl import {name}Config, {name}Trainer\n{name}Trainer(model='gpt2', args={config}).train()"
    )
    reading = read_arguments(file, bfloat16=True)
    assert not reading.refused
    assert ON_PREFERENCES[config].items() <= reading.settings.items()
    assert "every_layer" in reading.settings["recipe"]


def test_trainers_on_generated_answers_are_their_tasks() -> None:
    reading = read_arguments(CASES / "refusals-of-other-loops" / "grpo.py", bfloat16=True)
    assert not reading.refused
    expected = {"task": "grpo", "sequence_length": 3072, "completion_length": 1024, "batch_size": 4}
    assert expected.items() <= reading.settings.items()
    reading = read_arguments(CASES / "refusals-of-other-loops" / "cpo.py", bfloat16=True)
    assert not reading.refused
    assert {"task": "rloo", "completion_length": 512}.items() <= reading.settings.items()


def test_vllm_in_the_same_process_takes_its_share(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    given = "use_vllm=True, vllm_gpu_memory_utilization=0.4, vllm_max_model_length=4096, beta=0.04"
    imports = "from trl import GRPOConfig, GRPOTrainer\n"
    file.write_text(f"{imports}GRPOTrainer('gpt2', args=GRPOConfig('out', {given})).train()")
    reading = read_arguments(file, bfloat16=True)
    assert not reading.refused
    expected = {"generation": "vllm", "vllm_share": 0.4, "old_log_probs": True, "beta": 0.04}
    assert expected.items() <= reading.settings.items()


def test_other_losses_of_cpo_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from trl import CPOConfig, CPOTrainer\nCPOTrainer('gpt2', args=CPOConfig('out')).train()"
    )
    with pytest.raises(UsageError, match="of its losses only simpo is predicted"):
        read_arguments(file).refuse()


def test_statements_after_the_training_do_not_count() -> None:
    text = script() + "\nmodel = model.merge_and_unload()\nmodel.lm_head = None\n"
    assert read_script(text, "train.py").unread == []


def test_a_subclass_of_the_trainer_with_a_step_of_its_own_is_listed() -> None:
    text = script("class Mine(Trainer):", "    def compute_loss(self, model, inputs): return 0")
    text = text.replace("Trainer(model, args).train()", "Mine(model, args).train()")
    assert read_script(text, "train.py").unread == [(5, "Mine.compute_loss")]


def test_a_branch_on_an_unknown_value_leaves_its_names_unknown() -> None:
    text = "import sys\nn = 4\nif len(sys.argv) > 1:\n    n = 8\n" + script().replace(
        "TrainingArguments('out')", "TrainingArguments('out', per_device_train_batch_size=n)"
    )
    assert str(read_script(text, "train.py").arguments["per_device_train_batch_size"]) == "n"


def test_arguments_come_from_dataclasses_functions_and_the_environment() -> None:
    text = """
import os
from dataclasses import dataclass
from transformers import *

@dataclass
class Config:
    batch: int = 4
    name: str = "gpt2"

def make(config, pieces=2):
    options = dict(per_device_train_batch_size=config.batch * pieces)
    return TrainingArguments(output_dir="out", **options)

def main():
    config = Config(batch=int(os.environ.get("BATCH", "3")))
    model = AutoModelForCausalLM.from_pretrained(config.name)
    Trainer(model=model, args=make(config)).train()

if __name__ == "__main__":
    main()
"""
    read = read_script(text, "train.py")
    assert read.arguments["per_device_train_batch_size"] == 6
    assert read.arguments["job.model"] == "gpt2"
    assert read.defaults == {"$BATCH": "3"}


def test_a_script_that_calls_itself_without_end_ends() -> None:
    text = "def f(n):\n    f(n)\n    f(n)\nf(1)\n" + script()
    assert read_script(text, "train.py").arguments["job.model"] == "gpt2"


def test_a_model_that_is_moved_without_end_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match="too deeply"):
        read_script(script(*["model = model.cuda()"] * 3000), "train.py")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": 3}', "not json", '{"cells": [3]}'])
def test_a_broken_notebook_is_one_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"n\.ipynb: this is not a notebook"):
        code_of_notebook(text, "n.ipynb")


def test_cells_that_are_not_python_are_listed() -> None:
    cells = ["!pip install \\\n  trl", "x = f(1\n2)", "%env A=1\ny = 2", "%%bash\nls"]
    document = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    code, broken = code_of_notebook(json.dumps(document), "n.ipynb")
    assert code.splitlines() == ["pass", "pass", "y = 2"]
    assert broken == [(2, "a cell that is not valid Python (x = f(1 ...)")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "from torch import nn\nclass Net(nn.Module): pass\nNet().train()",
            "Net is a module of the script's own",
        ),
        ("from tokenizers.trainers import BpeTrainer\nBpeTrainer()", "trains a tokenizer"),
    ],
)
def test_another_thing_that_trains_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(UnsupportedJobError, match=why):
        read_script(text, "t.py")


def test_the_launcher_s_file_is_given_first_or_last() -> None:
    folder = CASES / "one-run-in-two-files"
    run = CASES / "axolotl-harmless-keys" / "ax_null.yaml"
    for paths in ([folder / "fsdp_config.yaml", run], [run, folder / "fsdp_config.yaml"]):
        settings = read_arguments(paths).settings
        assert (settings["gpus"], settings["model"]) == (2, "meta-llama/Llama-3.2-1B")
        assert settings["recipe"].endswith("fsdp(offload=cpu) + workers(n=1)")


def test_two_files_of_runs_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="both describe a run"):
        read_arguments([CASES / READ[0][0], CASES / READ[1][0]])
