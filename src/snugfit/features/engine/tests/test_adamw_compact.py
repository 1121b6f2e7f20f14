"""AdamW with moments in 8 bits. Codes are unbiased, and updates stay close to those of AdamW. The kernel
equals its reference. Predictions, checkpoints and errors match the 8-bit states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bare_process import script_in_triton
from small_models import small_job
from small_runs import bert_job, resumed_as_whole, small_run
from snugfit.errors import RecipeError
from snugfit.features.engine.masters import compact
from snugfit.features.engine.masters.adamw import MasterAdamW
from snugfit.features.engine.masters.compact import GROUP
from snugfit.features.engine.masters.compact_adamw import SCALES, CompactAdamW
from snugfit.features.engine.masters.table import MOMENTS
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import crossed, slow_but

RECIPE = "bf16_master + adamw_compact"
IN_24_BITS = f"{RECIPE}(master_bits=24)"
TABLES = 20_000
"""Bytes of the kernels' tables of addresses for the weights of a small model."""


def kept(numbers: torch.Tensor, moment: str, step: int) -> torch.Tensor:
    """Return moments after one pass through their codes."""
    scales = torch.zeros(compact.scale_count(numbers.numel()))
    chance = compact.chances(0, numbers.numel(), step, numbers.device)
    if moment == "first":
        codes = torch.zeros(numbers.shape, dtype=torch.int8)
        compact.narrow_first(numbers, chance.first, codes, scales)
        return compact.widen_first(codes, scales)
    codes = torch.zeros(numbers.shape, dtype=torch.uint8)
    compact.narrow_second(numbers, chance.second, codes, scales)
    return compact.widen_second(codes, scales)


def drawn(count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(5))


def test_moments_that_are_kept_are_right_on_average() -> None:
    """The mean of rounded moments over many steps, each with its own random numbers, equals the
    exact moment.
    """
    first, second = drawn(), drawn().square() ** 2
    for moment, numbers in (("first", first), ("second", second)):
        mean = torch.stack([kept(numbers, moment, step) for step in range(400)]).mean(0)
        largest = compact.cut_in_groups(numbers.abs()).amax(1).repeat_interleave(GROUP)[: len(numbers)]
        assert float(((mean - numbers).abs() / largest).max()) < 2e-3, moment
        once = (kept(numbers, moment, 1) - numbers).abs()
        assert float((once / largest).max()) < 2 / 127, "the largest distance of neighbouring codes"


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_edges_of_groups(count: int) -> None:
    """The largest value of a group and zeros are exact. A small second moment is never rounded to zero,
    because an update divides by it."""
    numbers = drawn(count)
    largest = compact.cut_in_groups(numbers.abs()).amax(1)
    back = compact.cut_in_groups(kept(numbers, "first", 3).abs()).amax(1)
    torch.testing.assert_close(back, largest, rtol=1e-6, atol=0)
    assert not kept(torch.zeros(count), "first", 1).any()
    assert not kept(torch.zeros(count), "second", 1).any()
    tiny = torch.full((count,), 1e-30)
    tiny[0] = 1.0
    assert (kept(tiny, "second", 1) > 0).all()


def test_scales_without_a_reciprocal_stand_for_zeros() -> None:
    assert kept(torch.full((70,), 1e-40), "first", 1).isfinite().all()
    assert kept(torch.full((70,), 1e-40), "second", 1).isfinite().all()
    assert kept(torch.full((70,), 1e-36), "second", 1) == pytest.approx(torch.full((70,), 1e-36), rel=1e-5)


def test_chances_are_even_and_differ_by_step_and_moment() -> None:
    one, other = (compact.chances(0, 100_000, step, torch.device("cpu")) for step in (1, 2))
    for chance in (*one, *other):
        assert chance.min() > 0
        assert chance.max() < 1
        counts = torch.histc(chance, 16, 0, 1)
        assert float((counts / 6250 - 1).abs().max()) < 0.06
    pairs = [(one.first, one.second), (one.first, other.first), (one.first[1:], one.first[:-1])]
    for left, right in pairs:
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 0.02
    later = compact.chances(300, 50, 1, torch.device("cpu"))
    assert torch.equal(later.first, one.first[300:350])


