"""Published memory of torchtitan's FSDP2 on 8 and 128 H100s, beside a rehearsal of the same model.

`titan_llama.py` reimplements model and loop. torch and its FSDP2 are the installed versions.
`data/published-titan.json` holds the published figures, their sources, and the excluded rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snugfit.prediction.allocator import replay
from titan_llama import PUBLISHED, rehearsed

GIB = 1 << 30
ACTIVE, RESERVED = 0.002, 0.02
"""Relative tolerances of active and reserved bytes. Reserved bytes also depend on the segments of the
published runs' allocator and driver."""

RESULT = Path(__file__).parents[1] / "results" / "published-torchtitan-2026-11-26.json"


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row['name']} on {row['gpus']}") for row in PUBLISHED["rows"]]
)
def test_the_published_memory_of_a_rank(row: dict[str, Any]) -> None:
    """`test_measured_ranks.py` compares FSDP2 with measurements in each run of the tests."""
    found = replay(rehearsed(row))
    if "active_gib" in row:
        assert found.allocated_peak / GIB == pytest.approx(row["active_gib"], rel=ACTIVE)
    assert found.reserved_peak / GIB == pytest.approx(row["reserved_gib"], rel=RESERVED)


def test_the_committed_table_is_of_these_rows() -> None:
    written = json.loads(RESULT.read_text())
    beside = {"recipe", "own_model_and_loop", "nearest_recipe"}
    rows = [{key: value for key, value in row.items() if key not in beside} for row in written["rows"]]
    again = "run: python lab/published_titan.py " + str(RESULT.relative_to(RESULT.parents[1]))
    assert (rows, written["left_out"]) == (PUBLISHED["rows"], PUBLISHED["left_out"]), again
