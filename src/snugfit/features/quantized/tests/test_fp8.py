"""Products in 8-bit floats by torchao: the converted layers, their simulation, and learning.

The CPU runs torchao's own code, its products included, so law 1 holds as for any technique. Tests that need
torchao are skipped without it, and give that reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bare_process import import_torchao, said_by
from fitted import classified, copy_of, fitted, losses_of, model_of, trainer_of
from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.quantized.float8 import convertible, put_back
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import kept_of
from snugfit.planning.search.space import space_of
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import packaged_rates
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Kernel, Trace
from snugfit.step.build import build_model
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from test_law_fidelity import LEARNED, STEPS_TO_LEARN, HighOrLow, job_to_learn, least_loss, run
from test_law_loops import foreach_as_on_a_gpu, hold  # noqa: F401
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import slow_but

FP8 = roster.find("fp8")
installed = pytest.mark.skipif(bool(FP8.missing_package()), reason=FP8.missing_package() or "")

BOTH = ("fp8", "fp8(recipe=rowwise)")
LAYERS, LINEAR = 3, 7
"""Number of layers of the Llama below, and of linear layers in each."""


def llama(**changes: Any) -> Job:
    return small_job("llama", LAYERS, **{"batch_size": 2, "sequence_length": 64, **changes})


@cache
def trace_of(recipe: str) -> Trace:
    return rehearse(llama(), Recipe.parse(recipe).setup(), CudaPolicy())


def products(trace: Trace) -> Counter[str]:
    return Counter(kernel.phase for kernel in trace.kernels if kernel.operator == "aten::_scaled_mm")


# ---- combinations
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe", "says"),
    [
        ("gpt2", "fp8", "GPT2LMHeadModel has no torch.nn.Linear that trains in a stack"),
        ("llama", "fp8 + lora", "lora freezes the linear layers"),
        ("llama", "fp8 + qlora", "freezes the linear layers"),
        ("llama", "fp8 + selective(products)", "knows products by their operators"),
    ],
)
def test_what_does_not_go_with_it_is_said_before_it_is_tried(family: str, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)
    assert says in str(caught.value)


def test_sizes_that_are_no_multiples_of_16_are_refused() -> None:
    odd = small_job("llama", 2, facts={"hidden_size": 40, "intermediate_size": 72})
    with pytest.raises(RecipeError, match=r"sizes must be multiples of 16.* Try 'bf16'"):
        Recipe.parse("fp8").check(odd, installed=False)


def test_a_gpu_without_8_bit_floats_is_told_in_one_sentence() -> None:
    a100 = find_gpu("a100-sxm-80").compute_capability
    with pytest.raises(
        RecipeError, match=r"fp8: it needs compute capability 8\.9 or newer, but this GPU has 8\.0"
    ):
        Recipe.parse("fp8").check(llama(), installed=False, compute_capability=a100)


def test_without_the_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.techniques.technique.version_of", lambda package: None)
    with pytest.raises(RecipeError, match=r'needs torchao.*Try: pip install "snugfit\[fp8\]"'):
        Recipe.parse("fp8").check(llama())


@installed
def test_plans_look_at_it_where_they_may_learn_otherwise() -> None:
    capability = find_gpu("h200").compute_capability
    for fidelity, offered in ((Fidelity.ROUNDS, False), (Fidelity.LEARNS, True)):
        fixed = kept_of(llama(), kept(but="precision checkpointing"))
        space = space_of(llama(), fidelity=fidelity, capability=capability, fixed=fixed)
        assert ("fp8" in {str(one) for one in space.offers(Slot.PRECISION)}) is offered


# ---- converted layers
# ---------------------------------------------------------------------------------------


@installed
@pytest.mark.parametrize("family", ["bert", "llama", "t5", "vit"])
def test_linear_layers_of_repeated_layers_are_converted_around_the_same_weights(family: str) -> None:
    from torchao.float8.float8_linear import Float8Linear

    job = small_job(family, 2)
    plain, model = (
        build_model(job, Recipe.parse(recipe).setup(), torch.device("cpu")) for recipe in ("bf16", "fp8")
    )
    assert [*plain.state_dict()] == [*model.state_dict()]
    expected = {
        id(module): name
        for name, module in plain.named_modules()
        for one in convertible(plain)
        if one is module
    }
    converted = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert converted == set(expected.values()) != set()
    assert all(any(part.isdigit() for part in name.split(".")) for name in converted)  # no head, no pooler
    weights = {name: id(parameter) for name, parameter in model.named_parameters()}
    put_back(model)
    assert not any(isinstance(module, Float8Linear) for module in model.modules())
    assert weights == {name: id(parameter) for name, parameter in model.named_parameters()}


@installed
def test_what_does_not_train_stays_as_it_is() -> None:
    model = build_model(llama(), Recipe.parse("bf16").setup(), torch.device("meta"))
    for parameter in model.model.layers[0].parameters():  # type: ignore[union-attr,index]
        parameter.requires_grad_(False)
    assert len(list(convertible(model))) == (LAYERS - 1) * LINEAR


# ---- simulation
# ---------------------------------------------------------------------------------------------

LAW = [
    (*model, recipe)
    for model in (("llama", "float32"), ("llama", "bfloat16"), ("bert", "float32"))
    for recipe in (*BOTH, "fp8 + every_layer", "fp8 + micro_batches(2)")
]
OFTEN = [("llama", "bfloat16", "fp8 + micro_batches(2)")]
"""The case of `make test`."""


def law_job(family: str) -> Job:
    """Return a job with the fewest products of a stack of layers; 8-bit products are slow on the CPU."""
    return small_job(family, 2, batch_size=2)


@installed
@pytest.mark.whole
@pytest.mark.parametrize(("family", "dtype", "recipe"), slow_but(LAW, OFTEN.__contains__))
def test_a_real_step_allocates_what_its_trace_says(family: str, dtype: str, recipe: str) -> None:
    hold_to_reports(replace(law_job(family), dtype=dtype), Recipe.parse(recipe))


@installed
@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_and_so_do_the_loops_of_others(loop: str) -> None:
    hold(law_job("llama"), "fp8", loop)


@installed
@pytest.mark.whole
def test_a_recorder_that_sees_wrappers_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this planted fault, the recorder misses the operators on tensors inside a wrapper."""

    def ignore(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    monkeypatch.setattr(Recorder, "_hand_on", ignore)
    with pytest.raises(AssertionError):
        hold_to_reports(law_job("llama"), Recipe.parse("fp8"), CpuPolicy())


@installed
@pytest.mark.parametrize("recipe", BOTH)
def test_each_layer_has_a_product_forward_and_two_backward(recipe: str) -> None:
    assert products(trace_of(recipe)) == {"forward": LAYERS * LINEAR, "backward": 2 * LAYERS * LINEAR}


@installed
def test_it_takes_the_bytes_of_bf16_and_more_kernels() -> None:
    other, trace = trace_of("bf16"), trace_of("fp8")
    assert trace.peak()[0] == pytest.approx(other.peak()[0], rel=0.1)
    assert len(trace.kernels) > 3 * len(other.kernels)


@installed
@pytest.mark.slow
def test_compiled_most_of_these_kernels_are_gone() -> None:
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    for recipe in BOTH:
        trace = trace_of(f"{recipe} + compiled")
        assert products(trace) == products(trace_of(recipe))
        assert len(trace.kernels) < len(trace_of(recipe).kernels) / 2


@pytest.mark.slow
@installed
def test_compiled_under_autocast_its_results_have_16_bits() -> None:
    """torchao checks in Python for CUDA's autocast while Dynamo traces it."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    first = next(
        kernel for kernel in trace_of("fp8 + compiled").kernels if kernel.operator == "aten::_scaled_mm"
    )
    (rows, inner), (_, columns) = first.shapes[:2]
    scales = 2 * 4
    assert first.nbytes == rows * inner + inner * columns + scales + 2 * rows * columns


@installed
def test_the_largest_of_a_transposed_matrix_is_looked_for_in_a_copy() -> None:
    names = {block.operator for block in trace_of("fp8").blocks}
    assert "aten::max: contiguous copy" in names


# ---- seconds -----------------------------------------------------------------------------------------------


def product(dtype: str, length: int = 8192) -> Kernel:
    shapes = ((length, length), (length, length))
    nbytes = 3 * length**2
    return Kernel("aten::mm", "", "forward", 2 * length**3, nbytes, shapes, dtype, 2, "", (length,) * 3)


def test_large_products_take_half_of_what_they_take_in_bf16() -> None:
    rates = packaged_rates(find_gpu("h200"))
    before = replace(rates, products={name: rate for name, rate in rates.products.items() if name != "fp8"})
    for one in (rates, before):  # an older calibration has no such rate
        clock = KernelClock(one)
        eight, sixteen = (
            clock.seconds(product("torch.float8_e4m3fn")),
            clock.seconds(product("torch.bfloat16")),
        )
        assert eight == pytest.approx(sixteen / 2, rel=0.05)
        assert clock.seconds(product("torch.float8_e5m2")) == eight


def test_a_prediction_says_that_its_seconds_were_not_measured() -> None:
    assert any("rate of the data sheet" in line for line in FP8().warnings(llama(), (9, 0)))


# ---- training ----------------------------------------------------------------------------------------------


@installed
@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(BOTH, 1))
def test_it_learns_as_fast_as_bf16(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is a small real one: classify high and low tokens."""
    monkeypatch.setattr("snugfit.step.batches.SyntheticDataset", HighOrLow)
    reached = {
        one: least_loss(run(job_to_learn(1e-2), Recipe.parse(one).setup(), steps=STEPS_TO_LEARN // 2).losses)
        for one in (recipe, "bf16")
    }
    assert reached[recipe] < LEARNED
    assert reached[recipe] < 2 * reached["bf16"] + 0.05
    assert reached["bf16"] < LEARNED


@installed
@pytest.mark.whole
def test_a_users_trainer_trains_with_it_and_without_it_again(tmp_path: Path) -> None:
    model = model_of("bert")
    trainers = {
        recipe: trainer_of(tmp_path / str(number), copy_of(model), classified(12))
        for number, recipe in enumerate(("bf16", "fp8"))
    }
    for recipe, trainer in trainers.items():
        fitted(trainer, recipe).train()
    sixteen, eight = (losses_of(trainer) for trainer in trainers.values())
    assert sixteen != eight
    assert eight == pytest.approx(sixteen, rel=0.2)


TALKATIVE = """
from transformers import AutoModelForMaskedLM, BertConfig
from snugfit.job.architectures import class_of
from snugfit.prediction.worker_pool import Question, worker_pool
import sys
if __name__ == "__main__":
    class_of("masked-lm", BertConfig())
    assert "torchao" in sys.modules
    with worker_pool(dict, workers=2, preload=["transformers.models.bert.modeling_bert"]) as pool:
        assert [answer.value for answer in pool.answers_to([Question(0, "__len__", ())])] == [0]
"""


@pytest.mark.slow
@installed
@pytest.mark.whole
def test_what_torchao_says_of_other_gpus_kernels_is_left_out(tmp_path: Path) -> None:
    """transformers' code of a model imports torchao."""
    assert "register_constant" not in (told := said_by(import_torchao, tmp_path / "told"))
    assert "Failed to load" not in told


@installed
@pytest.mark.slow
def test_it_is_so_in_workers_where_it_is_imported_before_they_are_made(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TALKATIVE)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "Failed to load" not in done.stderr
    assert "register_constant" not in done.stderr


@installed
def test_the_layers_that_torchao_makes_without_data_take_nothing() -> None:
    """On a GPU `meta` is no device that allocates. An H100 recorded no block between the build of a BERT with
    converted layers and its first batch."""
    built = {
        recipe: [
            block.nbytes for block in trace_of(recipe).blocks if block.step < 0 and block.phase == "build"
        ]
        for recipe in ("bf16", "fp8")
    }
    assert built["fp8"] == built["bf16"]
