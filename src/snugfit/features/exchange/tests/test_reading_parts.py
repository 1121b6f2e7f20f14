"""Trained parts in files: frozen parts, targets of adapters, resized embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from in_roster import needs_techniques
from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.exchange.account import Reading, UnsupportedJobError
from snugfit.features.exchange.command_line import read_shell
from snugfit.features.exchange.python.read_script import code_of_notebook, read_script
from snugfit.features.exchange.python.values import Unknown
from snugfit.features.exchange.read import read_arguments
from test_docs import answered

if TYPE_CHECKING:
    from snugfit.cli.request import Request

__all__ = ["answered"]

AXOLOTL = {"base_model": "org/model", "sequence_len": 1024, "micro_batch_size": 2, "optimizer": "adamw_torch"}
ADAPTERS = {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"]}
FACTORY = {
    "model_name_or_path": "org/model", "stage": "sft", "finetuning_type": "lora", "cutoff_len": 512,
    "per_device_train_batch_size": 1,
}  # fmt: skip


def read(folder: Path, values: dict[str, Any]) -> Reading:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_arguments(file, bfloat16=True)


def recipe(reading: Reading) -> str:
    assert not reading.refused, reading.refused
    assert not reading.unread, reading.unread
    return str(reading.settings["recipe"])


def script(*lines: str) -> str:
    return "\n".join(
        (
            "from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments",
            "net = AutoModelForSequenceClassification.from_pretrained('bert-base-uncased')",
            *lines,
            "Trainer(net, TrainingArguments('out')).train()",
        )
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["net.bert.embeddings.requires_grad_(False)"], {"parts": ("bert.embeddings",)}),
        (
            ["for w in net.base_model.parameters():", "    w.requires_grad = False"],
            {"parts": ("base_model",)},
        ),
        (
            ["for one in net.bert.encoder.layer[1:3]:", "    for w in one.parameters():",
             "        w.requires_grad = False"],
            {"parts": (".*bert[.]encoder[.]layer[.](?:1|2)[.]",)},
        ),
        (
            ["for w in net.bert.encoder.layer[2:].parameters():", "    w.requires_grad = False"],
            {"parts": (r".*bert[.]encoder[.]layer[.](?!(?:0|1)[.])\d+[.]",)},
        ),
        (
            ["for name, w in net.named_parameters():", "    if 'head' not in name:",
             "        w.requires_grad = False"],
            {"parts": ("(?!.*head)",)},
        ),
        (
            ["for name, w in net.named_parameters():", "    w.requires_grad = name.startswith('pooler')"],
            {"parts": ("(?!pooler)",)},
        ),
        (["net.requires_grad_(False)", "net.classifier.requires_grad_(True)"], {"only": ("classifier",)}),
        (["net.freeze_feature_encoder()"], {"parts": ("feature_extractor",)}),
        (
            ["for part in [net.bert.pooler, *net.bert.encoder.layer[:1]]:", "    part.requires_grad_(False)"],
            {"parts": ("bert.pooler", ".*bert[.]encoder[.]layer[.](?:0)[.]")},
        ),
        (
            ["last = 3", "for one in net.bert.encoder.layer[: 4 - last]:", "    one.requires_grad_(False)"],
            {"parts": (".*bert[.]encoder[.]layer[.](?:0)[.]",)},
        ),
        (["list(map(lambda w: w.requires_grad_(False), net.bert.parameters()))"], {"parts": ("bert",)}),
        (["setattr(getattr(net, 'bert').pooler.dense.weight, 'requires_grad', False)"],
         {"parts": ("bert.pooler.dense.weight",)}),
        (["for i, w in enumerate(list(net.bert.parameters())):", "    w.requires_grad = False"],
         {"parts": ("bert",)}),
        (["for one in net.bert.encoder.layer[:-2]: one.requires_grad_(False)"],
         {"only": ("(?!.*bert[.]encoder[.]layer[.])",), "last": 2}),
        (["net.requires_grad_(False)", "net.bert.encoder.layer[-1].requires_grad_(True)",
          "net.classifier.requires_grad_(True)"], {"only": ("classifier",), "last": 1}),
        (["for name, w in net.named_parameters():", "    if name.startswith(('bert.emb', 'bert.enc')):",
          "        w.requires_grad = False"], {"parts": (r"(?:bert\.emb)", r"(?:bert\.enc)")}),
        (["kept = ['classifier', 'pooler']", "for name, w in net.named_parameters():",
          "    if any(one in name for one in kept): continue", "    w.requires_grad = False"],
         {"parts": ("(?=(?!.*classifier))(?=(?!.*pooler))",)}),
        (["for n, w in net.named_parameters():", "    if any(x in n for x in ('a', 'b')) and 'c' in n:",
          "        w.requires_grad = False"], {"parts": ("(?=(?:.*a)|(?:.*b))(?=(?:.*c))",)}),
        (["for n, w in net.named_parameters():", "    if 'bert' in n:", "        if 'norm' not in n:",
          "            w.requires_grad = False"], {"parts": ("(?=(?:.*bert))(?=(?!.*norm))",)}),
        (["class Mine(Trainer):", "    def create_optimizer(self):",
          "        for w in self.model.bert.parameters(): w.requires_grad = False",
          "Mine(net)"], {"parts": ("bert",)}),
    ],
)  # fmt: skip
def test_a_script_freezes_parts(lines: list[str], expected: dict[str, Any]) -> None:
    done = read_script(script(*lines), "train.py")
    assert not done.refused
    given = {key: value for key, value in done.arguments.items() if key.startswith("frozen.")}
    assert given == {f"frozen.{key}": value for key, value in expected.items()}


@pytest.mark.parametrize(
    "lines",
    [
        ["for name, w in net.named_parameters():", "    if 'head' in name: w.data.zero_(); continue",
         "    w.requires_grad = False"],
        ["for i in range(8):", "    net.bert.encoder.layer[i].requires_grad_(False)"],
        ["for name, w in net.named_parameters():", "    if w.dim() > 1:", "        w.requires_grad = False"],
        ["for w in list(net.parameters())[:-4]:", "    w.requires_grad = False"],
        ["net.bert.encoder.layer[-1].requires_grad_(False)"],
        ["for one in net.encoder.layers[:-2]: one.requires_grad_(False)",
         "for one in net.decoder.layers[:-3]: one.requires_grad_(False)"],
        ["for w in list(net.parameters())[:4]:", "    w.requires_grad = False"],
        ["list(net.parameters())[0].requires_grad = False"],
        ["for i, layer in enumerate(net.bert.encoder.layer):", "    if i < 6:",
         "        layer.requires_grad_(False)"],
        ["for w in [w for name, w in net.named_parameters() if 'head' not in name]:",
         "    w.requires_grad = False"],
        ["getattr(net, net.base_model_prefix).requires_grad_(False)"],
        ["dict(net.named_parameters())['bert.pooler.dense.bias'].requires_grad = False"],
    ],
)  # fmt: skip
def test_parts_that_a_script_computes_are_refused(lines: list[str]) -> None:
    ((_, _, why),) = read_script(script(*lines), "train.py").refused
    assert "frozen(parts=...)" in why


@pytest.mark.parametrize(
    "lines",
    [
        ["del net.bert.encoder.layer[6:]"],
        ["parts = []", "parts.append(net.bert.pooler)", "for one in parts: one.requires_grad_(False)"],
        ["for key, one in {'a': net.bert}.items(): one.requires_grad_(False)"],
        ["rest = list(net.bert.parameters()) + list(net.classifier.parameters())",
         "for one in rest: one.requires_grad = False"],
    ],
)  # fmt: skip
def test_parts_that_are_not_followed_are_listed(lines: list[str]) -> None:
    assert len(read_script(script(*lines), "train.py").unread) == 1


def test_a_deleted_option_is_not_read() -> None:
    lines = ["options = {'bf16': True, 'fp16': True}", "del options['fp16']"]
    done = read_script(script(*lines).replace("('out')", "('out', **options)"), "train.py")
    assert (done.arguments.get("bf16"), done.arguments.get("fp16")) == (True, None)
    assert not done.unread


def test_weights_that_train_beside_adapters_are_refused() -> None:
    adapt = [
        "from peft import LoraConfig, get_peft_model",
        "net.requires_grad_(False)",
        "net = get_peft_model(net, LoraConfig(r=8))",
    ]
    loop = [
        "for name, w in net.named_parameters():",
        "    if '{}' in name:",
        "        w.requires_grad = True",
    ]
    own = read_script(script(*adapt, *(line.format("lora_") for line in loop)), "train.py")
    assert not own.refused
    ((line, _, why),) = read_script(script(*adapt, *(one.format("norm") for one in loop)), "t.py").refused
    assert (line, "lora(save=...)" in why) == (8, True)


def groups(*tests: str) -> str:
    """Return an optimizer's groups of parameters by conditions on their names."""
    inner = (f"{{'params': [w for n, w in net.named_parameters() if {test}]}}" for test in tests)
    return f"[{', '.join(inner)}]"


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ("net.classifier.parameters()", True),
        ("[w for name, w in net.named_parameters() if 'norm' in name]", True),
        ("[{'params': list(net.classifier.parameters()), 'lr': 1.0}]", True),
        ("net.parameters()", False),
        ("[w for w in net.parameters() if w.requires_grad]", False),
        ("filter(lambda w: w.requires_grad, net.parameters())", False),
        ("[{'params': net.bert.parameters()}, {'params': net.classifier.parameters()}]", False),
        ("[{'params': net.encoder.parameters()}, {'params': net.classifier.parameters()}]", True),
        (groups("'norm' in n", "'head' in n"), True),
        (groups("any(x in n for x in kept)", "not any(x in n for x in kept)"), False),
        (groups("n in kept and w.requires_grad", "n not in kept and w.requires_grad"), False),
    ],
)  # fmt: skip
def test_an_optimizer_of_some_parts_is_listed(given: str, unread: bool) -> None:
    text = script("kept = names(net)", f"optimizer = torch.optim.AdamW({given})")
    text = text.replace(
        "TrainingArguments('out'))", "TrainingArguments('out'), optimizers=(optimizer, None))"
    )
    done = read_script(text, "train.py")
    assert [line for line, text in done.unread if "a part of the parameters" in text] == [4] * unread


