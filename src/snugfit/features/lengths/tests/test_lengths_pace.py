"""Interpolation of a step's kernels at all sequence lengths from a few, compared kernel by kernel with
simulations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from small_models import small_job
from snugfit.features.lengths import length_profile as pacing
from snugfit.features.lengths.kernel_interpolation import KernelInterpolator, LengthSample, NotInterpolable
from snugfit.features.lengths.length_profile import SIMULATED_PADDING, TOLERANCE, LengthProfiler
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS, Trace
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

H200 = find_gpu("h200")


def pace(job: Job, recipe: str = "bf16", gpu: str = "h200") -> LengthProfiler:
    return LengthProfiler(job, Recipe.parse(recipe), find_gpu(gpu))


@pytest.mark.parametrize(
    ("family", "recipe", "gpu"),
    [
        ("bert", "bf16 + micro_batches(3)", "h200"),
        pytest.param("gpt2", "bf16_pure + every_layer", "a100-80gb", marks=pytest.mark.slow),
        pytest.param("llama", "fp16", "v100-16gb", marks=pytest.mark.slow),
        pytest.param("gemma2", "bf16 + eager", "h200", marks=pytest.mark.slow),
        pytest.param("mixtral", "bf16", "h200", marks=pytest.mark.slow),
        pytest.param("t5", "bf16", "h200", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_a_length_follow_from_those_of_three(family: str, recipe: str, gpu: str) -> None:
    """Every matrix product matches exactly, and the step's seconds match within `TOLERANCE`."""
    # A stack of layers that are recomputed has at least two.
    layers = 2 if "every_layer" in recipe else 1
    known = pace(small_job(family, layers, batch_size=3), recipe, gpu)
    stretched = KernelInterpolator([known.sample(length, True) for length in (3, 14, 31)])
    for length in (9, 26):
        real = known.sample(length, True)
        for kernel, ours in zip(real.kernels, stretched.at(length).kernels, strict=True):
            assert ours.operator == kernel.operator
            if kernel.operator in MATRIX_PRODUCTS:
                assert ours == kernel._replace(module="")
        found = known.seconds_of(stretched.at(length)).step
        assert found == pytest.approx(known.timing(length, True).step_seconds, rel=TOLERANCE)


def test_lengths_that_run_other_kernels_do_not_stretch() -> None:
    """On a GPU that uses masks in attention, a mask with rows of no multiple of eight is copied."""
    known = pace(small_job("bert", layers=1), "fp16", "v100-16gb")
    with pytest.raises(NotInterpolable):
        KernelInterpolator([known.sample(length, True) for length in (9, 16, 31)])


@pytest.mark.parametrize(("recipe", "gpu"), slow_but([("bf16 + workers", "h200"), ("fp16", "v100-16gb")], 1))
def test_seconds_of_every_length_are_those_of_its_rehearsal(recipe: str, gpu: str) -> None:
    known = pace(small_job("gpt2", layers=1), recipe, gpu)
    found = known.seconds(range(1, 33), True)
    rehearsed = known.rehearsal_count
    assert rehearsed <= 9
    assert known.off <= TOLERANCE
    assert not known.lines
    for length in (1, 8, 19, 32):
        real = predict(replace(known.job, sequence_length=length, padding=0.5), recipe, gpu=gpu).timing
        assert real is not None
        assert found[length].step == pytest.approx(real.step_seconds, rel=TOLERANCE)


def test_few_lengths_are_each_rehearsed() -> None:
    known = pace(small_job("gpt2", layers=1))
    found = known.seconds([5, 9, 30], False)
    assert known.rehearsal_count == 3
    assert {length: each.step for length, each in found.items()} == {
        length: known.timing(length, False).step_seconds for length in (5, 9, 30)
    }


@pytest.mark.slow
def test_where_nothing_stretches_seconds_lie_on_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without interpolation of kernels, seconds are on lines between simulated lengths, within 2 % on this
    model."""

    class Never(KernelInterpolator):
        def __init__(self, seen: object) -> None:
            raise NotInterpolable

    known = pace(small_job("gpt2", layers=1))
    exact = known.seconds(range(1, 33), True)
    monkeypatch.setattr(pacing, "KernelInterpolator", Never)
    found = known.seconds(range(1, 33), True)
    assert known.lines
    for length, seconds in found.items():
        assert seconds.step == pytest.approx(exact[length].step, rel=0.02)


def test_seconds_between_many_lengths_lie_on_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    known = pace(small_job("gpt2", layers=1))
    exact = known.seconds(range(1, 33), True)
    monkeypatch.setattr(pacing, "TIMED_PER_CLASS", 4)
    for length, seconds in known.seconds(range(1, 33), True).items():
        assert seconds.step == pytest.approx(exact[length].step, rel=0.01)


@pytest.mark.parametrize(("length", "padded"), slow_but([(12, True), (32, False)], 1))
def test_bytes_are_those_of_the_prediction(length: int, padded: bool) -> None:
    job = small_job("llama", layers=1, batch_size=6)
    known = pace(job, "bf16 + micro_batches(3) + expandable")
    asked = replace(job, sequence_length=length, padding=SIMULATED_PADDING if padded else 0.0)
    real = predict(asked, known.recipe, gpu=H200)
    assert known.bytes(length, padded).needed_bytes == real.needed_bytes
    assert known.bytes(length, padded).reserved_bytes == real.footprint.reserved_bytes
    assert known.bytes(length, padded).requested_bytes == real.footprint.requested_bytes


@pytest.mark.parametrize("share", [0.05, 0.95])
def test_how_much_is_padding_changes_no_byte_and_no_second(share: float) -> None:
    """One simulation therefore covers every batch of a length with at least one padded sample."""
    job = small_job("bert", layers=1, sequence_length=20)
    known = pace(job)
    real = predict(replace(job, padding=share), "bf16", gpu=H200)
    assert real.needed_bytes == known.bytes(20, True).needed_bytes
    assert real.timing is not None
    assert real.timing.step_seconds == known.timing(20, True).step_seconds


def test_a_step_of_two_lengths_takes_their_mean() -> None:
    """Play two micro-batches of different lengths as one step.

    The time is exactly the mean if the device sets the pace, and within 1 % of it if the host does.
    """
    known = pace(small_job("gpt2", layers=1, batch_size=8), "bf16 + micro_batches(2)")
    mixed = Trace((), (), (), (*_piece(known, 8, 0), *_piece(known, 31, 1)), known.sample(31, True).waits, ())
    mean = (known.timing(8, True).step_seconds + known.timing(31, True).step_seconds) / 2
    assert step_seconds(mixed, H200, batch_size=8).step_seconds == pytest.approx(mean, rel=0.01)
    slow = replace(known.rates, bandwidth=known.rates.bandwidth / 1e4, patterns={})
    known.rates = slow
    mean = (known.timing(8, True).step_seconds + known.timing(31, True).step_seconds) / 2
    played = step_seconds(mixed, H200, batch_size=8, rates=slow).step_seconds
    assert played == pytest.approx(mean, rel=1e-3)


def _piece(known: LengthProfiler, length: int, number: int) -> tuple[object, ...]:
    """Return the kernels of one micro-batch of a step of two; the update belongs to the second."""
    sight: LengthSample = known.sample(length, True)
    phases = [kernel.phase for kernel in sight.kernels]
    begins = phases.index("backward")
    second = next(place for place in range(begins, len(phases)) if phases[place] in ("load", "forward"))
    return sight.kernels[:second] if number == 0 else sight.kernels[second:]
