"""AdamW with stochastic rounding of bfloat16 weights is right on average, where nearest rounding makes no
progress.

Otherwise it equals torch's AdamW, and its simulation matches a run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import snugfit
from kept import REST
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.optimizers.updates import pieces
from snugfit.features.optimizers.updates.stochastic import StochasticAdamW, round_by_chance
from snugfit.job.gpu import find_gpu
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import crossed, slow_but

RECIPE = "bf16_pure + adamw_stochastic"
GAP = 2.0**-7
"""Distance between neighbouring bfloat16 numbers from 1 to 2."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def test_rounding_is_right_on_average_and_to_a_neighbour() -> None:
    for share in (0.0, 0.125, 0.5, 0.9):
        exact = torch.full((200_000,), 1 + share * GAP)
        for sign in (1, -1):
            rounded = round_by_chance(sign * exact) * sign
            assert set(rounded.unique().tolist()) <= {1.0, 1 + GAP}
            assert float((rounded - 1).mean()) == pytest.approx(share * GAP, abs=0.005 * GAP)


def test_what_bfloat16_has_stays_what_it_is() -> None:
    there = torch.randn(10_000).bfloat16()
    there[:2] = torch.tensor([0.0, -0.0])
    assert torch.equal(round_by_chance(there.float()).bfloat16(), there)


@pytest.mark.whole
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_no_weight_that_is_not_a_number_becomes_one(bits: int) -> None:
    """CUDA's NaN has all bits set, so that an addition would overflow."""
    weight = torch.nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
    weight.grad = torch.full((500,), bits >> 16, dtype=torch.int16).view(torch.bfloat16)
    optimizer = StochasticAdamW([weight])
    for _ in range(3):
        optimizer.step()
        assert weight.isnan().all()
        weight.grad = torch.ones_like(weight)


def moved(kind: type[torch.optim.Optimizer], dtype: torch.dtype, *, steps: int = 200) -> torch.Tensor:
    """Return weights that began at 1, after steps of 1/10,000 each in one direction."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
    optimizer = kind([weight], lr=1e-4, weight_decay=0.0)  # type: ignore[call-arg]
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        weight.grad = (0.5 + 0.1 * torch.randn(4096, generator=draw)).to(dtype)
        optimizer.step()
    return weight.detach().float()


@pytest.mark.whole
def test_small_updates_move_weights_as_they_do_in_32_bits() -> None:
    exact = float(moved(torch.optim.AdamW, torch.float32).mean())
    assert exact == pytest.approx(0.98, abs=0.002)
    assert float(moved(StochasticAdamW, torch.bfloat16).mean()) == pytest.approx(exact, abs=0.0005)
    assert (moved(torch.optim.AdamW, torch.bfloat16) == 1).all(), "to the nearest they stand still"


@pytest.mark.whole
def test_the_second_moment_follows_gradients_that_fall() -> None:
    """Each step shrinks the moment by a thousandth, which bfloat16 cannot represent with nearest rounding."""
    held = {}
    for kind in (StochasticAdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = kind([weight], lr=1e-4)
        for step in range(300):
            weight.grad = torch.full_like(weight, 1.0 if step < 20 else 0.0)
            optimizer.step()
        held[kind] = float(optimizer.state[weight]["exp_avg_sq"].float().mean())
    exact = (1 - 0.999**20) * 0.999**280
    assert held[StochasticAdamW] == pytest.approx(exact, rel=0.01)
    assert held[torch.optim.AdamW] > 1.2 * exact


@pytest.mark.whole
@pytest.mark.slow
def test_digits_are_learned_at_a_small_rate_as_in_32_bits(tmp_path: Path) -> None:
    """Weights of bfloat16 with nearest rounding learn half as much."""
    task = pytest.importorskip("snugfit.features.digits", reason="the feature digits is not there")
    train, test = task.digits()
    losses = {}
    for recipe in ("plain", "bf16_pure", RECIPE):
        done = snugfit.train(
            task.digits_job(learning_rate=2e-4), recipe, train, evaluation=test, output_dir=tmp_path / recipe,
            device="cpu", max_steps=150, warmup_steps=0.1, save_strategy="no", eval_strategy="steps",
            eval_steps=150,
        )  # fmt: skip
        assert done.evaluated
        losses[recipe] = done.evaluated.loss
    assert losses[RECIPE] == pytest.approx(losses["plain"], rel=0.03)
    assert losses["bf16_pure"] > 2 * losses["plain"]


def of_many_shapes(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return parameters of many layouts: transposed, channels last, of one number, and empty."""
    draw = torch.Generator().manual_seed(7)
    made = [torch.randn(size, generator=draw) for size in ((33, 20), (1000,), (3, 4, 5, 6), (), (0, 3))]
    made[0], made[2] = made[0].t(), made[2].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(one.to(dtype)) for one in made]


