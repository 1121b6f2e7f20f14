"""AdamW with 4-bit moments stores each as the nearest of sixteen values and applies torch's update.

Its simulation matches a run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kept import REST
from small_models import small_job
from snugfit.features.optimizers.updates import pieces
from snugfit.features.optimizers.updates.four_bit import (
    BLOCK,
    MOMENTS,
    SIGNED,
    UNSIGNED,
    FourBitAdamW,
    pack,
    tables_of,
    unpack,
)
from snugfit.job.gpu import find_gpu
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import crossed, slow_but

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", MOMENTS.values(), ids=MOMENTS)
def test_each_number_is_kept_as_the_nearest_value_of_its_block(values: tuple[float, ...]) -> None:
    assert list(values) == sorted(values)
    assert len(values) == 16
    draw = torch.Generator().manual_seed(1)
    exact = torch.randn(20 * BLOCK, generator=draw) * torch.logspace(-6, 3, 20).repeat_interleave(BLOCK)
    exact = exact.abs() if min(values) > 0 else exact
    tables = tables_of(values, CPU)
    codes, scales = pack(exact, tables.borders)
    assert (codes.numel(), codes.dtype, scales.numel()) == (exact.numel() // 2, torch.uint8, 20)
    shares = exact.view(20, BLOCK) / exact.view(20, BLOCK).abs().amax(1, keepdim=True)
    distance = (shares[..., None] - torch.tensor(values)).abs()
    nearest = torch.tensor(values)[distance.argmin(-1)] * scales[:, None]
    torch.testing.assert_close(unpack(codes, scales, tables.pairs).view(20, BLOCK), nearest)


def test_nothing_stays_nothing() -> None:
    """Zero moments stay zero, also before the first step, when codes and scales are zeros."""
    for values in (SIGNED, UNSIGNED):
        tables = tables_of(values, CPU)
        codes, scales = pack(torch.zeros(2 * BLOCK), tables.borders)
        assert unpack(codes, scales, tables.pairs).abs().max() < 1e-29
        empty = torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(2)
        assert not unpack(*empty, tables.pairs).any()


def of_many_shapes() -> list[torch.nn.Parameter]:
    """Return parameters that are packed in 4 bits, and small ones that stay in 32 bits.

    Packed ones include a transposed one, rows that end within a block, and more rows than are updated at
    once.
    """
    draw = torch.Generator().manual_seed(7)
    shapes = ((64, 128), (33, 384), (512, 20), (3, 32, 64, 2), (100,), ())
    made = [torch.randn(size, generator=draw) for size in shapes]
    made[1] = made[1].t()
    return [torch.nn.Parameter(one) for one in made]


@pytest.mark.whole
@pytest.mark.parametrize("at_once", slow_but([1 << 23, 3000], 1))
def test_each_step_is_torch_s_from_the_moments_as_kept(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    numbers: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    weights = of_many_shapes()
    ours = FourBitAdamW(weights, **numbers)
    exact = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    theirs = torch.optim.AdamW(exact, **numbers)
    tables = {name: tables_of(values, CPU) for name, values in MOMENTS.items()}
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        for weight, other in zip(weights, exact, strict=True):
            weight.grad = torch.randn(weight.shape, generator=draw)
            other.grad = weight.grad.clone()
        ours.step()
        theirs.step()
        for weight, other in zip(weights, exact, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
            for name in MOMENTS:
                kept = ours.state[weight][name]
                if (scales := ours.state[weight].get(f"{name}_scales")) is not None:
                    kept = unpack(kept, scales, tables[name].pairs).view(weight.shape)
                torch.testing.assert_close(
                    kept, theirs.state[other][name], rtol=0, atol=0.2 * float(kept.abs().max())
                )
                theirs.state[other][name].copy_(kept)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("precision", "at_once", "family"),
    crossed(["", "bf16_pure + ", "lora + "], [1 << 23, 5000], ["bert", "llama", "vit"], keep=2),
)
def test_a_real_step_allocates_what_its_trace_says(
    family: str, at_once: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    job, setup = small_job(family, 2), Recipe.parse(f"{precision}adamw_4bit").setup()
    hold_third_step(job, setup)


@pytest.mark.whole
@pytest.mark.slow
def test_a_plan_that_may_learn_otherwise_looks_at_it() -> None:
    job, gpu = small_job("bert", 2, batch_size=4), find_gpu("h200")
    others = f"sdpa + default + inline + bf16 + {REST}"
    assert "adamw_4bit" not in str(plan(job, gpu=gpu, keep=others, workers=1).front)
    found = plan(job, gpu=gpu, keep=f"{others} + adamw_4bit", workers=1)
    assert found.best is not None
    predicted = predict(job, found.best.recipe, gpu=gpu)
    assert "adamw_4bit" in str(found.best.recipe)
    assert predicted.timing is not None
    assert found.best.reserved_bytes == predicted.footprint.reserved_bytes
    assert found.best.step_seconds == pytest.approx(predicted.timing.step_seconds)
