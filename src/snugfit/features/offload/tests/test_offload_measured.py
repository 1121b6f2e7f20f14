"""Runs with offloaded activations that an H200 measured are predicted again.

Bytes match exactly, except where the installed transformers has another layout. Seconds match where the link
bounds the step, and start-up memory matches too.
"""

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

RUNS = Path(__file__).parents[5] / "results" / "h200-2026-11-23" / "activation-offload"
LINK_BOUND = ("bert-all", "bert-all-batch-32", "gpt2-all-micro-batches", "qwen-lora-all")
OTHERS = (
    "bert-none", "llama-checkpoints", "llama-none", "qwen-checkpoints-accelerate",
    "qwen-checkpoints-accelerate-again", "qwen-chunked-accelerate", "bert-every-2nd-trainer",
)  # fmt: skip
RESERVED_ANEW = {
    "qwen-lora-all": 12 * MIB,
    "qwen-checkpoints-accelerate": 6 * MIB,
    "qwen-checkpoints-accelerate-again": 6 * MIB,
    "qwen-chunked-accelerate": -54 * MIB,
}
"""Additional reserved bytes under later versions of transformers than the measured one, under which the first
run is exact.

In the three of Qwen3 in chunks, autograd's thread once delayed the release of some chunks' gradients, and no
longer does. Recorded histories contain the times of these releases. Replayed with them, the last two match to
the byte under their own transformers. Without them they are 3.4 % too low and 1.4 % too high.
"""
FIRST_CONTEXT = 551_092_224
"""GPU memory of an idle CUDA context, in bytes by NVML, in the process that measured the constants. Elsewhere
it is up to 3.25 MiB larger.
"""


@cache
def pair(name: str) -> tuple[Prediction, Measurement]:
    """Return the prediction and the measurement of a run."""
    measured = Measurement.from_json(json.loads((RUNS / name / "measurement.json").read_text()))
    return predict(measured.job, measured.recipe, gpu="h200", loop=measured.loop), measured


@pytest.mark.parametrize("name", slow_but([*LINK_BOUND, *OTHERS], keep=1))
def test_bytes_are_predicted_again(name: str) -> None:
    predicted, measured = (one.footprint for one in pair(name))
    assert predicted is not None
    assert measured is not None
    assert measured.requested_bytes - predicted.requested_bytes == 4 * (name == "bert-every-2nd-trainer")
    assert predicted.allocated_bytes == measured.allocated_bytes
    assert predicted.reserved_bytes is not None
    assert measured.reserved_bytes is not None
    assert predicted.reserved_bytes - measured.reserved_bytes in (0, RESERVED_ANEW.get(name, 0))
    first = pair(name)[1].first_context_bytes
    assert first is not None
    assert measured.context_bytes is not None
    assert predicted.context_bytes == measured.context_bytes - (first - FIRST_CONTEXT)
    assert predicted.host_bytes == pytest.approx(measured.host_bytes, rel=0.15)


@pytest.mark.parametrize("name", slow_but(LINK_BOUND, keep=1))
def test_seconds_that_the_link_decides_are_predicted_again(name: str) -> None:
    predicted, measured = pair(name)
    assert predicted.timing is not None
    assert measured.timing is not None
    assert predicted.timing.bound == LINK
    assert predicted.timing.step_seconds == pytest.approx(measured.timing.step_seconds, rel=0.05)
    assert predicted.startup is not None
    assert measured.startup is not None
    assert predicted.startup.first_step_seconds == pytest.approx(measured.startup.first_step_seconds, rel=0.5)
