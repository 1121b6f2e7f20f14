"""Simulate small models of thirteen families for an H200, and check kernels, kinds and special paths.

Two recipes per family cover most techniques. A table lists the attention kernels that each family must
choose.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import pytest
from families import FAMILIES, Family
from transformers.integrations import moe, sdpa_attention
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from snugfit.errors import RecipeError
from snugfit.job.config import check_facts
from snugfit.job.find import read_preset
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy, Policy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

H200, V100 = CudaPolicy(), CudaPolicy(capability=(7, 0), multiprocessors=80)
NAMED = {family.name: family for family in FAMILIES}

COPIED = "position_bias_mask.contiguous()" in inspect.getsource(sdpa_attention)
"""True if this transformers makes learnt biases contiguous (5.17 does not, 5.23 does)."""

CAPPED = not Gemma2PreTrainedModel._supports_sdpa
"""True if this transformers excludes Gemma 2 from scaled_dot_product_attention. The operator has no soft
cap between scores and softmax: 5.17 omits the caps, 5.23 takes eager attention."""

WHOLE_FALLBACK = hasattr(moe, "_grouped_mm_fallback_bwd")
"""True if the backward pass of experts without grouped products is one operator. In 5.17 it reads each
expert's number of tokens from the device, so a simulation has to assume it."""

FUSED_ATTENTION = {
    **({"gemma2": ((), ())} if CAPPED else {}),
    # cuDNN supports no trained position bias; in older transformers the bias is also strided.
    "t5": (("efficient",), ("efficient",)) if COPIED else (("efficient", "math"), ("efficient", "math")),
    "vit": (("cudnn",), ("efficient",)),
}
USUAL = (("cudnn",), ("efficient",))
"""Usual kernels: in bf16 without a mask, and in fp32 with padding (pictures have none)."""


def small(family: Family, task: Task | None = None, **changes: Any) -> Job:
    """Return a job for two narrow layers of this family."""
    facts = dict(read_preset(family.preset))
    sizes = {"depth": 2, "width": 128, "heads": 4, "inner": 256}
    for size, keys in family.keys:
        facts |= dict.fromkeys(keys, sizes[size])
    facts |= {key: 32 for key in (family.free_heads, "head_dim") if key in facts}
    facts |= {key: values[0] for key, values in family.choices}
    if "max_source_positions" in facts:
        facts["max_source_positions"] = 100
    if family.grouped:
        facts["num_key_value_heads"] = 2
    if family.vocabulary:
        facts[family.vocabulary] = 1000
        facts |= {key: 1 for key, value in facts.items() if key.endswith("_token_id") and value is not None}
    model = Model.from_config(check_facts(facts, where=family.name), name=family.name)
    sizes = {"batch_size": 4, "sequence_length": 96, "target_length": 40}
    job = Job(model=model, task=task or family.tasks[-1], dtype="float32", **sizes)  # type: ignore[arg-type]
    return replace(job, **changes)


def padded(family: Family) -> Job:
    return small(family, padding=0.0 if family.name == "vit" else 0.3)


@functools.cache
def trace_of(job: Job, recipe: str, policy: Policy = H200, loop: str = "plain") -> Trace:
    chosen = Recipe.parse(recipe)
    chosen.check(job)
    return rehearse(job, chosen.setup(), policy, steps=2, loop=loop)


def born(trace: Trace, kind: str) -> int:
    return sum(block.nbytes for block in trace.blocks if block.kind == kind)


@pytest.mark.parametrize(
    "family",
    slow_but(FAMILIES, lambda family: FAMILIES.index(family) % 2 == 0),
    ids=lambda family: family.name,
)
def test_a_family_runs_the_kernels_of_an_h200(family: Family) -> None:
    job = small(family)
    in_bf16, in_fp32 = FUSED_ATTENTION.get(family.name, USUAL)
    trace = trace_of(job, "bf16 + every_layer")
    assert trace.attention == in_bf16
    assert born(trace, Kind.WEIGHTS) > 4 * 2 * 4 * 128 * 128
    assert any(block.phase == "backward" and block.kind == Kind.ACTIVATIONS for block in trace.blocks)
    assert trace_of(padded(family), "plain").attention == in_fp32


@pytest.mark.parametrize(
    "family",
    slow_but(FAMILIES, lambda family: FAMILIES.index(family) % 2 == 1),
    ids=lambda family: family.name,
)
def test_a_family_trains_adapters_in_pure_bf16_and_pieces(family: Family) -> None:
    trace = trace_of(padded(family), "lora(targets=all-linear) + bf16_pure + eager + micro_batches(2)")
    assert trace.attention == ()
    assert born(trace, Kind.GRADIENTS) < born(trace, Kind.WEIGHTS)
    assert [mark.phase for mark in trace.marks if mark.step == 1].count("forward") == 2


