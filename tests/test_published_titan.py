"""What torchtitan published of the memory of FSDP2 on 8 and 128 H100s, beside a rehearsal of its own model.

Model and loop are written anew in `titan_llama.py`; torch and its FSDP2 are those installed here.
`data/published-titan.json` has what was published, where, and which rows are left out.
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
"""Shares of what was published by which it may be missed: what is handed out, and what is reserved, which
depends on how torch's allocator of then and its driver laid out segments, too."""

RESULT = Path(__file__).parents[1] / "results" / "published-torchtitan-2026-11-26.json"


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row['name']} on {row['gpus']}") for row in PUBLISHED["rows"]]
)
def test_the_published_memory_of_a_rank(row: dict[str, Any]) -> None:
    """Each time `test_measured_ranks.py` holds FSDP2 to what was measured."""
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
