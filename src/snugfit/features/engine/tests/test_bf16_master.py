"""bfloat16 weights with fp32 masters in two halves. The halves equal the number, and AdamW equals torch's
in 32 bits bit for bit. The kernel equals its reference. Predictions, checkpoints and errors match the
masters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aligned import compare, peak
from bare_process import script_in_triton
from cpu_scratch import compared
from kept import kept
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import RecipeError, UsageError
from snugfit.features.engine.masters import adamw, halves
from snugfit.features.engine.masters.adamw import MasterAdamW
from snugfit.features.engine.masters.halves import RESIDUAL, join, split, split_weights
from snugfit.job.gpu import find_gpu
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.applier import refuse_unsupported
from snugfit.step.batches import micro_batches, place
from snugfit.step.build import build_model
from snugfit.step.loss import loss_of
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.step.wishes.own_adamw import flat
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import crossed, slow_but

RECIPE = "bf16_master + adamw_fused"
NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}

EDGES = (
    0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001, 0x7F8000, 0x7FFFFF, 0x800000, 0x807FFF,
    0x3F7F7FFF, 0x3F7F8000, 0x3F7FFFFF, 0x3F800000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000,
    0x7F7FFFFF, 0x7F800000,
)  # fmt: skip
"""Bits of zero, of subnormal numbers and their borders, and of ties to both sides. Also carries into the
exponent, the largest numbers and infinity."""

NOT_NUMBERS = (0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FBFFFFF)


def of_bits(*bits: int) -> torch.Tensor:
    signed = [value - (1 << 32) if value >> 31 else value for value in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def both_signs(bits: tuple[int, ...]) -> torch.Tensor:
    return of_bits(*bits, *(value | 1 << 31 for value in bits))


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.int32)


def halved(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.empty_like(exact, dtype=torch.bfloat16), torch.empty_like(exact, dtype=torch.int16)
    split(exact.clone(), high, low)
    return high, low


def test_two_halves_are_the_number() -> None:
    """The test covers all exponents, signs and bit patterns of the lower half, and the limits."""
    every = torch.arange(-(2**31), 2**31, 16_411, dtype=torch.int64).to(torch.int32).view(torch.float32)
    numbers = torch.cat([every[~every.isnan()], both_signs(EDGES)])
    assert torch.equal(bits_of(join(*halved(numbers))), bits_of(numbers))


def test_the_first_half_is_the_nearest_bfloat16() -> None:
    """The rounding is torch's, except that ties round away from zero."""
    torch.manual_seed(0)
    numbers = torch.cat([torch.randn(100_000), both_signs(EDGES)])
    high, _ = halved(numbers)
    is_tie = bits_of(numbers) & 0xFFFF == 0x8000
    assert torch.equal(high[~is_tie].view(torch.int16), numbers[~is_tie].bfloat16().view(torch.int16))
    ties = numbers[is_tie]
    assert len(ties) > 10
    assert (high[is_tie].float().abs() > ties.abs()).all()


def test_what_is_no_number_stays_none_in_both() -> None:
    numbers = both_signs(NOT_NUMBERS)
    high, low = halved(numbers)
    assert high.isnan().all()
    assert join(high, low).isnan().all()


def of_many_shapes() -> torch.nn.ParameterList:
    """Return weights that are transposed, channels last, of one number, or empty."""
    draw = torch.Generator().manual_seed(7)
    made = [0.1 * torch.randn(size, generator=draw) for size in ((33, 20), (1000,), (3, 4, 5, 6), (), (0, 3))]
    made[0], made[2] = made[0].t(), made[2].to(memory_format=torch.channels_last)
    return torch.nn.ParameterList([torch.nn.Parameter(one) for one in made])


def masters(optimizer: MasterAdamW, weight: torch.Tensor) -> torch.Tensor:
    return join(flat(weight), flat(optimizer.state[weight][RESIDUAL]))


