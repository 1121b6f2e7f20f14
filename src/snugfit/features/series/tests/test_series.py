"""Time series: batches from a config, and law 1: a real step on the CPU allocates the predicted bytes."""

from __future__ import annotations

from typing import Any

import pytest

from aligned import compare, peak
from cpu_scratch import compared
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import JobError, UsageError
from snugfit.features.series.feature import TimeSeries
from snugfit.job.batch import synthetic
from snugfit.job.config import check_facts
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

PATCHES = {
    "context_length": 32, "prediction_length": 8, "num_input_channels": 3, "patch_length": 8,
    "patch_stride": 8, "d_model": 16,
}  # fmt: skip
DATED = {
    "prediction_length": 6, "context_length": 12, "num_time_features": 2, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
FACTS: dict[str, dict[str, Any]] = {
    "patchtst": {**PATCHES, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32},
    "patchtsmixer": {**PATCHES, "num_layers": 2},
    "time_series_transformer": {
        **DATED, "input_size": 2, "num_static_categorical_features": 1, "cardinality": [4],
        "embedding_dimension": [3], "num_static_real_features": 2, "num_dynamic_real_features": 1,
    },
    "informer": DATED,
    "autoformer": DATED,
}  # fmt: skip


def series_job(kind: str, **changes: Any) -> Job:
    """Return a job of four series on a small model of this type."""
    facts = check_facts({"model_type": kind, **FACTS[kind], **changes}, where=kind)
    return Job(model=Model.from_config(facts, name=kind), task="time-series")


def test_a_batch_has_the_lengths_of_the_config() -> None:
    shapes = {name: tuple(value.shape) for name, value in synthetic(series_job("patchtst"), 2).items()}
    assert shapes == {
        "past_values": (2, 32, 3), "past_observed_mask": (2, 32, 3), "future_values": (2, 8, 3),
    }  # fmt: skip
    shapes = {
        name: tuple(value.shape)
        for name, value in synthetic(series_job("time_series_transformer"), 2).items()
    }
    # The largest of the usual lags is 7.
    assert shapes == {
        "past_values": (2, 19, 2), "past_observed_mask": (2, 19, 2), "past_time_features": (2, 19, 3),
        "future_values": (2, 6, 2), "future_observed_mask": (2, 6, 2), "future_time_features": (2, 6, 3),
        "static_categorical_features": (2, 1), "static_real_features": (2, 2),
    }  # fmt: skip


def test_models_without_known_series_are_one_error() -> None:
    with pytest.raises(JobError, match='no "prediction_length"'):
        synthetic(series_job("informer", prediction_length=None), 1)
    facts = check_facts({"model_type": "timesfm"}, where="timesfm")
    with pytest.raises(JobError, match="batches of this model are unknown"):
        synthetic(Job(model=Model.from_config(facts, name="timesfm"), task="time-series"), 1)
    with pytest.raises(JobError, match=r"has no head for causal-lm.*time-series"):
        Job(model=series_job("patchtst").model, task="causal-lm")


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(["plain", "bf16 + micro_batches(2)"], 1))
@pytest.mark.parametrize("kind", slow_but([*sorted(FACTS.keys() - {"autoformer"}, key="patchtst".__ne__)], 1))
def test_a_real_step_of_a_series_is_predicted(kind: str, recipe: str) -> None:
    assert similarity(kind, recipe) == 1.0


@pytest.mark.slow
@pytest.mark.whole
def test_a_real_step_of_autoformer_nearly_has_the_predicted_peak() -> None:
    """Copies inside its Fourier transforms and the order of two gradients differ."""
    assert similarity("autoformer", "plain", rel=0.002) > 0.98


def similarity(kind: str, recipe: str, rel: float = 0.0) -> float:
    """Return the share of equal events in a real and a simulated step, whose peaks are equal up to `rel`."""
    job, setup = series_job(kind), Recipe.parse(recipe).setup()
    trace = compared(foreseen(rehearse(job, setup, CpuPolicy())))
    real = compared(reports(job, setup))
    assert peak(trace) == pytest.approx(peak(real), rel=rel, abs=0)
    return compare(*([event for event in events if event.step == 2] for events in (real, trace))).similarity


def test_data_of_series_is_refused() -> None:
    with pytest.raises(UsageError, match="does not read data for the task time-series"):
        TimeSeries().read_samples([], series_job("patchtst"), None, None)
    assert TimeSeries().read_samples([], small_job("bert"), None, None) is None