@pytest.mark.parametrize("name", ["bert", "mixtral", "whisper"])
def test_evaluating_keeps_nothing_for_a_backward_pass(name: str) -> None:
    training = small(NAMED[name])
    trace = trace_of(replace(training, phase=Phase.EVALUATE), "plain")
    assert born(trace, Kind.GRADIENTS) == born(trace, Kind.OPTIMIZER_STATES) == 0
    assert trace.peak()[0] < trace_of(training, "plain").peak()[0] / 2


def test_experts_are_multiplied_as_the_gpu_can() -> None:
    """transformers uses grouped products from Ampere on, and one product per expert on older GPUs."""
    job = small(NAMED["mixtral"], Task.CAUSAL_LM)
    grouped, apart = trace_of(job, "bf16_pure"), trace_of(job, "plain")
    for trace in (grouped, apart):
        assert "transformers::grouped_mm_fallback" not in {kernel.operator for kernel in trace.kernels}
    products = [kernel for kernel in grouped.kernels if kernel.operator == "aten::_grouped_mm"]
    assert products
    assert not grouped.waits
    experts = job.transformers_config().num_local_experts
    counts = [sum(k.operator == "aten::mm" for k in trace.kernels) for trace in (apart, grouped)]
    assert counts[0] - counts[1] == experts * len(products), "in fp32 each group is a product of its own"
    assert len(apart.waits) == len(products), "the host reads the ends of the groups"
    old = trace_of(job, "fp16", V100)
    operators = {kernel.operator for kernel in old.kernels}
    assert "aten::_grouped_mm" not in operators
    assert "transformers::grouped_mm_fallback" in operators
    assert WHOLE_FALLBACK or any("_grouped_mm_fallback_backward" in doubt for doubt in old.doubts)


def test_sound_and_pictures_come_in_the_weights_dtype_where_nothing_casts_them() -> None:
    for name in ("whisper", "vit"):
        plain, low = (trace_of(small(NAMED[name]), recipe) for recipe in ("plain", "bf16_pure"))
        assert largest_input(low) * 2 == largest_input(plain)
        assert largest_input(trace_of(small(NAMED[name]), "bf16")) == largest_input(plain)
    for loop in ("accelerate", "trainer"):
        assert trace_of(small(NAMED["whisper"]), "bf16_pure", loop=loop).peak()[0]


def largest_input(trace: Trace) -> int:
    return max(block.nbytes for block in trace.blocks if block.phase == "load")


def test_layers_that_hand_on_more_than_their_state_are_refused_in_spans() -> None:
    with pytest.raises(RecipeError, match="position bias"):
        Recipe.parse("segments(2)").check(small(NAMED["t5"]))
    assert trace_of(small(NAMED["bert"]), "segments(2)").peak()[0]


def test_token_classifiers_take_adapters_everywhere() -> None:
    """peft refuses to adapt the head and to train it whole at the same time."""
    for name in ("bert", "gpt2", "llama"):
        job = small(NAMED[name], Task.TOKEN_CLASSIFICATION)
        assert trace_of(job, "lora(targets=all-linear)").peak()[0]


def test_rms_norm_is_one_kernel_on_cuda() -> None:
    """The forward pass keeps the input and one fp32 number per row. The backward pass makes only two
    gradients."""
    from torch import nn, randn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(64, 64, bias=False), nn.RMSNorm(64)

        def forward(self, x: Any) -> Any:
            return self.norm(self.first(x)).sum()

    job = Job(model=Model.from_module(Net(), {"x": randn(4, 32, 64)}), task=Task.CUSTOM, batch_size=4)

    def of_norm(policy: Policy) -> list[tuple[str, int]]:
        return [
            (block.operator, block.nbytes)
            for block in trace_of(job, "plain", policy).blocks
            if "rms_norm" in block.operator and block.step == 1
        ]

    rows, state = 4 * 32 * 4, 4 * 32 * 64 * 4
    forward = [("aten::_fused_rms_norm", state), ("aten::_fused_rms_norm", rows)]
    backward = [("aten::_fused_rms_norm_backward", state), ("aten::_fused_rms_norm_backward", 64 * 4)]
    assert of_norm(H200) == [*forward, *backward]
    assert of_norm(CpuPolicy()) == []
