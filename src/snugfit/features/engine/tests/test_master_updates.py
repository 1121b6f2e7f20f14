"""An optimizer update with masters, as a loop calls it.

The update clips inside and is skipped for a NaN or infinite norm. Its host and device parts run separately,
and its tables follow moved weights.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.features.engine.masters import launches
from snugfit.features.engine.masters.adamw import MOMENTS, MasterAdamW
from snugfit.features.engine.masters.device_copy import DeviceCopy
from snugfit.features.engine.masters.halves import RESIDUAL, join, split_weights
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import STEPS, rehearse
from snugfit.rehearsal.trace.trace import COPY_IN
from snugfit.step.clipping import clip, gradient_norm
from snugfit.step.wishes.own_adamw import flat
from snugfit.techniques.recipe import Recipe

SHAPES = ((33, 20), (1000,), ())
HALF_A_PLACE = 2.0**-8
"""Upper bound, with a margin, of the relative change by rounding to bfloat16."""

TABLES = 20_000
"""Upper bound in bytes of the tables with the addresses of a small model's weights."""


def two_models() -> list[torch.nn.ParameterList]:
    draw = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=draw) / 10 for shape in SHAPES]
    models = [torch.nn.ParameterList([torch.nn.Parameter(one.clone()) for one in made]) for _ in range(2)]
    for model in models:
        split_weights(model)
    return models


def give_gradients(models: list[torch.nn.ParameterList], seed: int, size: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weights in zip(*models, strict=True):
        slope = size * torch.randn(weights[0].shape, generator=draw)
        for weight in weights:
            weight.grad = slope.bfloat16()


def master(optimizer: MasterAdamW, weight: torch.Tensor) -> torch.Tensor:
    return join(flat(weight), flat(optimizer.state[weight][RESIDUAL]))


def everything(optimizer: MasterAdamW) -> list[torch.Tensor]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [flat(optimizer.state[weight][name]).clone() for weight in weights for name in MOMENTS]
    return [*(master(optimizer, weight) for weight in weights), *moments]


def same(ours: MasterAdamW, theirs: MasterAdamW) -> bool:
    return all(map(torch.equal, everything(ours), everything(theirs)))


def test_the_norm_is_that_of_32_bits() -> None:
    """torch's own norm of bfloat16 gradients is rounded to 8 significant bits, an error of 0.4 % here."""
    models = two_models()[:1]
    give_gradients(models, 1)
    optimizer = MasterAdamW(models[0])
    exact = torch.cat([weight.grad.double().flatten() for weight in models[0] if weight.grad is not None])
    assert gradient_norm(optimizer, models[0]) == pytest.approx(exact.norm().item(), rel=1e-6)
    assert gradient_norm(object(), models[0]).dtype is torch.bfloat16


@pytest.mark.whole
def test_what_is_not_clipped_is_updated_bit_for_bit_as_without() -> None:
    models = two_models()
    ours, theirs = (MasterAdamW(model, lr=1e-2) for model in models)
    for seed in range(3):
        give_gradients(models, seed, 0.01)
        clip(models[0], 1e6, ours)
        ours.step()
        theirs.step()
    assert same(ours, theirs)


@pytest.mark.whole
def test_clipping_inside_is_scaling_before_but_for_a_rounding_of_each_gradient() -> None:
    """A moment differs by at most half a unit in the last place of bfloat16, and no gradient is written."""
    models = two_models()
    ours, theirs = (MasterAdamW(model, lr=1e-2) for model in models)
    give_gradients(models, 0)
    before = [weight.grad.clone() for weight in models[0] if weight.grad is not None]
    clip(models[0], 0.5, ours)
    torch.nn.utils.clip_grads_with_norm_(models[1], 0.5, gradient_norm(theirs, models[1]))
    ours.step()
    theirs.step()
    assert all(torch.equal(weight.grad, one) for weight, one in zip(models[0], before, strict=True))  # type: ignore[arg-type]
    for one, other in zip(*models, strict=True):
        for name, bound in zip(MOMENTS, (HALF_A_PLACE, 2.01 * HALF_A_PLACE), strict=True):
            torch.testing.assert_close(ours.state[one][name], theirs.state[other][name], rtol=bound, atol=0)


@pytest.mark.whole
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_leaves_everything_as_it_is(bad: float) -> None:
    """After a NaN or infinite norm, weights and moments are unchanged in the next step."""
    models = two_models()
    ours, theirs = (MasterAdamW(model, lr=1e-2) for model in models)
    for seed, refused in enumerate((False, True, False)):
        give_gradients(models, seed, 0.01)
        if not refused:
            theirs.step()
            clip(models[0], 1e6, ours)
            ours.step()
        else:
            models[0][0].grad[3] = bad  # type: ignore[index]
            clip(models[0], 1e6, ours)
            ours.step()
            for state in ours.state.values():  # a loop goes back to a checkpoint, with its counts
                state["step"] -= 1
    assert same(ours, theirs)
    assert ours.state[models[0][0]]["step"] == 2


@pytest.mark.whole
def test_what_was_to_be_clipped_is_not_clipped_twice() -> None:
    models = two_models()
    ours, theirs = (MasterAdamW(model, lr=1e-2) for model in models)
    for seed in range(2):
        give_gradients(models, seed)
        if not seed:
            clip(models[0], 0.5, ours)
            clip(models[1], 0.5, theirs)
            theirs.step()
            ours.step()
    ours.step()
    theirs.step()
    assert same(ours, theirs)


@pytest.mark.whole
def test_a_run_that_is_resumed_is_the_run(tmp_path: Path) -> None:
    """The run clips. Losses, norms and weights equal the uninterrupted run's, bit for bit."""
    from small_runs import resumed_as_whole, small_run

    resumed_as_whole(small_run(tmp_path, "bf16_master + adamw_fused", max_steps=4, save_steps=2), 3)


# ---- tables of a GPU, on shapes --------------------------------------------------------------------------


def on_shapes() -> tuple[torch.nn.ParameterList, MasterAdamW]:
    weights = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in SHAPES]
    )
    return weights, MasterAdamW(weights)


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the list to which each later copy to the device appends its shape."""
    written: list[tuple[int, ...]] = []
    write = DeviceCopy.write

    def counted(self: DeviceCopy, rows: Any) -> None:
        written.append(tuple(self.value.shape))
        write(self, rows)

    monkeypatch.setattr(DeviceCopy, "write", counted)
    return written


def test_a_step_writes_its_numbers_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory addresses are not written again. A weight whose gradients begin later has its own step
    number.
    """
    weights, optimizer = on_shapes()
    written = count_writes(monkeypatch)
    with launches.shapes():
        for step in range(4):
            for number, weight in enumerate(weights):
                weight.grad = None if number == 1 and step < 2 else torch.empty_like(weight)
            optimizer.step()
            if step == 0:
                assert written == [(2, 7), (2,), (2, 8)]
            elif step == 1:
                assert written == [(2, 8)]
            elif step == 2:  # all tables again
                assert written == [(3, 7), (3,), (3, 8)]
            else:
                assert written == [(3, 8)]
            written.clear()
    assert [optimizer.state[weight]["step"] for weight in weights] == [4, 2, 4]
    assert optimizer.generation == 2