def test_a_frozen_teacher_is_not_the_model_that_trains() -> None:
    teacher = "teacher = AutoModelForSequenceClassification.from_pretrained('bert-large-uncased')"
    done = read_script(
        script(teacher, "for w in teacher.parameters():", "    w.requires_grad = False"), "t.py"
    )
    assert not any(key.startswith("frozen") for key in done.arguments)
    assert [line for line, _ in done.unread] == [5]
    ((_, _, why),) = read_script(script("net.requires_grad_(False)"), "t.py").refused
    assert "all parameters are frozen" in why


def test_peft_prepares_weights_of_8_bits_with_checkpointing(tmp_path: Path) -> None:
    text = script(
        "from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training",
        "from transformers import BitsAndBytesConfig",
        "eight = BitsAndBytesConfig(load_in_8bit=True)",
        "net = AutoModelForSequenceClassification.from_pretrained('a/b', quantization_config=eight)",
        "net = get_peft_model(prepare_model_for_kbit_training(net), LoraConfig(r=4))",
    )
    file = tmp_path / "train.py"
    file.write_text(text)
    assert recipe(read_arguments(file)) == "qlora(r=4, bits=8) + every_layer + adamw_fused"


def test_a_model_that_the_trainer_loads_is_not_one_that_is_loaded_later() -> None:
    text = (
        "from transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n"
        "SFTTrainer('a/b', SFTConfig('out', model_init_kwargs={'dtype': 'bfloat16'})).train()\n"
        "base = AutoModelForCausalLM.from_pretrained('c/d', dtype='float16')"
    )
    done = read_script(text, "train.py")
    assert done.arguments["job.model"] == "a/b"
    assert "model.dtype" not in done.arguments


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("import timm\nmodel = timm.create_model('x')", "timm makes this model"),
        ("from transformers import AutoModelForCausalLM, TorchAoConfig\nmodel = AutoModelForCausalLM."
         "from_pretrained('a', quantization_config=TorchAoConfig('int8'))", "TorchAoConfig makes weights"),
        (
            "from transformers import PatchTSTForPretraining\nmodel = PatchTSTForPretraining(c)",
            "has no task here",
        ),
    ],
)  # fmt: skip
def test_a_model_of_another_kind_is_refused_by_name(lines: str, message: str) -> None:
    text = f"from accelerate import Accelerator\n{lines}\nmodel = Accelerator().prepare(model)\nmodel.train()"
    with pytest.raises(UnsupportedJobError, match=message):
        read_script(text, "train.py")


