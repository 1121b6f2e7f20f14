"""The technique `fused`: its combinations, a simulation's allocations and launches, and its kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bare_process import script_in_triton
from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.kernels.fused_model import use_fused
from snugfit.features.kernels.head.deferred_logits import defer_logits
from snugfit.features.kernels.operations.bias_gelu import BLOCK_ROWS
from snugfit.job.build import instantiate
from snugfit.job.job import Job
from snugfit.planning.keep import Kept, kept_of
from snugfit.planning.search.space import space_of
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import TRITON, Trace
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import LogitsWish
from snugfit.techniques.technique import Slot
from test_own_forward import hold_copy
from third_step import hold_third_step
from tiers import crossed

LAYERS = 3


def trace_of(recipe: str, family: str = "bert") -> Trace:
    return rehearse(small_job(family, LAYERS), Recipe.parse(recipe).setup(), CudaPolicy())


def launches(trace: Trace) -> Counter[tuple[str, str]]:
    """Return the number of launches of each of our kernels, by name and phase."""
    return Counter(
        (kernel.operator.removeprefix(TRITON), kernel.phase)
        for kernel in trace.kernels
        if kernel.operator.startswith(TRITON)
    )


# ---- combinations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe", "says"),
    [
        ("t5", "fused", r"no kernels for t5\. It covers bert, .*vit.*'torch_kernels'"),
        ("bert", "fused + compiled", r"compiled.* compiles the code that it would replace"),
        ("bert", "fused + eager", r"needs torch's attention, and eager is another"),
        ("bert", "fused + zero3", "not simulated together with fused"),
    ],
)
def test_what_it_does_not_go_with_is_said(family: str, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)


def test_plans_look_at_it_where_it_knows_the_model() -> None:
    job = small_job("bert", 2)

    def offered(this: Job, fixed: Kept) -> set[str]:
        return {str(one) for one in space_of(this, fixed=fixed).offers(Slot.KERNELS)}

    assert offered(job, kept_of(job, kept(but="kernels"))) == {"torch_kernels", "fused"}
    other = small_job("t5", 2)
    assert offered(other, kept_of(other, kept(but="kernels"))) == {"torch_kernels"}
    assert offered(job, kept_of(job, kept("fused", but="optimizer"))) == {"fused"}


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.filterwarnings("ignore::snugfit.features.kernels.head.deferred_logits.LogitsComputedWhole")
def test_a_copy_of_a_model_computes_with_its_own_weights(family: str, way: str) -> None:
    model = instantiate(small_job(family, 1), dtype=None, attention="sdpa")
    use_fused(model)
    if family == "llama":
        defer_logits(model, LogitsWish())
    hold_copy(model, way)


# ---- simulation --------------------------------------------------------------------------------------------


def test_every_kernel_that_should_run_is_launched() -> None:
    norms = 2 * LAYERS + 1
    assert launches(trace_of("bf16 + fused")) == {
        ("add_norm_forward", "forward"): norms,
        ("add_norm_backward", "backward"): norms,
        ("bias_gelu_forward", "forward"): LAYERS,
        ("bias_gelu_backward", "backward"): LAYERS,
        ("copy_slopes", "backward"): LAYERS,
        ("column_sums", "backward"): norms + 2 * LAYERS,
    }


def test_layers_that_are_recomputed_launch_theirs_again() -> None:
    for family in ("bert", "gpt2"):
        kept, again = (
            launches(trace_of(recipe, family)) for recipe in ("bf16 + fused", "bf16 + fused + every_layer")
        )
        assert again["bias_gelu_forward", "backward"] == LAYERS
        assert kept["bias_gelu_forward", "backward"] == 0


def test_bytes_are_those_of_what_a_kernel_reads_and_writes() -> None:
    """The activation reads a product and a bias and writes as much as the product.

    Its backward pass reads two, and writes one and the partial sums of the bias.
    """
    job, trace = small_job("bert", LAYERS), trace_of("bf16_pure + fused")
    width = int(job.transformers_config().intermediate_size)
    rows = job.batch_size * job.sequence_length
    moved = {kernel.operator.removeprefix(TRITON): kernel.nbytes for kernel in trace.kernels}
    assert moved["bias_gelu_forward"] == 2 * (2 * rows * width + width)
    partials = -(-rows // BLOCK_ROWS)
    assert moved["bias_gelu_backward"] == 2 * (3 * rows * width + width) + 4 * partials * width
    assert 8 * rows in {block.nbytes for block in trace.blocks}, "means and deviations of a norm"


def test_it_launches_less_and_keeps_less() -> None:
    plain, fused = trace_of("bf16"), trace_of("bf16 + fused")
    assert len(fused.kernels) < 0.7 * len(plain.kernels)
    most = [most_activations(trace) for trace in (plain, fused)]
    assert most[1] < 0.8 * most[0]


def most_activations(trace: Trace) -> int:
    """Return the most bytes of tensors from the last forward pass that are alive at once."""
    alive = most = 0
    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if block.phase == "forward" and block.step == 2:
            alive += block.nbytes if event > 0 else -block.nbytes
            most = max(most, alive)
    return most


def test_padded_batches_have_no_mask_and_no_wait() -> None:
    job = small_job("bert", LAYERS, batch_size=4, padding=0.25)
    plain, fused = (
        rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy()) for recipe in ("bf16", "bf16 + fused")
    )
    attention = [kernel.operator for kernel in fused.kernels if "attention" in kernel.operator]
    assert set(attention) == {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}
    assert fused.syncs == plain.syncs - 1


@pytest.mark.parametrize("recorded", ["", " + captured"])
def test_attention_over_padded_rows_computes_what_their_stretches_hold(recorded: str) -> None:
    """Tokens and padding of a row are separate, in whole squares of 128; empty stretches cost nothing."""
    batch, width = 3, 64
    facts = {"max_position_embeddings": 512}
    job = small_job("bert", 2, facts, batch_size=batch, sequence_length=512, padding=0.25)
    trace = rehearse(job, Recipe.parse(f"bf16 + fused{recorded}").setup(), CudaPolicy())
    flops = {
        kernel.operator.rpartition("_")[2]: kernel.flops
        for kernel in trace.kernels
        if "_flash_attention" in kernel.operator
    }
    scores = batch * (384**2 + 128**2)
    assert flops == {"forward": 4 * width * scores, "backward": 10 * width * scores}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "family"),
    crossed(
        ["fused", "bf16_master + adamw_fused + fused", "bf16 + every_layer + fused"],
        ["bert", "vit", "gpt2"],
        keep=1,
    ),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    padding = {"padding": 0.25, "batch_size": 4} if family == "bert" else {}
    hold_third_step(replace(small_job(family, 2, **padding), clip=1.0), Recipe.parse(recipe).setup())


# ---- the kernels -----------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_do_what_their_references_do(device: str, tmp_path: Path) -> None:
    """The kernels run in Triton's interpreter, and on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SNUGFIT_TEST_GPU=1")
    told = script_in_triton(Path(__file__).with_name("fused_in_triton.py"), device, tmp_path / "told")
    assert "as the reference" in told