def test_no_gradient_is_held_when_its_step_ends() -> None:
    """A block stays allocated to the end of its step; the next step's gradients start with equally many
    bytes."""
    job = replace(small_job("llama", 2, batch_size=1), clip=1.0)
    kinds = {
        recipe: dict(predict(job, f"{recipe} + adamw_fused", gpu="h200").footprint.kinds)
        for recipe in ("bf16_pure", "bf16_master")
    }
    assert kinds["bf16_master"]["gradients"] == kinds["bf16_pure"]["gradients"]
    weights, optimizer = on_shapes()
    with launches.shapes():
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
        held = [weakref.ref(weight.grad) for weight in weights]
        optimizer.zero_grad()
    assert not any(gradient() is not None for gradient in held)


def test_states_that_somebody_replaced_are_found() -> None:
    """A loaded checkpoint replaces states in the same way."""
    weights, optimizer = on_shapes()
    with launches.shapes():
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
        before = optimizer.generation
        optimizer.step()
        assert optimizer.generation == before
        optimizer.state[weights[0]] = dict(optimizer.state[weights[0]])
        optimizer.step()
        assert optimizer.generation == before + 1
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert optimizer.generation == before + 2


def test_a_trace_has_the_norm_the_update_and_a_copy_of_numbers() -> None:
    """The trace scales no gradient, and the host reads no value."""
    job = replace(small_job("llama", 2, batch_size=1), clip=1.0)
    trace = rehearse(job, Recipe.parse("bf16_master + adamw_fused").setup(), CudaPolicy())
    after = [kernel for kernel in trace.kernels if kernel.phase in ("clip", "update")]
    assert [kernel.operator for kernel in after] == [
        "triton::squares_of_gradients", "triton::norm_of_squares", COPY_IN, "triton::adamw_of_weights",
    ]  # fmt: skip
    gradients = sum(block.nbytes for block in trace.blocks if block.kind == "gradients") / STEPS
    assert 0 < after[0].nbytes - gradients < TABLES, "each gradient is read once"
    assert 0 < after[3].nbytes - 13 * gradients < TABLES