def test_a_model_made_from_a_config_has_its_task_and_changed_sizes() -> None:
    text = script().replace("AutoModelForSequenceClassification, ", "GPT2LMHeadModel, AutoConfig, ")
    made = "net = GPT2LMHeadModel(AutoConfig.from_pretrained('gpt2', vocab_size=100, n_layer=3))"
    lines = [made if line.startswith("net =") else line for line in text.splitlines()]
    done = read_script("\n".join(lines), "train.py")
    facts = {key: done.arguments[f"job.{key}"] for key in ("model", "task", "vocab_size", "dtype")}
    assert facts == {"model": "gpt2", "task": "causal-lm", "vocab_size": "100", "dtype": "float32"}
    assert [text for _, text in done.unread] == ["n_layer=3 in the config"]


def test_adapters_of_a_checkpoint_are_refused() -> None:
    text = script(
        "from peft import PeftModel", "net = PeftModel.from_pretrained(net, 'a/b', is_trainable=True)"
    )
    ((_, _, why),) = read_script(text, "t.py").refused
    assert "lora(r=..., targets=...)" in why


def test_options_of_a_script_s_own_dataclass_are_read(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass, field
from peft import LoraConfig
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import SFTConfig, SFTTrainer

@dataclass
class Options(SFTConfig):
    base_model: str = field(default=None)
    rank: int = 4
    targets: str = "q_proj, v_proj"
    per_device_train_batch_size: int = 2

options = HfArgumentParser(Options).parse_args_into_dataclasses()[0]
model = AutoModelForCausalLM.from_pretrained(options.base_model, attn_implementation=options.attention)
targets = options.targets.split(", ")
SFTTrainer(model, args=options, peft_config=LoraConfig(r=options.rank, target_modules=targets)).train()
"""
    file = tmp_path / "train.py"
    file.write_text(text)
    reading = read_arguments(file)
    assert not reading.refused
    assert reading.settings["batch_size"] == 2
    assert str(reading.settings["recipe"]).startswith("lora(r=4, targets=q_proj|v_proj) + ")
    assert "model" not in reading.settings
    assert [line.value for line in reading.unread] == [
        "HfArgumentParser(Options) (options have their defaults here)"
    ]
    file.write_text(text.replace("(Options)", "(SFTConfig)"))
    with pytest.raises(UsageError, match="from the command line"):
        read_arguments(file)


def test_the_trainer_s_own_quantization_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from peft import LoraConfig\nfrom transformers import BitsAndBytesConfig\n"
        "from trl import SFTConfig, SFTTrainer\nfour = BitsAndBytesConfig(load_in_4bit=True)\n"
        "SFTTrainer('a/b', SFTConfig('out'), quantization_config=four, peft_config=LoraConfig(r=4)).train()"
    )
    assert str(read_arguments(file).settings["recipe"]).startswith("qlora(r=4, double=false) + ")


def test_lengths_and_labels_of_a_script() -> None:
    text = script(
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "tokenizer = AutoTokenizer.from_pretrained('t5-small')",
        "net = AutoModelForSeq2SeqLM.from_pretrained('t5-small')",
        "inputs = tokenizer(texts, max_length=64)",
        "labels = tokenizer(text_target=summaries, max_length=16)",
    )
    read = read_script(text, "t.py").arguments
    assert (read["tokenizer.max_length"], read["tokenizer.target_length"]) == (64, 16)
    for given, count in (("{0: 'a', 1: 'b', 2: 'c'}", 3), ("{}", "len(id2label)")):
        made = script().replace("('bert-base-uncased')", f"('bert-base-uncased', id2label={given})")
        labels = read_script(made, "t.py").arguments["model.num_labels"]
        assert (labels if count == 3 else str(labels)) == count


def test_a_loop_beside_the_trainer_is_listed() -> None:
    loop = [
        "from accelerate import Accelerator",
        "optimizer = torch.optim.SGD(net.parameters())",
        "net, optimizer = Accelerator().prepare(net, optimizer)",
    ]
    assert [line for line, _ in read_script(script(*loop), "t.py").unread] == [4, 5]


def test_ray_s_workers_are_gpus_and_zero_assumes_one(tmp_path: Path) -> None:
    settings = read(tmp_path, FACTORY | {"ray_num_workers": 4}).settings
    assert (settings["gpus"], settings["batch_size"]) == (4, 4)
    zero = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    ((key, says),) = [(line.key, line.says) for line in read(tmp_path, zero).unread]
    assert (key, "one is assumed" in says) == ("zero_optimization.stage", True)
    zero["zero_optimization"] |= {"stage": 2, "reduce_bucket_size": 5e8}
    reading = read(tmp_path, zero)
    assert ["one is assumed" in line.says for line in reading.unread] == [True]
    assert "zero_optimization.reduce_bucket_size" in {line.key for line in reading.ignored}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_of_deepspeed_is_read_as_a_number_of_elements(stage: int, tmp_path: Path) -> None:
    needs_techniques(f"zero{stage}")
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 8,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5e8},
    }  # fmt: skip
    assert f"zero{stage}(offload=none, bucket=500000000)" in read(tmp_path, config).settings["recipe"]


def test_accelerate_s_own_stages_have_deepspeed_s_default_bucket(tmp_path: Path) -> None:
    config = {
        "distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "none"},
    }  # fmt: skip
    reading = read(tmp_path, config)
    assert not reading.refused
    assert "zero2(offload=none, bucket=500000000)" in reading.settings["recipe"]


def test_a_model_from_another_file_is_listed() -> None:
    text = "from transformers import Trainer, TrainingArguments\nfrom other import make\n"
    done = read_script(f"{text}Trainer(make(), TrainingArguments('out')).train()", "t.py")
    assert done.unread == [(3, "model=make() (made elsewhere)")]


@pytest.mark.parametrize("more", [{"infer_backend": "vllm"}, {"do_predict": True}, {"image_max_pixels": 9}])
def test_a_file_that_trains_nothing_known_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    needs_techniques("lora")
    with pytest.raises(UnsupportedJobError):
        read(tmp_path, FACTORY | more).refuse()
    assert not read(tmp_path, FACTORY | {"do_train": True, "do_predict": False}).refused


def test_names_of_quantized_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedJobError, match="weights of this format"):
        read(tmp_path, FACTORY | {"model_name_or_path": "org/model-AWQ"}).refuse()


def test_deepspeed_on_several_gpus_is_predicted_in_the_plain_loop(tmp_path: Path) -> None:
    given = {**FACTORY, "finetuning_type": "full", "deepspeed": {"zero_optimization": {"stage": 3}}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    loops = {gpus: read_arguments(tmp_path / "config.json", gpus=gpus).settings["loop"] for gpus in (1, 8)}
    assert loops == {1: "trainer", 8: "plain"}


def test_a_cell_that_is_timed_is_python() -> None:
    cells = ("%%time\na = 1", "%%bash\nrm x", "%%capture\n!pip install b\nb = 2")
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    assert code_of_notebook(json.dumps(notebook), "n.ipynb") == ("pass\na = 1\npass\npass\nb = 2", [])


def test_unsloth_loads_weights_in_the_dtype_of_the_gpu() -> None:
    text = "from unsloth import FastLanguageModel\n" + script("FastLanguageModel.from_pretrained('gpt2')")
    assert read_script(text, "a.py", bfloat16=False).arguments["unsloth.dtype"] == "float16"
    assert "unsloth.dtype" not in read_script(text, "a.py", bfloat16=True).arguments


@pytest.mark.parametrize(("bfloat16", "half"), [(False, True), (True, None)])
def test_unsloth_trains_in_the_precision_of_its_weights(bfloat16: bool, half: bool | None) -> None:
    """On a GPU without bfloat16 it is fp16. On another one the trainer's default decides."""
    text = (
        "from unsloth import FastLanguageModel\nfrom trl import SFTConfig\n"
        "model = FastLanguageModel.from_pretrained('gpt2')\nargs = SFTConfig('o')\n"
    )
    assert read_script(text, "a.py", bfloat16=bfloat16).arguments.get("fp16") is half


def test_a_misspelt_argument_is_refused(tmp_path: Path) -> None:
    reading = read(tmp_path, {"per_device_train_batchsize": 4, "fp16": True, "my_own_key": 1})
    assert [line.key for line in reading.refused] == ["per_device_train_batchsize"]
    with pytest.raises(
        UsageError, match=r"Did you mean 'per_device_train_batch_size'\?\nCorrect the file\.$"
    ):
        reading.refuse()
    assert [line.key for line in reading.unread] == ["my_own_key"]


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        ("$((64 / (GPUS * 2)))", 4),
        ("$(($GPUS-1))", 7),
        ("$((2 + GPUS % 3 * 5))", 12),
        ("$((64 / OTHER))", None),
        ("$((GPUS / 0))", None),
        ("$((GPUS ** 99999999))", None),
    ],
)
def test_arithmetic_of_a_shell_is_computed(written: str, steps: int | None) -> None:
    text = f"GPUS=8\nACC={written}\ntorchrun train.py --bf16 --gradient_accumulation_steps $ACC --seed 3\n"
    _, arguments = read_shell(text, "run.sh")
    found = arguments["gradient_accumulation_steps"]
    assert found == steps if steps is not None else isinstance(found, Unknown)
    assert arguments["seed"] == 3


