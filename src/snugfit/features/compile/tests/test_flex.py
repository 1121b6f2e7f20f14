"""flex_attention as a technique: its simulation follows its compiled kernels, and unsupported jobs are
refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.job.job import Job
from snugfit.rehearsal.device.attention import run_flex
from snugfit.rehearsal.device.other_programs import COMPILED, FLEX
from snugfit.rehearsal.device.overrides import in_force
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe

LONG = {"max_position_embeddings": 1024}


def a_job(**changes: Any) -> Job:
    given: dict[str, Any] = {"batch_size": 2, "sequence_length": 1000} | changes
    return replace(small_job("llama", 2, LONG), **given)


def traced(recipe: str, **changes: Any) -> Trace:
    return rehearse(a_job(**changes), Recipe.parse(recipe).setup(), CudaPolicy(capability=(8, 0)))


def kept(trace: Trace) -> int:
    return sum(block.nbytes for block in trace.blocks if block.kind == "activations" and block.step == 2)


@pytest.mark.parametrize("padding", [0.0, 0.25])
@pytest.mark.parametrize("recipe", ["bf16", "bf16_pure", "sgd"])
def test_no_scores_and_no_mask_are_ever_whole(recipe: str, padding: float) -> None:
    trace = traced(f"{recipe} + flex", padding=padding)
    largest = max(block.nbytes for block in trace.blocks if block.step == 2)
    assert largest <= 2 * 1000 * 112 * 4, (
        "an activation between two linear layers; a mask has 2 x 1,000 x 1,000"
    )
    dtypes = {kernel.dtype for kernel in trace.kernels if "flex_attention" in kernel.operator}
    assert dtypes == {"torch.float32" if recipe == "sgd" else "torch.bfloat16"}
    assert FLEX in trace.doubts
    assert COMPILED not in trace.doubts, (
        "only attention is compiled, and its simulation includes the compilation"
    )


def test_forward_keeps_what_flash_attention_keeps_and_backward_takes_less() -> None:
    flex, flash = traced("bf16_pure + flex"), traced("bf16_pure")
    assert flash.attention == ("flash",)
    rows = 2 * 4 * 1000 * 4
    assert kept(flex) == pytest.approx(kept(flash), abs=4 * rows)
    operators = {kernel.operator for kernel in flex.kernels}
    assert {"snugfit::flex_attention", "snugfit::flex_attention_backward"} <= operators
    assert not [name for name in operators if "flash" in name]
    accumulators = rows * (16 + 1) + 256  # gradients of queries in 32 bits, and one number per row
    assert {block.nbytes for block in flash.blocks if "workspace" in block.operator} >= {
        accumulators + 2 * 2 * 4 * 1000 * 16 * 2
    }


def test_products_are_counted_as_those_of_flash_attention_over_all_positions() -> None:
    flex, flash = traced("bf16_pure + flex"), traced("bf16_pure")

    def flops(trace: Trace) -> int:
        return sum(kernel.flops for kernel in trace.kernels if "attention" in kernel.operator)

    assert flops(flex) == 2 * flops(flash), "the mask is causal"


def test_values_may_be_narrower_than_queries() -> None:
    with in_force(CudaPolicy()):
        narrower()


def narrower() -> None:
    query, value = (torch.empty(1, 2, 8, width, device="meta", requires_grad=True) for width in (16, 4))
    out, logsumexp, largest = run_flex(query, query, value)
    assert out.shape == (1, 2, 8, 4)
    assert logsumexp.shape == largest.shape == (1, 2, 8)
    gradients = torch.autograd.grad(out, (query, value), torch.empty_like(out))
    assert [one.shape for one in gradients] == [query.shape, value.shape]


def test_what_transformers_compiled_is_its_own_again() -> None:
    """transformers caches the function that it compiles first; a real run must not get the simulation's."""
    from transformers.integrations.flex_attention import WrappedFlexAttention

    before = WrappedFlexAttention._instance
    traced("bf16_pure + flex")
    assert WrappedFlexAttention._instance is before


@pytest.mark.parametrize(
    ("job", "recipe", "says"),
    [
        (small_job("bert", 2), "flex", r"drops no scores.*attention_probs_dropout_prob = 0\.1"),
        (small_job("gpt2", 2), "flex", "no flex_attention for GPT2LMHeadModel"),
        (small_job("t5", 2), "flex", "adds its positions"),
        (a_job(), "flex + compiled", "flex was not tested"),
        (a_job(), "flex + selective(products)", "does not know its kernel"),
    ],
)
def test_what_does_not_go_with_it_is_refused(job: Job, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(recipe).check(job, installed=False)


def test_gpus_before_ampere_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"8\.0"):
        Recipe.parse("flex").check(a_job(), (7, 5), installed=False)


def test_it_is_predicted_with_its_doubts_where_triton_is() -> None:
    pytest.importorskip("triton", reason="lacks Triton")
    from snugfit.prediction.predict import predict

    predicted = predict(a_job(), "bf16 + flex", gpu="h200")
    assert FLEX in predicted.doubts
    assert any("one step of it was measured" in doubt for doubt in predicted.doubts)
