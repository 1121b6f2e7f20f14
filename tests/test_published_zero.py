"""Published memory of DeepSpeed's own example on one and four GPUs, beside a rehearsal of it.

`bf16_master_weight.py` reimplements the example's model and loop. DeepSpeed, torch and their kernels are
the installed versions. `data/published-zero3.json` holds the printed figures and their sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_here import with_deepspeed
from snugfit.job.gpu import find_gpu
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import INSTALLED, find_software
from snugfit.rehearsal.rehearse import record_step
from snugfit.rehearsal.trace.trace import MarkKind

GIB = 1 << 30
PRINTED = 0.01
"""GiB: two decimals are printed."""

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "published-zero3.json").read_text()
)["rows"]

SIZES = {
    "254M": {"width": 1024, "layers": 12, "heads": 16, "rows": 4},
    "6.86B": {"width": 4096, "layers": 32, "heads": 32, "rows": 1},
}


def in_words(row: dict[str, Any]) -> str:
    how = ["bf16 states" if row["low_precision"] else "fp32 states", *["recomputed"] * row["recomputes"]]
    return f"{row['size']} on {row['gpus']}, {', '.join(how)}"


OFTEN = ("254M on 4, bf16 states",)


@pytest.mark.slow
@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=in_words(row), marks=[pytest.mark.slow] * (in_words(row) not in OFTEN))
        for row in ROWS
    ],
)
def test_the_published_memory_of_a_rank(row: dict[str, Any]) -> None:
    from bf16_master_weight import ScriptStep

    how = {"ranks": row["gpus"], "low_precision": row["low_precision"], "recomputes": row["recomputes"]}
    policy = policy_for(find_gpu("h100-sxm"), find_software(INSTALLED))
    trace, marks, *_ = record_step(ScriptStep(**how, **SIZES[row["size"]]), policy, 3)
    ends = [mark.event for mark in marks if mark.kind is MarkKind.STEP_END]
    after = sum(trace.blocks[index].nbytes for index in trace.alive_at(ends[-1] - 1))
    assert after / GIB == pytest.approx(row["allocated_gib"], abs=PRINTED)
    assert replay(trace).allocated_peak / GIB == pytest.approx(row["peak_gib"], abs=PRINTED)
