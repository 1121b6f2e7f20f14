"""Techniques, tools and files of other libraries beside `fp8` and `qlora`."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_exchange_dialects import LLAMA_FACTORY, UNSLOTH
from test_exchange_read import keys, read
from test_finetuning_tools import exported, job_in

from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.frontends.trainer.ranks import recipe_in_each
from snugfit.planning.cost.short_passes import second_step_is_redundant
from snugfit.planning.keep import kept_of
from snugfit.planning.search.space import space_of
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from tiers import slow_but

# ---- other techniques --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe", "says"),
    [
        ("bert", "fused + qlora", r"read weights, which are quantized here\. Try 'torch_kernels'"),
        ("llama", "compiled + qlora", r"weights in 4 bits are not compiled, so leave compiled out"),
        ("llama", "qlora + selective(products)", r"selective\(products\) keeps nothing\. Try 'every_layer'"),
        ("llama", "qlora + bf16_master", "adapters are fp32"),
        ("llama", "fp8 + zero2", "not simulated together with fp8"),
        ("llama", "fp8 + ddp", "not simulated together with fp8"),
        ("llama", "qlora + fsdp", "not simulated together with qlora"),
    ],
)
def test_techniques_that_exclude_each_other_are_named(family: str, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)


@pytest.mark.parametrize("recipe", ["fp8", "qlora"])
def test_a_trainer_of_several_processes_refuses_them(recipe: str) -> None:
    with pytest.raises(RecipeError, match=f"^{recipe} cannot be given to a trainer that is one of 2"):
        recipe_in_each(Recipe.parse(recipe), 2)


def test_a_plan_offers_one_rank_where_higher_ranks_are_never_better() -> None:
    job = small_job("bert", 2, batch_size=2)
    fixed = kept_of(job, kept(but="adapters"))
    space = space_of(job, fidelity=Fidelity.LEARNS, capability=(9, 0), fixed=fixed)
    offered = [str(one) for one in space.offers(Slot.ADAPTERS)]
    assert [one for one in offered if "qlora" in one] == ["qlora(targets=all-linear)"]


@pytest.mark.parametrize("recipe", slow_but(["bf16 + every_layer + micro_batches(2)", "bf16"], 1))
def test_a_search_splices_the_second_step_of_4_bit_weights(recipe: str) -> None:
    """bitsandbytes casts a bias for good when its layer is first called."""
    job, setup = small_job("qwen2", 2, batch_size=2), Recipe.parse(f"qlora + {recipe}").setup()
    assert second_step_is_redundant(job, setup, CudaPolicy())


# ---- other libraries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "told"), [("load_in_4bit", "'qlora'"), ("LOAD_IN_8BIT", "'qlora'"), ("mxfp8", "'fp8'")]
)
def test_a_word_of_another_library_is_answered_with_advice(word: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.parse(word)
    assert told in str(error.value)
    assert "Did you mean" not in str(error.value)


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
    llama_factory = read(tmp_path, "q.yaml", LLAMA_FACTORY + "quantization_bit: 4\n")
    assert llama_factory.settings["recipe"].startswith("qlora(r=16, targets=q_proj|v_proj)")
    assert not llama_factory.refused
    unsloth = read(tmp_path, "four.py", UNSLOTH.format(four=True))
    assert unsloth.settings["recipe"].startswith("qlora(r=32, targets=q_proj|v_proj)")
    assert not unsloth.refused
    assert "unsloth.load_in_4bit" in keys(unsloth.differs)


def test_a_qlora_script(tmp_path: Path) -> None:
    """As they stand in many tutorials: what is known is taken, and each obstacle is named once."""
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
        "qlora(r=16, targets=q_proj|v_proj, double=false) + micro_batches(8) + paged_adamw(bits=8)"
    )
    assert "model.quantization_config.load_in_4bit" in keys(reading.differs), (
        "fp4 is BitsAndBytesConfig's default"
    )
    assert "model.quantization_config.bnb_4bit_compute_dtype" in keys(reading.differs), (
        "float32 is its default"
    )
    assert (reading.settings["model"], reading.settings["task"]) == ("meta-llama/Llama-3.1-8B", "causal-lm")


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
    """transformers' own is float32, whatever autocast says: bitsandbytes casts the input to it."""
    load = "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype='bfloat16', quantization_config=bnb)\n"
    within = "model_init_kwargs={'quantization_config': bnb}, "
    text = (
        f"bnb = BitsAndBytesConfig({config})\n{load if given == 'model' else ''}"
        f"peft_config = LoraConfig(r=16)\nargs = SFTConfig('./out', {within if given != 'model' else ''})\n"
    )
    reading = read(tmp_path, "qlora.py", text)
    assert (f"{given}.quantization_config.bnb_4bit_compute_dtype" in keys(reading.differs)) is differs
