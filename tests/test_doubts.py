"""Every output shows the assumptions of a rehearsal, for every way in which its trace is produced."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.models.bert.modeling_bert import BertLayer

from small_models import small_job
from snugfit.frontends.predicted import run_figures
from snugfit.planning.fleet.search_gpus import plan_gpus
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.report import compare
from snugfit.report.show import attach, html
from snugfit.report.text.terminal import as_text
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from test_watching import shown

SENTENCE = "A guess was planted."
BERT = small_job("bert", layers=2, batch_size=8)
SETTLED = {slot: roster.plain(slot) for slot in Slot if slot is not Slot.BATCHING}


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a doubt to each layer that is rehearsed."""
    plain = BertLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if doubt := getattr(_get_current_dispatch_mode(), "warn", None):
            doubt(SENTENCE)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(BertLayer, "forward", forward)


@pytest.mark.parametrize("loop", ["plain", "accelerate", "trainer"])
def test_a_trace_says_it_once(loop: str) -> None:
    assert rehearse(BERT, Recipe().setup(), CudaPolicy(), loop=loop).doubts == (SENTENCE,)


def test_a_repeated_trace_says_it() -> None:
    assert rehearse(BERT, Recipe.parse("micro_batches(8)").setup(), CudaPolicy()).doubts == (SENTENCE,)


def test_every_face_of_a_prediction_says_it() -> None:
    prediction = predict(BERT, gpu="h200")
    attach()
    assert prediction.doubts == (SENTENCE,)
    assert prediction.to_json()["doubts"] == [SENTENCE]
    for text in (str(prediction), html(prediction), as_text(compare.render([prediction]))):
        assert SENTENCE in text
    foreseen = run_figures(prediction).to_json()
    assert foreseen["doubts"] == [SENTENCE]
    assert f"uncertain: {SENTENCE}" in shown({"event": "foreseen", "recipe": "plain", **foreseen})


@pytest.mark.whole
@pytest.mark.parametrize(
    "ask",
    [
        partial(plan, BERT, gpu="h200", keep=SETTLED, workers=1),
        partial(plan_gpus, BERT, ["h200"], keep=SETTLED, workers=1),
    ],
    ids=["plan", "gpus"],
)
def test_what_is_planned_says_it(ask: Callable[[], Any]) -> None:
    answer = ask()
    attach()
    assert SENTENCE in str(answer)
    assert SENTENCE in json.dumps(answer.to_json())
    assert SENTENCE in str(type(answer).from_json(answer.to_json()))
