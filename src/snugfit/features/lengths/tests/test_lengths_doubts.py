"""A warning of the simulation in every output format of a plan for sequence lengths."""

from __future__ import annotations

import json

import pytest

import snugfit
from test_doubts import BERT, SENTENCE, planted

__all__ = ["planted"]

pytestmark = pytest.mark.whole


def test_a_doubt_of_the_prediction_is_in_every_answer() -> None:
    answer = snugfit.plan_lengths(BERT, "plain", lengths=snugfit.Lengths.of({8: 30, 16: 20}), gpu="h200")
    assert SENTENCE in str(answer)
    assert SENTENCE in json.dumps(answer.to_json())
    assert SENTENCE in str(snugfit.LengthPlan.from_json(answer.to_json()))
