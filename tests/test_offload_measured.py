"""Runs with activations on the host that an H200 measured are predicted again: their bytes, to the byte but
for what the installed transformers lays out anew, their seconds where the link decides, and what starting
takes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from snugfit.prediction.predict import predict
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.step_seconds import LINK
from snugfit.units import MIB
from tiers import slow_but

RUNS = Path(__file__).parents[1] / "results" / "h200-2026-11-23" / "activation-offload"
LINK_BOUND = ("bert-all", "bert-all-batch-32", "gpt2-all-micro-batches", "qwen-lora-all")
OTHERS = ("bert-none", "llama-checkpoints", "llama-none", "qwen-checkpoints-accelerate")
RESERVED_ANEW = {"qwen-lora-all": 12 * MIB, "qwen-checkpoints-accelerate": 6 * MIB}
"""Bytes more that are reserved under a transformers later than the measured one, with which the first is
predicted to the byte."""


@cache
def pair(name: str) -> tuple[Prediction, Measurement]:
    """A run predicted, and as measured."""
    measured = Measurement.from_json(json.loads((RUNS / name / "measurement.json").read_text()))
    return predict(measured.job, measured.recipe, gpu="h200", loop=measured.loop), measured


@pytest.mark.parametrize("name", slow_but([*LINK_BOUND, *OTHERS], keep=2))
def test_bytes_are_predicted_again(name: str) -> None:
    predicted, measured = (one.footprint for one in pair(name))
    assert predicted is not None
    assert measured is not None
    assert predicted.requested_bytes == measured.requested_bytes
    assert predicted.allocated_bytes == measured.allocated_bytes
    assert predicted.reserved_bytes is not None
    assert measured.reserved_bytes is not None
    assert 0 <= predicted.reserved_bytes - measured.reserved_bytes <= RESERVED_ANEW.get(name, 0)
    assert predicted.context_bytes == measured.context_bytes
    assert predicted.host_bytes == pytest.approx(measured.host_bytes, rel=0.1)


@pytest.mark.parametrize("name", slow_but(LINK_BOUND, keep=2))
def test_seconds_that_the_link_decides_are_predicted_again(name: str) -> None:
    predicted, measured = pair(name)
    assert predicted.timing is not None
    assert measured.timing is not None
    assert predicted.timing.bound == LINK
    assert predicted.timing.step_seconds == pytest.approx(measured.timing.step_seconds, rel=0.05)
    assert predicted.startup is not None
    assert measured.startup is not None
    assert predicted.startup.first_step_seconds == pytest.approx(measured.startup.first_step_seconds, rel=0.5)
