"""Classifiers with a decoder gather the hidden states at the positions of the batch's end tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import hold_to_reports

T5 = {
    "model_type": "t5", "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4,
    "vocab_size": 96, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256, "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def job(facts: dict[str, Any], **changes: Any) -> Job:
    model = Model.from_config(check_facts(facts, where="test"), name=facts["model_type"])
    sizes = {"batch_size": 8, "sequence_length": 32} | changes
    return Job(model=model, task=Task.SEQUENCE_CLASSIFICATION, **sizes)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("facts", "recipe", "padding"),
    [
        (T5, "plain", 0.25),
        pytest.param(T5, "bf16 + micro_batches(4)", 0.0, marks=pytest.mark.slow),
        pytest.param(BART, "plain", 0.0, marks=pytest.mark.slow),
    ],
    ids=["t5 padded", "t5 in pieces", "bart"],
)
def test_a_real_step_allocates_what_its_trace_says(
    facts: dict[str, Any], recipe: str, padding: float
) -> None:
    hold_to_reports(job(facts, padding=padding), Recipe.parse(recipe))


def test_the_host_waits_for_the_counts_and_for_each_gathering() -> None:
    """The host waits for `unique_consecutive` and `nonzero` in the forward pass, and for `nonzero` in the
    backward pass."""
    asked = []
    for task in (Task.SEQ2SEQ_LM, Task.SEQUENCE_CLASSIFICATION):
        trace = rehearse(replace(job(T5), task=task), Recipe().setup(), CudaPolicy())
        phases = [trace.kernels[place].phase for place in trace.waits]
        asked.append((phases.count("forward"), phases.count("backward")))
    assert [after - before for before, after in zip(*asked, strict=True)] == [2, 1]
