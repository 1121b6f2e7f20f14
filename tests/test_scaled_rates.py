"""Rates of an uncalibrated GPU: each part of a kernel's time is scaled by its bottleneck."""

from __future__ import annotations

import pytest

from snugfit.job.gpu import find_gpu
from snugfit.prediction.rates import _scale_pattern, rates_for

BANDWIDTH, WIDER, BUSIER = 4e12, 0.7, 1.2


@pytest.mark.parametrize(
    ("rate", "scaled"),
    [
        (BANDWIDTH, BANDWIDTH * WIDER),
        (2 * BANDWIDTH, 2 * BANDWIDTH * WIDER),
        (BANDWIDTH / 2, 1 / (1 / (BANDWIDTH * WIDER) + 1 / (BANDWIDTH * BUSIER))),
        (BANDWIDTH / 1e6, BANDWIDTH / 1e6 * BUSIER),
    ],
)
def test_bytes_and_instructions_are_scaled_apart(rate: float, scaled: float) -> None:
    assert _scale_pattern(rate, BANDWIDTH, WIDER, BUSIER) == pytest.approx(scaled, rel=1e-5)


def test_on_the_same_gpu_nothing_changes() -> None:
    assert _scale_pattern(BANDWIDTH / 3, BANDWIDTH, 1.0, 1.0) == pytest.approx(BANDWIDTH / 3)


@pytest.mark.parametrize("name", ["rtx 4090", "a100-80gb", "l40s"])
def test_no_product_is_faster_than_the_published_ones(name: str) -> None:
    gpu = find_gpu(name)
    rate = rates_for(gpu).products["bf16"]
    fastest = rate.flops * max(1.0, *rate.efficiency)
    assert fastest == pytest.approx(gpu.achieved["torch_matmul_best_tflops"]["bf16"] * 1e12)


def test_products_within_an_architecture_have_the_ratio_of_the_published_ones() -> None:
    h100, h200 = find_gpu("h100"), find_gpu("h200")
    published = [one.achieved["torch_matmul_best_tflops"]["bf16"] for one in (h100, h200)]
    flops = [rates_for(one).products["bf16"].flops for one in (h100, h200)]
    assert flops[0] / flops[1] == pytest.approx(published[0] / published[1])