def give_gradients(weights: list[torch.nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)
    weights[1].grad = None if step == 0 else weights[1].grad  # it has a step count of its own


@pytest.mark.whole
@pytest.mark.parametrize(("at_once", "dtype"), crossed([1 << 23, 100, 7], [torch.float32, torch.bfloat16]))
def test_each_step_is_torch_s_to_a_neighbour(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the new numbers are next to those of torch's AdamW in 32 bits, from the same numbers."""
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    numbers: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    weights = of_many_shapes(dtype)
    ours = StochasticAdamW(weights, **numbers)
    exact = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    theirs = torch.optim.AdamW(exact, fused=True, **numbers)
    for step in range(3):
        for weight, wide in zip(weights, exact, strict=True):
            wide.data.copy_(weight.detach())
            for name in ("exp_avg", "exp_avg_sq") if ours.state[weight] and theirs.state[wide] else ():
                theirs.state[wide][name].copy_(ours.state[weight][name])
        give_gradients(weights, step)
        for weight, wide in zip(weights, exact, strict=True):
            wide.grad = None if weight.grad is None else torch.empty_like(wide).copy_(weight.grad)
        ours.step()
        theirs.step()
        for weight, wide in zip(weights, exact, strict=True):
            near = 0.0 if dtype is torch.float32 else 2.0**-7
            torch.testing.assert_close(weight.float(), wide, rtol=near, atol=0.0)


@pytest.mark.whole
def test_no_numbers_are_updated_without_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight])
    optimizer.step()
    assert not optimizer.state
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: None)


# ---- simulated, planned, refused
# ----------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(("at_once", "family"), crossed([5000, 1 << 23], ["llama", "bert", "vit"], keep=1))
def test_a_real_step_allocates_what_its_trace_says(
    family: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    job, setup = small_job(family, 2), Recipe.parse(RECIPE).setup()
    hold_third_step(job, setup)


def test_states_have_four_bytes_a_weight_and_no_weight_another_copy() -> None:
    job = small_job("bert", 2, batch_size=1)
    kinds = {
        name: dict(predict(job, f"bf16_pure + {name}", gpu="h200").footprint.kinds)
        for name in ("adamw_fused", "adamw_stochastic")
    }
    assert kinds["adamw_stochastic"]["weights"] == kinds["adamw_fused"]["weights"]
    counters = kinds["adamw_fused"]["optimizer states"] - kinds["adamw_stochastic"]["optimizer states"]
    assert 0 < counters < 4096, "torch's fused AdamW counts each weight's steps on the GPU"


def test_nothing_is_said_of_lost_updates() -> None:
    job = small_job("bert", 2)
    lost = [list(Recipe.parse(recipe).lost_updates(job)) for recipe in ("bf16_pure", RECIPE)]
    assert "adamw_stochastic" in lost[0][0]
    assert not lost[1]


@pytest.mark.parametrize("recipe", ["adamw_stochastic", "bf16 + adamw_stochastic", "lora + bf16_stochastic"])
def test_weights_of_32_bits_are_refused(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"weights that train are float32.*bf16_pure"):
        Recipe.parse(recipe).check(small_job("bert", 2))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("dtype", "keep"), slow_but([("bfloat16", "adamw_stochastic"), ("float32", RECIPE)], 1)
)
@pytest.mark.slow
def test_a_plan_takes_it_only_where_it_is_kept(dtype: str, keep: str) -> None:
    job, gpu = replace(small_job("bert", 2, batch_size=4), dtype=dtype), find_gpu("h200")
    others = f"sdpa + keep_all + default + inline + {REST}"
    assert "adamw_stochastic" not in str(plan(job, gpu=gpu, keep=others, workers=1).best)
    found = plan(job, gpu=gpu, keep=f"{keep} + {others}", workers=1)
    assert found.best is not None
    assert any("One step was measured" in doubt for doubt in found.doubts)
    predicted = predict(job, found.best.recipe, gpu=gpu)
    assert "adamw_stochastic" in str(found.best.recipe)
    assert predicted.timing is not None
    assert found.best.reserved_bytes == predicted.footprint.reserved_bytes
    assert found.best.step_seconds == pytest.approx(predicted.timing.step_seconds)