@pytest.mark.whole
@pytest.mark.parametrize("at_once", [1 << 20, 100, 7])
@pytest.mark.parametrize("foreach", [True, False])
def test_masters_and_moments_are_torch_s_in_32_bits(
    foreach: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments are equal bit for bit over many steps, from the same gradients."""
    monkeypatch.setattr(halves, "AT_ONCE", at_once)
    weights, exact = of_many_shapes(), of_many_shapes()
    split_weights(weights)
    ours = MasterAdamW(weights, **NUMBERS)
    theirs = torch.optim.AdamW(exact, foreach=foreach, **NUMBERS)
    draw = torch.Generator().manual_seed(1)
    for step in range(10):
        for weight, wide in zip(weights, exact, strict=True):
            slope = torch.randn(weight.shape, generator=draw).bfloat16()
            late = step == 0 and weight.shape == (1000,)  # it counts its steps separately
            weight.grad = None if late else torch.empty_like(weight).copy_(slope)
            wide.grad = None if late else torch.empty_like(wide).copy_(slope)
        ours.step()
        theirs.step()
    for weight, wide in zip(weights, exact, strict=True):
        if not weight.numel():
            continue
        assert weight.dtype is torch.bfloat16
        assert torch.equal(masters(ours, weight), flat(wide))
        for name in adamw.MOMENTS:
            assert torch.equal(ours.state[weight][name], theirs.state[wide][name])


@pytest.mark.whole
def test_small_updates_are_not_lost() -> None:
    """Each update is a hundredth of the distance between neighbouring bfloat16 numbers at 1."""
    weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(10))])
    split_weights(weights)
    optimizer = MasterAdamW(weights, lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
    assert masters(optimizer, weights[0]) == pytest.approx(torch.full((10,), 0.98), abs=1e-4)
    assert (weights[0] == torch.tensor(0.98).bfloat16()).all()


@pytest.mark.whole
def test_weights_that_were_bfloat16_from_the_start_get_masters_too() -> None:
    weight = torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(10))
    ours, theirs = MasterAdamW([weight], **NUMBERS), torch.optim.AdamW([wide], **NUMBERS)
    for _ in range(3):
        weight.grad, wide.grad = torch.ones_like(weight), torch.ones_like(wide)
        ours.step()
        theirs.step()
    assert torch.equal(masters(ours, weight), wide)


@pytest.mark.whole
def test_states_keep_their_dtypes_when_they_are_loaded() -> None:
    """torch's own `load_state_dict`, which accelerate calls, would cast all to bfloat16."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = []
    for layer in layers:
        split_weights(layer)
        optimizers.append(MasterAdamW(layer.parameters(), **NUMBERS))
    for step in range(4):
        if step == 2:
            optimizers[1].load_state_dict(optimizers[1].state_dict())
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for weight in layer.parameters():
                weight.grad = torch.full_like(weight, 0.1 * step)
            optimizer.step()
    assert torch.equal(*(masters(o, layer.weight) for o, layer in zip(optimizers, layers, strict=True)))


def test_what_it_cannot_update_is_said() -> None:
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RecipeError, match=r"one is torch\.float64.*'bf16'"):
        MasterAdamW([weight]).step()
    gaps = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16)[:, :4])
    gaps.grad = torch.ones_like(gaps)
    with pytest.raises(RecipeError, match="without gaps in memory"):
        MasterAdamW([gaps]).step()
    table = torch.nn.Embedding(4, 4, sparse=True, dtype=torch.bfloat16)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RecipeError, match="sparse"):
        MasterAdamW(table.parameters()).step()
    with pytest.raises(ValueError, match="closure"):
        MasterAdamW([weight]).step(lambda: None)


# ---- a whole step ----------------------------------------------------------------------------------------


