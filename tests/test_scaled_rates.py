"""Rates of an uncalibrated GPU: each part of a kernel's time is scaled by its bottleneck."""

from __future__ import annotations

import pytest

from snugfit.prediction.rates import _scale_pattern

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