def test_a_shell_file_may_end_in_a_continuation(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python train.py --model_name_or_path a/b \\\n  --bf16 \\")
    assert read_arguments(file).settings["model"] == "a/b"


def test_a_script_resizes_its_embeddings() -> None:
    line = "net.resize_token_embeddings({})"
    for given, rows in (("40000", "40000"), ("40000, pad_to_multiple_of=64", "40000"), ("9, 8", None)):
        done = read_script(script(line.format(given)), "train.py")
        assert done.arguments["job.vocab_size"] == (rows or "9")
    done = read_script(script(line.format("len(words), pad_to_multiple_of=64")), "train.py")
    assert (done.arguments["job.vocab_size"], [number for number, _ in done.unread]) == ("x64", [3])


@pytest.mark.parametrize(
    ("more", "start"),
    [
        (
            {"lora_target_modules": r"layers.[\d]+.(mlp|attn).up"},
            r"lora(targets='layers.[\d]+.(mlp|attn).up')",
        ),
        ({"lora_target_modules": "all-linear"}, "lora(targets=all-linear)"),
        ({"load_in_8bit": True}, "qlora(targets=q_proj, bits=8)"),
        ({"lora_modules_to_save": ["lm_head"]}, "lora(targets=q_proj, save=lm_head)"),
        ({"lora_layers_to_transform": [0, 3]}, "lora(targets=q_proj, layers=0|3)"),
        (
            {"lora_target_parameters": ["experts.up"], "lora_target_modules": None},
            "lora(parameters=experts.up)",
        ),
    ],
)
def test_axolotl_names_what_is_adapted(more: dict[str, Any], start: str, tmp_path: Path) -> None:
    assert recipe(read(tmp_path, AXOLOTL | ADAPTERS | more)).startswith(f"{start} + ")


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"unfrozen_parameters": ["^lm_head.*", "layers.1.w[0:99]"]},
         r"frozen(only='^lm_head\.*'|'layers\.1\.w') + "),
        ({"batch_size": 8}, "micro_batches(4) + "),
        ({"attn_implementation": "xformers"}, ""),
        ({"gradient_checkpointing": True, "activation_offloading": True}, "every_layer + host(all) + "),
        ({"gradient_checkpointing": "offload"}, "every_layer + host(checkpoints) + "),
    ],
)  # fmt: skip
def test_axolotl_has_words_of_its_own(more: dict[str, Any], part: str, tmp_path: Path) -> None:
    assert part in recipe(read(tmp_path, AXOLOTL | more))