class Quiet(Observer):
    """An observer that ignores all events."""


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe", "job_clip"),
    crossed(["bert", "llama"], [("adamw", None), ("adamw_fused + micro_batches(2)", 0.05)]),
)
def test_a_run_is_that_of_masters_in_32_bits(family: str, recipe: str, job_clip: float | None) -> None:
    """The reference is a hand-written loop with a copy of the weights in fp32. Passes run in bfloat16, AdamW
    updates the copy, and its nearest bfloat16 is written back. Losses and masters are equal, bit for bit."""
    job = replace(small_job(family, 2, batch_size=4), clip=job_clip, learning_rate=1e-2)
    setup = Recipe.parse(f"bf16_master + {recipe}").setup()
    torch.manual_seed(5)
    step = open_step(job, setup, "plain", torch.device("cpu"), keep_losses=True)
    ours = step.run(4, Quiet())

    torch.manual_seed(5)
    wide = build_model(job, Recipe.parse("plain").setup(), torch.device("cpu"))
    working = build_model(job, Recipe.parse("bf16_pure").setup(), torch.device("cpu"))
    torch.manual_seed(5)
    working.load_state_dict(wide.state_dict())
    for weight, exact in zip(working.parameters(), wide.parameters(), strict=True):
        weight.data, _ = halves.halves_of(exact.data)
    optimizer = torch.optim.AdamW(wide.parameters(), lr=job.learning_rate, foreach=True)
    torch.manual_seed(5)
    build_model(job, Recipe.parse("plain").setup(), torch.device("cpu"))  # draws as many numbers
    losses = []
    for index, pieces in enumerate(micro_batches(job, setup, torch.device("cpu"), setup.micro_batches)):
        if index == 4:
            break
        total = 0.0
        for piece in pieces:
            loss = loss_of(working(**place(piece, torch.device("cpu"))))
            share = loss if len(pieces) == 1 else loss * (1 / len(pieces))
            total += float(share.detach().float())
            share.backward()
        for weight, exact in zip(working.parameters(), wide.parameters(), strict=True):
            exact.grad = None if weight.grad is None else weight.grad.float()
        if job_clip:  # in 32 bits, without a second rounding
            grads = [weight.grad for weight in working.parameters() if weight.grad is not None]
            norm = torch.stack([grad.float().norm() for grad in grads]).norm()
            torch.nn.utils.clip_grads_with_norm_(wide.parameters(), job_clip, norm)
        optimizer.step()
        for weight, exact in zip(working.parameters(), wide.parameters(), strict=True):
            weight.data.copy_(halves.halves_of(exact.data)[0])
            weight.grad = None
        losses.append(total)
    assert step.model is not None
    assert ours == pytest.approx(losses, rel=1e-6)
    for weight, exact in zip(step.model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(masters(step.optimizer, weight), flat(exact))  # type: ignore[arg-type]


@pytest.mark.whole
@pytest.mark.parametrize(("at_once", "family"), crossed([5000, 1 << 20], ["llama", "bert", "vit"], keep=1))
def test_a_real_step_allocates_what_its_trace_says(
    family: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "AT_ONCE", at_once)
    job, setup = replace(small_job(family, 2), clip=1.0), Recipe.parse(RECIPE).setup()
    hold_third_step(job, setup)


def test_an_element_takes_fourteen_bytes_and_the_update_moves_twenty_six() -> None:
    job = small_job("llama", 2, batch_size=1)
    predicted = {name: predict(job, name, gpu="h200") for name in ("bf16 + adamw_fused", RECIPE, "bf16_pure")}
    kinds = {name: dict(one.footprint.kinds) for name, one in predicted.items()}
    assert kinds[RECIPE]["weights"] == kinds["bf16_pure"]["weights"]
    elements = kinds[RECIPE]["weights"] / 2
    assert kinds[RECIPE]["optimizer states"] == pytest.approx(10 * elements, abs=12_000), "and tables"
    assert "caches" not in kinds[RECIPE], "no autocast, and no copies"
    trace = rehearse(job, Recipe.parse(RECIPE).setup(), CudaPolicy())
    updates = [kernel for kernel in trace.kernels if kernel.operator == "triton::adamw_of_weights"]
    assert len(updates) == 1
    assert updates[0].nbytes == pytest.approx(26 * elements, rel=0.01)


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernel_does_what_the_reference_does(device: str, tmp_path: Path) -> None:
    """The test runs in Triton's interpreter, and on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SNUGFIT_TEST_GPU=1")
    told = script_in_triton(Path(__file__).with_name("masters_in_triton.py"), device, tmp_path / "told")
    assert "as the reference" in told


# ---- kept, refused ---------------------------------------------------------------------------------------


@pytest.mark.whole
def test_a_checkpoint_has_the_masters(tmp_path: Path) -> None:
    """Libraries load the masters in 32 bits. Rounded to bfloat16 they equal the model's weights."""
    from transformers import AutoModelForSequenceClassification

    from small_runs import bert_job, small_run
    from snugfit.training.run.train import train

    begun = train(small_run(tmp_path / "run", RECIPE, job=bert_job(), max_steps=3, save_steps=3))
    folder = tmp_path / "run" / "checkpoint-3"
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert loaded.dtype is torch.float32
    again = train(replace(small_run(tmp_path / "more", RECIPE, job=bert_job(), max_steps=1), weights=folder))
    assert again.outcome == "finished"
    kept = dict(loaded.named_parameters())
    some_differ = False
    for name, weight in begun.model.named_parameters():
        assert torch.equal(halves.halves_of(kept[name].data)[0], weight.data)
        some_differ |= not torch.equal(kept[name], weight.float())
    assert some_differ, "the masters hold more bits than the weights"


def test_weights_in_32_bits_are_loaded_into_both_halves() -> None:
    """This includes ties, which torch's cast would round to the even neighbour."""
    layer = torch.nn.Linear(4, 4, bias=False)
    split_weights(layer)
    exact = both_signs((0x3F808000, 0x3F818000, 0x3F800001, 0x8000, 0x7F7F8000, 1, 2, 3)).view(4, 4)
    layer.load_state_dict({"weight": exact})
    assert torch.equal(join(layer.weight.data, getattr(layer.weight, RESIDUAL)), exact)
    assert torch.equal(layer.weight.data, halves.halves_of(exact)[0])


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("bf16_master + sgd", r"sgd does not update master weights.*'adamw_fused'"),
        ("bf16_master + adamw_8bit", r"adamw_8bit does not update master weights"),
        ("bf16_master + adamw_stochastic", r"adamw_stochastic does not update master weights"),
        ("bf16_master + ddp", "not supported in several processes"),
        ("bf16_master + zero2", "not supported in several processes"),
    ],
)
def test_what_it_does_not_go_with_is_named(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job("bert", 2), installed=False)


