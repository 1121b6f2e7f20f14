"""The package flash-attn as a technique.

Without the package, torch's own FlashAttention-2 gives the prediction, and no step runs. The sums through
transformers' code equal those of `sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as utils

from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError, RehearsalError
from snugfit.features.kernels.without_padding import flash_attn as flash
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.applier import set_process
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe

RECIPE = "bf16 + flash"
CPU = torch.device("cpu")


def a_job(family: str = "llama", **changes: Any) -> Job:
    """Return a job of four sequences of 16 tokens, half of them padding, without dropout."""
    facts, task = {
        "bert": ({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, Task.MASKED_LM),
        "llama": ({}, Task.CAUSAL_LM),
    }[family]
    return replace(small_job(family, 2, facts), **({"task": task, "padding": 0.5} | changes))


def traced(recipe: str = RECIPE, **changes: Any) -> Trace:
    return rehearse(a_job(**changes), Recipe.parse(recipe).setup(), CudaPolicy())


def shapes(trace: Trace, operator: str) -> set[tuple[tuple[int, ...], ...]]:
    return {kernel.shapes for kernel in trace.kernels if kernel.operator == f"aten::{operator}"}


# ---- simulations -----------------------------------------------------------------------------------------


def test_without_padding_it_is_torchs_flash_attention() -> None:
    ours, torchs = (
        rehearse(a_job(padding=0.0), Recipe.parse(recipe).setup(), CudaPolicy(capability=(8, 0)))
        for recipe in ("bf16_pure + flash", "bf16_pure")
    )
    assert torchs.attention == ("flash",)
    assert ours.peak()[0] == torchs.peak()[0]
    operator = "_scaled_dot_product_flash_attention"
    assert shapes(ours, operator) == {((4, 4, 16, 16), (4, 2, 16, 16), (4, 2, 16, 16))}
    assert not ours.waits


def test_padding_is_left_out_around_each_layer_for_which_the_host_waits() -> None:
    trace = traced()
    assert shapes(trace, "_flash_attention_forward") == {((32, 4, 16), (32, 2, 16), (32, 2, 16))}
    assert {kernel.dtype for kernel in trace.kernels if "_flash" in kernel.operator} == {"torch.bfloat16"}
    assert shapes(trace, "silu") == {((4, 16, 112),)}, "all other operators also compute the padding"
    assert len(trace.waits) >= 4
    masks = [block for block in trace.blocks if block.nbytes == 4 * 4 * 16 * 16 * 2 and block.step == 2]
    assert not [block for block in masks if "where" in block.operator], "no mask as a matrix"


@pytest.mark.whole
def test_transformers_finds_its_own_functions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (len, max)
    monkeypatch.setattr(utils, "_loaded_implementation", "kernels-community/flash-attn2")
    monkeypatch.setattr(utils, "_flash_fn", found[0])
    monkeypatch.setattr(utils, "_flash_varlen_fn", found[1])
    before, check = utils._lazy_imports, PreTrainedModel._flash_attn_can_dispatch
    traced()
    assert (utils._flash_fn, utils._flash_varlen_fn) == found
    assert utils._loaded_implementation == "kernels-community/flash-attn2"
    assert utils._lazy_imports is before
    assert PreTrainedModel._flash_attn_can_dispatch is check


def test_heads_are_filled_up_to_eight_numbers() -> None:
    job = replace(small_job("llama", 2, {"head_dim": 12}), padding=0.5)
    trace = rehearse(job, Recipe.parse(RECIPE).setup(), CudaPolicy())
    assert shapes(trace, "_flash_attention_forward") == {((32, 4, 16), (32, 2, 16), (32, 2, 16))}
    assert shapes(trace, "constant_pad_nd")


def test_a_prediction_says_what_it_rests_on() -> None:
    predicted = predict(a_job(), RECIPE, gpu="h200")
    said = " ".join(predicted.doubts)
    assert "torch's own FlashAttention-2" in said
    assert "measured on no GPU" in said


# ---- equal sums -------------------------------------------------------------------------------------------


def kernel_of_the_cpu(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    """Compute `flash_attn_func` with torch's own attention, in any precision."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(operand.transpose(1, 2) for operand in (q, k, v)), is_causal=causal, scale=softmax_scale,
        enable_gqa=q.size(2) != k.size(2),
    )  # fmt: skip
    return out.transpose(1, 2)