def test_new_tokens_are_told_and_embeddings_resized(tmp_path: Path) -> None:
    reading = read(tmp_path, AXOLOTL | {"tokens": ["<a>"], "resize_token_embeddings_to_32x": True})
    assert reading.settings["vocab_size"] == "x32"
    assert [line.key for line in reading.differs if "adds a row" in line.says] == ["tokens"]


def test_llama_factory_freezes_all_but_the_last_layers(tmp_path: Path) -> None:
    freeze = {"finetuning_type": "freeze", "freeze_trainable_layers": 4, "freeze_extra_modules": "lm_head"}
    assert recipe(read(tmp_path, FACTORY | freeze)).startswith("frozen(only=lm_head, last=4) + ")
    reading = read(tmp_path, FACTORY | {"resize_vocab": True})
    assert recipe(reading).startswith("lora(targets=all-linear, save=embed_tokens|lm_head, alpha=16) + ")
    assert reading.settings["vocab_size"] == "x64"


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (AXOLOTL | {"rl": "ipo", "rl_beta": 0.2}, "dpo"),
        (AXOLOTL | {"rl": "simpo", "simpo_gamma": 0.2}, "simpo"),
        (AXOLOTL | {"reward_model": True}, "reward"),
        (FACTORY | {"stage": "kto", "pref_beta": 0.2}, "kto"),
        (FACTORY | {"stage": "dpo", "pref_loss": "orpo"}, "orpo"),
    ],
)
def test_preferences_are_their_tasks(values: dict[str, Any], task: str, tmp_path: Path) -> None:
    reading = read(tmp_path, values)
    assert not reading.refused
    assert reading.settings["task"] == task


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (AXOLOTL | {"rl": "grpo", "load_in_8bit": True}, r"support this training on preferences.*rl=grpo"),
        (AXOLOTL | {"processor_type": "AutoProcessor"}, "chat with pictures"),
        (AXOLOTL | {"qat": {"weight_dtype": "int4"}}, "quantization-aware training"),
        (FACTORY | {"stage": "rm"}, "training on preferences.*stage=rm"),
        (FACTORY | {"use_kt": True}, "KTransformers"),
    ],
)
def test_an_unsupported_job_is_one_line_that_no_flag_replaces(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedJobError, match=message) as caught:
        read(tmp_path, values).refuse(otherwise={"recipe", "model"})
    assert "\n" not in str(caught.value)