@pytest.mark.parametrize("front_end", ["fit", "custom_loop", "script"])
def test_front_ends_that_cannot_do_it_say_so(front_end: str) -> None:
    with pytest.raises(UsageError, match="masters"):
        refuse_unsupported(front_end, Recipe.parse(RECIPE).setup())


def test_nothing_is_said_of_lost_updates_and_how_much_was_measured_is() -> None:
    warnings = Recipe.parse(RECIPE).check(small_job("bert", 2))
    assert not any("lost in rounding" in warning for warning in warnings)
    assert any("on H200s" in warning for warning in warnings)
    assert any("micro-batches" in warning for warning in warnings)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_that_keeps_it_gives_what_a_prediction_gives(dtype: str) -> None:
    job, gpu = replace(small_job("bert", 2, batch_size=4), dtype=dtype), find_gpu("h200")
    found = plan(job, gpu=gpu, keep=kept("bf16_master", but="attention optimizer"), workers=1)
    assert found.best is not None
    assert "bf16_master" in str(found.best.recipe)
    predicted = predict(job, found.best.recipe, gpu=gpu)
    assert predicted.timing is not None
    assert found.best.reserved_bytes == predicted.footprint.reserved_bytes
    assert found.best.step_seconds == pytest.approx(predicted.timing.step_seconds)


@pytest.mark.whole
@pytest.mark.parametrize("loop", slow_but(["accelerate", "trainer"], 1))
def test_other_loops_train_with_it_as_rehearsed(loop: str) -> None:
    """accelerate also loads the optimizer's own states into the optimizer again."""
    job, setup = small_job("bert", 2, batch_size=4), Recipe.parse(RECIPE).setup()
    torch.manual_seed(5)
    step = open_step(job, setup, loop, torch.device("cpu"), keep_losses=True)
    assert len(step.run(3, Quiet())) == 3
    assert step.model is not None
    assert step.optimizer is not None
    for weight in step.model.parameters():
        dtypes = [value.dtype for value in step.optimizer.state[weight].values() if torch.is_tensor(value)]
        assert {weight.dtype, *dtypes} == {torch.bfloat16, torch.int16, torch.float32}
    trace = compared(foreseen(rehearse(job, setup, CpuPolicy(), loop=loop)))
    real = compared(reports(job, setup, loop=loop))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert compare(*third).similarity == 1.0
    assert peak(real) == peak(trace)
