"""Detection of inefficient sizes on an invented GPU, whose host takes no time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.features.lengths.length_profile import LengthProfiler, without_alignment_cost
from snugfit.features.lengths.sizes import MIN_GAIN, Size, sizes_of
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import HostLaunchCosts, calibration_file, rates_for
from snugfit.techniques.recipe import Recipe

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

OTHER = find_gpu("h100-sxm")  # has no measured cost of unaligned rows
SLOW_PRODUCTS = 1e12
"""FLOPs per second of a GPU so slow that matrix products take nearly all of the time."""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Size]]:
    """Return the found sizes by name, on a small device with a given cost of unaligned rows.

    The device has few multiprocessors, and its step never waits for the host.
    """

    def on(
        job: Job, recipe: str = "bf16", *, unaligned: float = 1.0, multiprocessors: int = 4
    ) -> dict[str, Size]:
        monkeypatch.setenv("SNUGFIT_RATES", str(tmp_path))
        calibration_file(OTHER).unlink(missing_ok=True)
        rates = rates_for(OTHER)
        host = HostLaunchCosts(**dict.fromkeys(rates.host.__dataclass_fields__, 0.0))
        products = {
            name: replace(rate, flops=SLOW_PRODUCTS, unaligned=(unaligned,) * 3, start=0.0, wave=0.0)
            for name, rate in rates.products.items()
        }
        invented = replace(rates, host=host, products=products, multiprocessors=multiprocessors)
        calibration_file(OTHER).write_text(json.dumps({"rates": invented.to_json()}))
        pace = LengthProfiler(job, Recipe.parse(recipe), OTHER)
        return {
            f"{size.what} {'up' if (size.instead or 0) > size.given else 'down'}": size
            for size in sizes_of(pace, job.sequence_length, job.padding > 0)
        }

    return on


def gpt2(**changes: Any) -> Job:
    facts = {"vocab_size": 1024, "n_positions": 512, "n_embd": 128} | changes.pop("facts", {})
    given = {"batch_size": 8, "sequence_length": 64} | changes
    return small_job("gpt2", layers=2, facts=facts, **given)


def test_even_sizes_are_not_told(found: Callable[..., dict[str, Size]]) -> None:
    sizes = found(gpt2(), unaligned=0.25)
    assert not {"vocabulary up", "sequence length up", "width down"} & set(sizes)


def test_a_vocabulary_of_odd_rows(found: Callable[..., dict[str, Size]]) -> None:
    """The gain is the difference between two predictions, and depends on the cost of odd rows."""
    job = gpt2(facts={"vocab_size": 1021})
    size = found(job, unaligned=0.25)["vocabulary up"]
    assert (size.given, size.instead, size.proposed, size.assumed) == (1021, 1024, True, True)
    even = predict(gpt2(), "bf16", gpu=OTHER)
    odd = predict(job, "bf16", gpu=OTHER)
    assert even.timing is not None
    assert odd.timing is not None
    assert size.step_seconds == pytest.approx(even.timing.step_seconds)
    assert size.gain == pytest.approx(odd.timing.step_seconds / even.timing.step_seconds - 1)
    assert size.gain > MIN_GAIN
    assert size.more_bytes == even.needed_bytes - odd.needed_bytes
    assert "vocabulary up" not in found(job, unaligned=1.0)


def test_a_length_of_odd_tokens(found: Callable[..., dict[str, Size]]) -> None:
    job = gpt2(sequence_length=61, batch_size=7)
    size = found(job, "bf16 + eager", unaligned=0.25)["sequence length up"]
    assert (size.given, size.instead, size.proposed, size.assumed) == (61, 64, True, True)


@pytest.mark.slow
def test_a_length_just_past_a_tile(found: Callable[..., dict[str, Size]]) -> None:
    """One token more needs one tile more. The report shows the shorter length and does not propose it.

    The result rests on no assumption.
    """
    job = gpt2(sequence_length=257, batch_size=1, facts={"n_embd": 256, "vocab_size": 4096})
    size = found(job)["sequence length down"]
    assert (size.given, size.instead, size.proposed, size.assumed) == (257, 256, False, False)
    assert size.gain > 0.05


def test_a_batch_just_past_a_wave(found: Callable[..., dict[str, Size]]) -> None:
    """On 16 multiprocessors the ninth sample begins a wave of its own, which the tenth does not fill."""
    job = gpt2(batch_size=9, facts={"n_embd": 256, "vocab_size": 4096})
    sizes = found(job, multiprocessors=16)
    smaller = sizes["batch down"]
    assert (smaller.given, smaller.instead, smaller.proposed, smaller.assumed) == (9, 8, False, False)
    assert smaller.gain > 0.2
    assert (smaller.more_bytes or 0) < 0
    assert "batch up" not in sizes


def test_a_batch_that_leaves_a_wave_half_empty(found: Callable[..., dict[str, Size]]) -> None:
    """On 64 multiprocessors the eighth sample takes no time: the seventh has begun its wave."""
    job = gpt2(batch_size=7, facts={"n_embd": 256, "vocab_size": 4096})
    larger = found(job, multiprocessors=64)["batch up"]
    assert (larger.given, larger.instead, larger.proposed) == (7, 8, False)
    assert larger.gain >= 8 / 7 - 1.005
    assert (larger.more_bytes or 0) >= 0


@pytest.mark.slow
def test_micro_batches_stay_what_they_are(found: Callable[..., dict[str, Size]]) -> None:
    job = gpt2(batch_size=18, facts={"n_embd": 256, "vocab_size": 4096})
    assert found(job, "bf16 + micro_batches(2)", multiprocessors=16)["batch down"].instead == 16


def test_a_width_of_the_model_is_told_and_has_no_other(found: Callable[..., dict[str, Size]]) -> None:
    job = gpt2(facts={"n_embd": 2 * 67})
    size = found(job, unaligned=0.25)["width down"]
    assert size.instead is None
    assert not size.proposed
    assert size.assumed
    assert size.given % 8
    assert "transformer" in size.where


def test_where_the_host_bounds_the_step_no_size_is_told() -> None:
    job = gpt2(facts={"vocab_size": 1021})
    pace = LengthProfiler(job, Recipe.parse("bf16"), OTHER)
    assert pace.timing(job.sequence_length, False).bound == "host"
    assert sizes_of(pace, job.sequence_length, False) == ()


def test_rates_without_the_assumption() -> None:
    rates = without_alignment_cost(rates_for(OTHER))
    assert {rate.unaligned for rate in rates.products.values()} == {(1.0, 1.0, 1.0)}
    assert replace(rates, products=rates_for(OTHER).products) == rates_for(OTHER)
