"""Masters of 24 bits, `adamw_compact(master_bits=24)`: a bfloat16 weight and 8 further bits.

Stochastic rounding loses nothing on average. Checkpoints, resumed runs and exports preserve both parts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_runs import bert_job, small_run
from snugfit.errors import RecipeError, UsageError
from snugfit.features.engine.masters import compact, halves
from snugfit.features.engine.masters.compact_adamw import CompactAdamW, CompactTable
from snugfit.features.engine.masters.halves import (
    RESIDUAL,
    UNIT,
    in_bits_of,
    join,
    lower_bits,
    split_by_chance,
)
from snugfit.training.run.train import train

IN_24_BITS = "bf16_master + adamw_compact(master_bits=24)"
IN_32_BITS = "bf16_master + adamw_compact"
CPU = torch.device("cpu")
STEPS = 200


def with_24_bits() -> torch.Tensor:
    """Return numbers of all exponents, signs and second halves, infinite ones included."""
    every = torch.arange(-(2**31), 2**31, 16_411 * UNIT // 8, dtype=torch.int64)
    numbers = ((every >> 8) << 8).to(torch.int32).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.0, 2.0**-126])
    return torch.cat([numbers[~numbers.isnan()], edges])


def cut(exact: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.empty_like(exact, dtype=torch.bfloat16), torch.empty_like(exact, dtype=torch.int8)
    split_by_chance(exact.clone(), high, low, draws)
    return high, low


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.int32)


# ---- two halves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [0, 100, 255])
def test_what_has_24_bits_is_its_two_halves(draw: int) -> None:
    """A number of 24 bits is split into the same halves for any random draw. The first half equals that of a
    32-bit master.
    """
    numbers = with_24_bits()
    high, low = cut(numbers, torch.full(numbers.shape, draw, dtype=torch.int32))
    assert torch.equal(bits_of(join(high, low)), bits_of(numbers))
    assert torch.equal(high.view(torch.int16), halves.halves_of(numbers)[0].view(torch.int16))


def test_what_is_no_number_stays_none() -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -(1 << 22)], dtype=torch.int32)
    high, low = cut(bits.view(torch.float32), torch.full((5,), 255, dtype=torch.int32))
    assert high.isnan().all()
    assert join(high, low).isnan().all()


def test_a_number_is_rounded_to_its_neighbours_and_right_on_average() -> None:
    """The test covers every random draw. A carry may reach the bfloat16 and the next exponent."""
    for bits in (0x3F7F7FFF, 0x3F7FFFFF, 0x3F800001, 0x3F80807F, 0x00000003, -0x40800001):
        exact = torch.full((UNIT,), bits, dtype=torch.int32).view(torch.float32)
        back = bits_of(join(*cut(exact, torch.arange(UNIT, dtype=torch.int32))))
        below = bits >> 8 << 8
        assert set(back.tolist()) <= {below, below + UNIT}
        assert float(back.double().mean()) == bits


def test_draws_are_even_and_those_of_no_moment() -> None:
    one, next_one = (compact.draws(0, 200_000, step, CPU) for step in (1, 2))
    for draws in (one, next_one):
        counts = torch.bincount(draws, minlength=UNIT)
        assert len(counts) == UNIT
        assert float((counts / (200_000 / UNIT) - 1).abs().max()) < 0.16
    chances = compact.chances(0, 200_000, 1, CPU)
    for other in (chances.first, chances.second, next_one.float(), one.roll(1).float()):
        assert abs(float(torch.corrcoef(torch.stack([one.float(), other]))[0, 1])) < 0.01
    assert torch.equal(compact.draws(300, 50, 1, CPU), one[300:350])


def test_a_second_half_becomes_shorter_and_longer() -> None:
    """A conversion of the low half to 8 bits rounds to the nearest value that keeps the bfloat16. The
    conversion back is exact.
    """
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    short = in_bits_of(every, torch.int8)
    apart = (short.int() * UNIT - every.int()).abs()
    assert int(apart[every <= 127 * UNIT + 128].max()) == 128
    assert (short[every > 127 * UNIT] == 127).all()
    assert torch.equal(every, torch.arange(-(1 << 15), 1 << 15).to(torch.int16)), "the argument is unchanged"
    long = in_bits_of(short, torch.int16)
    assert torch.equal(in_bits_of(long, torch.int8), short)
    assert [lower_bits(one) for one in (None, short, long)] == [0, 8, 16]


# ---- an update -------------------------------------------------------------------------------------------


def moved(master_bits: int) -> torch.Tensor:
    """Return the change of weights under updates of about 0.4 units of a 24-bit master."""
    start = torch.rand(4096, generator=torch.Generator().manual_seed(5)) / 64 + 1 / 64
    weights = torch.nn.ParameterList([torch.nn.Parameter(start.clone())])
    halves.split_weights(weights)
    optimizer = CompactAdamW(weights, lr=2e-7, weight_decay=0.0, master_bits=master_bits)  # type: ignore[arg-type]
    first = master_of(optimizer, weights[0])
    for _ in range(STEPS):
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
    return first - master_of(optimizer, weights[0])


def master_of(optimizer: CompactAdamW, weight: torch.Tensor) -> torch.Tensor:
    return join(weight.data, optimizer.state[weight][RESIDUAL])


@pytest.mark.whole
def test_small_updates_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stochastic rounding, weights move as far as 32-bit masters, within the sum of random errors.

    With rounding to the nearest, they do not move.
    """
    exact, by_chance = moved(32), moved(24)
    assert float(exact.mean()) == pytest.approx(STEPS * 2e-7, rel=1e-2)
    assert float(by_chance.mean()) == pytest.approx(float(exact.mean()), rel=5e-3)
    assert float((by_chance - exact).norm() / exact.norm()) < 0.1
    monkeypatch.setattr(compact, "draws", lambda begin, count, step, device: UNIT // 2)
    assert not moved(24).any()


@pytest.mark.whole
def test_weights_that_were_split_before_get_shorter_halves() -> None:
    """The bfloat16 stays unchanged, and the residual of the full master is cut to 8 bits.

    A weight that was bfloat16 from the start has a residual of zero.
    """
    layer = torch.nn.Linear(33, 20, bias=False)
    exact = layer.weight.detach().clone()
    halves.split_weights(layer)
    high = layer.weight.detach().clone()
    own = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = CompactAdamW([layer.weight, own], master_bits=24)
    assert not hasattr(layer.weight, RESIDUAL)
    assert torch.equal(layer.weight.detach(), high)
    assert optimizer.state[layer.weight][RESIDUAL].dtype is torch.int8
    assert int((bits_of(master_of(optimizer, layer.weight)) - bits_of(exact)).abs().max()) < UNIT
    own.grad = torch.zeros_like(own)
    optimizer.step()
    assert optimizer.state[own][RESIDUAL].dtype is torch.int8


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(("before", "after"), [(24, 24), (24, 32), (32, 24)])
def test_states_that_are_loaded_get_the_optimizer_s_bits(before: int, after: int) -> None:
    weight = torch.nn.Parameter(torch.full((100,), 0.3, dtype=torch.bfloat16))
    first, then = (
        CompactAdamW([weight], lr=1e-4, master_bits=bits)  # type: ignore[arg-type]
        for bits in (before, after)
    )
    weight.grad = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    first.step()
    master = master_of(first, weight)
    then.load_state_dict(first.state_dict())
    assert then.state[weight][RESIDUAL].dtype is (torch.int8 if after == 24 else torch.int16)
    apart = (bits_of(master_of(then, weight)) - bits_of(master)).abs()
    assert int(apart.max()) < (UNIT if after < before else 1)


@pytest.mark.whole
def test_states_of_two_widths_are_not_updated_together() -> None:
    weights = [torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2)]
    states = [CompactAdamW([one], master_bits=bits) for one, bits in zip(weights, (32, 24), strict=True)]  # type: ignore[arg-type]
    for weight, optimizer in zip(weights, states, strict=True):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    kept = [optimizer.state[weight] for weight, optimizer in zip(weights, states, strict=True)]
    with pytest.raises(RecipeError, match="have 8 bits and of others 16"):
        CompactTable(weights, kept)


