"""Files and scripts of other libraries with weights in 4 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_exchange_dialects import LLAMA_FACTORY, UNSLOTH
from test_exchange_read import keys, read
from test_finetuning_tools import exported, job_in

from in_roster import needs_techniques
from snugfit.errors import RecipeError


@pytest.fixture(autouse=True)
def only_with_qlora() -> None:
    """Skip the tests if the feature with the technique `qlora` is missing."""
    needs_techniques("qlora")


@pytest.mark.parametrize(
    ("dtype", "recipe", "words"),
    [
        ("bfloat16", "qlora + bf16_pure", ["bf16_pure", "float32"]),
        ("float32", "qlora + bf16", ["bf16", "bfloat16", "--dtype"]),
    ],
)
def test_axolotl_takes_4_bit_weights_with_its_own_dtypes_alone(
    dtype: str, recipe: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        exported(job_in(tmp_path / "model", dtype), recipe, "axolotl")
    assert all(word in str(raised.value) for word in words)


def test_files_of_llama_factory_and_unsloth_name_4_bit_weights(tmp_path: Path) -> None:
    needs_techniques("adamw_8bit")
    llama_factory = read(tmp_path, "q.yaml", LLAMA_FACTORY + "quantization_bit: 4\n")
    assert llama_factory.settings["recipe"].startswith("qlora(r=16, targets=q_proj|v_proj, alpha=32)")
    assert not llama_factory.refused
    unsloth = read(tmp_path, "four.py", UNSLOTH.format(four=True))
    assert unsloth.settings["recipe"].startswith("qlora(r=32, targets=q_proj|v_proj, alpha=16)")
    assert not unsloth.refused
    assert "unsloth.load_in_4bit" in keys(unsloth.differs)


def test_a_qlora_script(tmp_path: Path) -> None:
    """Many tutorials have such a script: supported arguments are taken, and each obstacle is named once."""
    reading = read(
        tmp_path,
        "qlora.py",
        "bnb = BitsAndBytesConfig(load_in_4bit=True)\n"
        "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-8B', quantization_config=bnb, "
        "device_map='auto', torch_dtype=torch.bfloat16)\n"
        "peft_config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, "
        "target_modules=['q_proj', 'v_proj'], bias='none')\n"
        "args = TrainingArguments('./out', per_device_train_batch_size=2, gradient_accumulation_steps=8, "
        "optim='paged_adamw_8bit', bf16=torch.cuda.is_bf16_supported(), max_grad_norm=0.3)\n",
    )
    assert keys(reading.refused) == {"bf16"}
    assert reading.settings["recipe"] == (
        "qlora(r=16, targets=q_proj|v_proj, alpha=32, double=false) + micro_batches(8) + paged_adamw(bits=8)"
    )
    assert "model.quantization_config.load_in_4bit" in keys(reading.differs), (
        "fp4 is BitsAndBytesConfig's default"
    )
    assert "model.quantization_config.bnb_4bit_compute_dtype" in keys(reading.differs), (
        "float32 is its default"
    )
    assert (reading.settings["model"], reading.settings["task"]) == ("meta-llama/Llama-3.1-8B", "causal-lm")


@pytest.mark.parametrize(
    ("bias", "recipe"),
    [
        ("'none'", "lora"),
        ("'all'", "lora(bias=all)"),
        ("'lora_only'", "lora(bias=lora_only)"),
        ("'every'", None),
    ],
)
def test_biases_that_train_beside_adapters(bias: str, recipe: str | None, tmp_path: Path) -> None:
    text = (
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='float32')\nargs = TrainingArguments()\n"
    )
    reading = read(tmp_path, "biases.py", f"{text}peft_config = LoraConfig(bias={bias})\n")
    if recipe is None:
        assert "lora.bias" in keys(reading.refused)
    else:
        assert reading.settings["recipe"].partition(" + ")[0] == recipe


@pytest.mark.parametrize(
    ("config", "given", "recipe", "dtype"),
    [
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4'", "model", "every_layer", "float32"),
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4'", "model, False", "", "float32"),
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4'", "", "", "bfloat16"),
    ],
)
def test_peft_widens_what_is_not_quantized_and_checkpoints(
    config: str, given: str, recipe: str, dtype: str, tmp_path: Path
) -> None:
    text = (
        f"bnb = BitsAndBytesConfig({config})\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16', quantization_config=bnb)\n"
        f"{f'model = prepare_model_for_kbit_training({given})' if given else ''}\n"
        "peft_config = LoraConfig(r=16)\nargs = TrainingArguments('./out', gradient_checkpointing=False)\n"
    ).replace("model, False", "model, use_gradient_checkpointing=False")
    reading = read(tmp_path, "qlora.py", text)
    assert (recipe in reading.settings["recipe"].split(" + ")) is bool(recipe)
    assert reading.settings["dtype"] == dtype
    assert not reading.refused


@pytest.mark.parametrize(
    ("config", "differs"),
    [
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4'", True),
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.float32", True),
        ("load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16", False),
        ("load_in_4bit=False", False),
    ],
)
@pytest.mark.parametrize("given", ["model", "model_init_kwargs"])
def test_the_dtype_of_products_with_4_bit_weights(
    config: str, differs: bool, given: str, tmp_path: Path
) -> None:
    """transformers' own dtype is float32, also under autocast: bitsandbytes casts the input to it."""
    load = "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16', quantization_config=bnb)\n"
    within = "model_init_kwargs={'quantization_config': bnb}, "
    text = (
        f"bnb = BitsAndBytesConfig({config})\n{load if given == 'model' else ''}"
        f"peft_config = LoraConfig(r=16)\nargs = SFTConfig('./out', {within if given != 'model' else ''})\n"
    )
    reading = read(tmp_path, "qlora.py", text)
    assert (f"{given}.quantization_config.bnb_4bit_compute_dtype" in keys(reading.differs)) is differs