def test_a_recipe_replaces_an_unsupported_method(tmp_path: Path) -> None:
    reading = read(tmp_path, AXOLOTL | {"flash_attn_fuse_mlp": True})
    with pytest.raises(UnsupportedJobError, match="--recipe replaces it"):
        reading.refuse()
    reading.refuse(otherwise={"recipe"})


def test_frozen_parts_beside_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unfrozen_parameters.*adapters freeze all other weights"):
        read(tmp_path, AXOLOTL | ADAPTERS | {"unfrozen_parameters": ["^x.*"]}).refuse()


@pytest.mark.parametrize(
    "command",
    [
        "plan --gpus 2 --gpu h200",
        "gpus h200 --for bert-base-uncased --gpus 2",
        "gpus h200 --for bert-base-uncased",
    ],
)
def test_plans_for_several_gpus_repeat_what_was_not_read(
    command: str,
    answered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def show(request: Request, *_: Any) -> int:
        print(*request.doubts)
        return 0

    plans = SimpleNamespace(print_plan=show, print_cards=show)
    for caller in ("plan", "gpus"):
        monkeypatch.setattr(f"snugfit.cli.{caller}.group_plans", lambda: plans)
    (tmp_path / "train.py").write_text(script("net.classifier = other(net.classifier)"))
    assert run([*command.split(), "--arguments", "train.py"]) == 0
    assert "train.py was not read in full" in capsys.readouterr().out


def test_the_rows_of_an_embedding_are_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "bert-base-uncased", "--task", "masked-lm", "--batch-size", "1", "--json"]
    assert run([*words, "--sequence-length", "8", "--vocab-size", "x64"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["model"]["config"]["vocab_size"] == 30528, "30522 is no multiple of 64"
    assert run([*words, "--vocab-size", "many"]) == 2
    assert "x64 for a multiple" in capsys.readouterr().err
    for command in (
        ["export", "bf16", *words[1:-1], "--to", "hf"],
        ["train", *words[1:-1], "--dataset", "x"],
    ):
        assert run([*command, "--vocab-size", "x64"]) == 2
        assert "Resize the" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "axolotl train run.yaml",
        "accelerate launch --num_processes 1 -m axolotl.cli.train run.yaml --debug false",
    ],
)
def test_a_command_that_names_a_configuration_reads_it(command: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(AXOLOTL | ADAPTERS))
    file = tmp_path / "start.sh"
    file.write_text(f"{command}\n")
    reading = read_arguments(file)
    assert (reading.settings["model"], reading.settings["batch_size"]) == ("org/model", 2)
    assert recipe(reading).startswith("lora(targets=q_proj) + ")
    (tmp_path / "run.yaml").unlink()
    assert "launcher.run_file" in [line.key for line in read_arguments(file).refused]
    file.write_text("axolotl preprocess run.yaml\ntrl grpo --config run.yaml\n")
    with pytest.raises(UnsupportedJobError, match="not trl grpo"):
        read_arguments(file)


def test_a_command_of_trl_goes_before_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\nmax_length: 64\nlearning_rate: 0.1\n")
    file = tmp_path / "start.sh"
    file.write_text("trl sft --config sft.yaml --max_length 32 --per_device_train_batch_size 2")
    settings = read_arguments(file).settings
    assert (settings["model"], settings["sequence_length"], settings["batch_size"]) == ("a/b", 32, 2)
    assert "every_layer" in settings["recipe"]
