"""Whole recorded runs, from the first weight on, and the same runs rehearsed: every birth and death in
order.

`data/segments-h200` holds runs of `snugfit measure` on one NVIDIA H200. These histories include the
temporary allocations of initialising a model on the device.
"""

from __future__ import annotations

import gzip
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

FOLDER = Path(__file__).parent / "data" / "segments-h200"


@pytest.mark.parametrize("name", ["modernbert-5x960-plain", "vit-6x1024-plain"])
def test_every_birth_and_death_is_foreseen(name: str) -> None:
    if "modernbert" in name and "inv_freq_expanded @" not in inspect.getsource(ModernBertRotaryEmbedding):
        pytest.skip("recorded with transformers 5.17, where rotary angles were a product of matrices")
    with gzip.open(FOLDER / f"{name}.json.gz", "rt") as file:
        document: dict[str, Any] = json.load(file)
    signs = {"alloc": 1, "free_requested": -1}
    seen = [signs[action] * size for action, _, size in document["events"] if action in signs]
    setup = Recipe.parse(document["recipe"]).setup()
    trace = rehearse(Job.from_json(document["job"]), setup, policy_for(find_gpu("h200"), Software()))
    assert [(1 if event > 0 else -1) * trace.blocks[abs(event) - 1].nbytes for event in trace.events] == seen
    after = replay(trace)
    assert after.reserved_peak == document["footprint"]["reserved_bytes"]
    assert after.allocated_peak == document["footprint"]["allocated_bytes"]