def kernel_for_lengths(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    parts = [
        kernel_of_the_cpu(*(one[None, start:end] for one in (q, k, v)), dropout_p, softmax_scale, causal)
        for start, end in pairwise(cu_seqlens_q.tolist())
    ]
    return torch.cat(parts, dim=1)[0]


@pytest.fixture
def a_kernel_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the package's functions, as transformers finds them, by these."""
    functions = (kernel_of_the_cpu, kernel_for_lengths, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_, **__: False)
    yield
    utils._loaded_implementation = None


@pytest.mark.whole
@pytest.mark.usefixtures("a_kernel_of_the_cpu")
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_loss_and_gradients_are_those_of_sdpa(family: str) -> None:
    kept = torch.arange(16) < torch.tensor((16, 3, 1, 9))[:, None]
    ids = torch.randint(1, 96, (4, 16), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids * kept, "attention_mask": kept.long(), "labels": ids.where(kept, -100)}
    runs = []
    for attention in ("sdpa", flash.FLASH):
        torch.manual_seed(3)
        setup = replace(Recipe().setup(), attention=attention, weights_dtype="float64")
        model: Any = build_model(a_job(family), setup, CPU)
        loss = model(**batch).loss
        loss.backward()
        runs.append((loss.item(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
    for name, gradient in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], gradient, rtol=1e-5, atol=1e-7)


# ---- refusals and plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "recipe", "says"),
    [
        (small_job("t5", 2), RECIPE, "no FlashAttention for T5ForConditionalGeneration"),
        (small_job("llama", 2), "flash", "computes in 16 bits.*Add 'bf16'"),
        (small_job("llama", 2), RECIPE + " + selective(products)", "does not know its kernel"),
        (small_job("llama", 2, {"head_dim": 264}), RECIPE, "heads of up to 256 numbers"),
        (small_job("gemma2", 2), RECIPE, "a cap of the scores"),
    ],
)
def test_what_does_not_go_with_it_is_refused(job: Job, recipe: str, says: str) -> None:
    with pytest.raises((RecipeError, RehearsalError), match=says):
        predict(job, recipe, gpu="h200")


def test_compiled_layers_were_not_tried_with_it() -> None:
    with pytest.raises(RecipeError, match="flash was not tested"):
        Recipe.parse(RECIPE + " + compiled").check(a_job(), installed=False)


def test_gpus_before_ampere_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"8\.0"):
        Recipe.parse("fp16 + flash").check(a_job(), (7, 5))


@pytest.mark.parametrize(
    ("device", "version", "says"),
    [("cpu", "2.8.3", "GPUs alone"), ("cuda", None, "flash-attn>=2.3.3, which is not installed. Try: pip")],
)
def test_it_does_not_run_without_a_gpu_or_the_package(
    device: str, version: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "version_of", lambda package: version)
    with pytest.raises(RecipeError, match=says):
        set_process(replace(Recipe().setup(), attention=flash.FLASH), SimpleNamespace(type=device))  # type: ignore[arg-type]


@pytest.mark.whole
@pytest.mark.stored_rehearsals
@pytest.mark.slow
def test_a_plan_takes_it_only_where_it_is_kept() -> None:
    """This case is slow because `test_host_adamw.py` covers another technique in every run."""
    job, gpu = a_job(), find_gpu("h200")
    found = plan(job, gpu=gpu, keep=kept(RECIPE, but="batching checkpointing"), workers=1)
    assert found.best is not None
    assert "flash" in str(found.best.recipe)
    predicted = predict(job, found.best.recipe, gpu=gpu)
    assert predicted.timing is not None
    assert found.best.reserved_bytes == predicted.footprint.reserved_bytes
    assert found.best.step_seconds == pytest.approx(predicted.timing.step_seconds)