@pytest.mark.whole
def test_weights_stay_beside_those_of_moments_in_32_bits() -> None:
    """With noisy gradients, the weights differ from 32-bit AdamW's by a small fraction of their movement."""
    models = [torch.nn.ParameterList([torch.nn.Parameter(drawn(4096) / 10)]) for _ in range(2)]
    start = models[0][0].detach().clone()
    ours, exact = CompactAdamW(models[0], lr=1e-3), MasterAdamW(models[1], lr=1e-3)
    draw, tilt = torch.Generator().manual_seed(1), drawn(4096)
    for _ in range(200):
        slope = torch.randn(4096, generator=draw) + 0.5 * tilt
        for model, optimizer in zip(models, (ours, exact), strict=True):
            model[0].grad = slope.clone()
            optimizer.step()
    moved = (models[1][0].detach() - start).norm()
    assert float((models[0][0] - models[1][0]).detach().norm() / moved) < 0.06


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"), crossed(["bert", "llama"], [RECIPE, IN_24_BITS, "bf16 + adamw_compact"], keep=1)
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold_third_step(replace(small_job(family, 2), clip=1.0), Recipe.parse(recipe).setup())


@pytest.mark.parametrize(
    ("recipe", "states", "moved"),
    [(RECIPE, 4.125, 14.25), (IN_24_BITS, 3.125, 12.25), ("bf16 + adamw_compact", 2.125, 16.25)],
)
def test_bytes_of_an_element(recipe: str, states: float, moved: float) -> None:
    """The test checks the bytes of the states, and the bytes that an update reads and writes."""
    job = replace(small_job("llama", 2, batch_size=1), clip=1.0)
    kinds = dict(predict(job, recipe, gpu="h200").footprint.kinds)
    model = build_model(job, Recipe.parse("plain").setup(), torch.device("meta"))
    elements = sum(weight.numel() for weight in model.parameters())
    assert 0 <= kinds["optimizer states"] - states * elements < TABLES
    trace = rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())
    update = next(kernel for kernel in trace.kernels if kernel.operator == "triton::adamw_with_8_bit_states")
    assert 0 < update.nbytes - moved * elements < TABLES
    assert [kernel.operator for kernel in trace.kernels if kernel.phase == "clip"] == [
        "triton::squares_of_gradients", "triton::norm_of_squares",
    ]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but([RECIPE, IN_24_BITS, "adamw_compact"], 1))
def test_a_run_that_is_resumed_is_the_run(recipe: str, tmp_path: Path) -> None:
    """Stochastic rounding depends on the step's number, so weights and losses are equal bit for bit."""
    resumed_as_whole(small_run(tmp_path, recipe, max_steps=4, save_steps=2), 3)


@pytest.mark.whole
def test_states_keep_their_dtypes_when_they_are_loaded() -> None:
    weight = torch.nn.Parameter(drawn(100))
    optimizer = CompactAdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    again = CompactAdamW([weight])
    again.load_state_dict(optimizer.state_dict())
    assert [again.state[weight][name].dtype for name in (*MOMENTS, *SCALES)] == [
        torch.int8, torch.uint8, torch.float32, torch.float32,
    ]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernel_does_what_the_reference_does(device: str, tmp_path: Path) -> None:
    """The test runs in Triton's interpreter, and on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SNUGFIT_TEST_GPU=1")
    told = script_in_triton(Path(__file__).with_name("compact_in_triton.py"), device, tmp_path / "told")
    assert "as the reference" in told


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("bf16_pure + adamw_compact", r"bfloat16 and have no 32-bit masters.*'bf16_master'"),
        ("bf16_pure + adamw_compact(master_bits=24)", r"bfloat16 and have no 32-bit masters.*'bf16_master'"),
        ("bf16 + adamw_compact(master_bits=24)", r"no masters that could have 24 bits.*'bf16_master'"),
        ("bf16_master + adamw_compact(master_bits=16)", "master_bits.*32 or 24"),
        ("adamw_compact + ddp", "several processes"),
        ("adamw_compact + zero1", "several processes"),
    ],
)
def test_what_it_does_not_go_with_is_named(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job("bert", 2), installed=False)


def test_what_was_not_measured_is_said() -> None:
    assert any("only in short runs" in warning for warning in Recipe.parse(RECIPE).check(bert_job()))