@pytest.mark.whole
def test_a_checkpoint_has_the_masters_and_is_resumed_with_its_bits_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from snugfit.training.checkpoint.weights import weights_of

    begun = train(small_run(tmp_path / "run", IN_24_BITS, job=bert_job(), max_steps=3, save_steps=3))
    folder = tmp_path / "run" / "checkpoint-3"
    kept = dict(AutoModelForSequenceClassification.from_pretrained(folder).named_parameters())
    some_differ = False
    for name, weight in begun.model.named_parameters():
        high, low = halves.halves_of(kept[name].data)
        assert kept[name].dtype is torch.float32
        assert torch.equal(high, weight.data)
        assert not (low % UNIT).any(), "24 bits"
        some_differ |= bool(low.any())
    assert some_differ, "the masters are more than the weights"
    run = small_run(tmp_path / "run", IN_32_BITS, job=bert_job(), max_steps=3, save_steps=3)
    with pytest.raises(UsageError, match=r"adamw_compact\(master_bits=24\)"):
        train(run)
    optimizer = CompactAdamW(begun.model.parameters(), master_bits=24)
    for weight in begun.model.parameters():
        optimizer.state[weight][RESIDUAL] = torch.zeros_like(weight, dtype=torch.int8)
    written = weights_of(begun.model, optimizer)
    in_file = sum(value.numel() * 4 for value in dict(begun.model.named_parameters()).values())
    held = sum(value.nbytes for value in dict(begun.model.named_parameters()).values())
    assert held + written.widened_bytes == in_file
    again = replace(small_run(tmp_path / "more", IN_24_BITS, job=bert_job(), max_steps=1), weights=folder)
    assert train(again).outcome == "finished"
