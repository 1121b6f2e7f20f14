"""Mixture-of-experts weights under QLoRA: they stay in 16 bits, and a warning names their bytes and smaller
targets.
"""

from __future__ import annotations

import re

import pytest

from small_models import small_job
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.results.footprint import Kind
from snugfit.results.prediction import Prediction
from snugfit.units import show_bytes

pytestmark = pytest.mark.stored_rehearsals

HIDDEN, INNER, EXPERTS, LAYERS = 512, 4096, 8, 2
EXPERT_BYTES = LAYERS * EXPERTS * 3 * HIDDEN * INNER * 2


def job() -> Job:
    facts = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS, "dtype": "bfloat16",
    }  # fmt: skip
    return small_job("mixtral", LAYERS, facts=facts, batch_size=1)


def about_experts(prediction: Prediction) -> list[str]:
    return [doubt for doubt in prediction.doubts if "experts" in doubt]


def reason(prediction: Prediction, kind: Kind) -> str:
    return next(line.reason for line in prediction.anatomy.kinds if line.kind == kind)


def test_experts_stay_in_16_bits_and_attention_alone_is_offered() -> None:
    full = predict(job(), "qlora(r=64, targets=all-linear) + bf16_pure")
    stay, adapters = about_experts(full)
    assert f"bfloat16 ({show_bytes(EXPERT_BYTES)})" in stay
    offered = re.search(r"targets=(\S+) adapts attention only", adapters)
    assert offered is not None
    fewer = predict(job(), f"qlora(r=64, targets={offered[1]}) + bf16_pure")
    assert len(about_experts(fewer)) == 1, "no adapters of experts are left"
    saved = re.search(r"experts take ([\d.]+) MiB", adapters)
    assert saved is not None
    difference = (full.footprint.requested_bytes or 0) - (fewer.footprint.requested_bytes or 0)
    assert float(saved[1]) * 2**20 <= difference * 1.001, "the estimate is a lower bound"


def test_the_offer_is_compared_with_the_missing_bytes() -> None:
    recipe = "qlora(r=64, targets=all-linear) + bf16_pure"
    needed = predict(job(), recipe).needed_bytes
    nearly = predict(job(), recipe, memory_bytes=needed - 2**20)
    assert "with which the step fits by estimate" in about_experts(nearly)[1]
    fewer = re.search(r"targets=(\S+)", about_experts(nearly)[1])
    assert fewer is not None
    assert predict(job(), f"qlora(r=64, targets={fewer[1]}) + bf16_pure", memory_bytes=needed - 2**20).fits
    assert "that are missing" in about_experts(predict(job(), recipe, memory_bytes=2**20))[1]


@pytest.mark.parametrize("recipe", ["qlora", "lora + bf16"])
def test_other_models_and_adapters_have_no_such_sentence(recipe: str) -> None:
    family = "llama" if recipe == "qlora" else "mixtral"
    assert about_experts(predict(small_job(family, 2), recipe)) == []


def test_reasons_at_the_peak_have_the_dtypes_of_the_bytes() -> None:
    """4-bit weights are `nf4`, and never the model's own dtype."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "dtype": "bfloat16"}
    predicted = predict(small_job("llama", 2, facts=wide), "qlora + bf16_pure")
    weights = reason(predicted, Kind.WEIGHTS)
    assert {"nf4", "bfloat16", "float32"} <= set(re.findall(r"\b(\w+) \(", weights))
