"""A plan leaves part of the memory free, and marks an answer that leaves less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from made_up import prediction
from small_models import small_job
from snugfit.errors import UsageError
from snugfit.job.gpu import find_gpu
from snugfit.planning.fleet.search_gpus import plan_gpus
from snugfit.planning.search.search import plan
from snugfit.prediction.headroom import headroom_of
from snugfit.report.plan.gpu_plans import render as render_gpus
from snugfit.report.plan.plan import render
from snugfit.report.short import verdict
from snugfit.report.text.terminal import as_text
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot
from snugfit.units import GIB, MIB, parse_bytes

pytestmark = pytest.mark.stored_rehearsals

H200, RTX4090 = find_gpu("h200"), find_gpu("rtx 4090")


def test_the_usual_headroom_grows_with_what_is_not_known() -> None:
    """2 % of the memory, 200 MiB more for an unmeasured context, half a GiB more for a possible display."""
    assert H200.context_bytes
    assert H200.memory_bytes
    assert RTX4090.memory_bytes
    assert headroom_of(None, H200) == int(0.02 * H200.memory_bytes)
    unmeasured = replace(H200, context_bytes=None)
    assert headroom_of(None, unmeasured) == headroom_of(None, H200) + 200 * MIB
    display = replace(H200, names=("NVIDIA GeForce RTX 9090",))
    assert headroom_of(None, display) == headroom_of(None, H200) + GIB // 2
    assert headroom_of(None, H200, 20 * GIB) == 0, "the user's own bound is the whole bound"
    assert headroom_of(None, None) == 0


@pytest.mark.parametrize(
    ("asked", "size"), [("1GiB", GIB), ("2%", GIB // 5), ("0", 0), (0, 0), (5, 5), ("0%", 0)]
)
def test_a_headroom_is_bytes_or_a_share(asked: int | str, size: int) -> None:
    assert headroom_of(asked, H200, 10 * GIB) == size


@pytest.mark.parametrize("asked", [-1, 1.5, True, "2", "much", "100%", "-1GiB"])
def test_what_is_no_headroom_is_refused(asked: object) -> None:
    with pytest.raises(UsageError, match="headroom"):
        headroom_of(asked, H200)  # type: ignore[arg-type]


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="share of the memory"):
        headroom_of("2%", None)


def test_a_prediction_that_leaves_too_little_is_tight() -> None:
    tight = prediction(memory_bytes=prediction().needed_bytes + MIB, headroom_bytes=GIB)
    assert tight.fits
    assert tight.tight
    assert tight.to_json()["tight"]
    assert "fits, but tight: 1.0 MiB free, less than the headroom of 1.0 GiB" in verdict(tight).text
    assert not replace(tight, headroom_bytes=MIB).tight
    assert not replace(tight, memory_bytes=tight.needed_bytes - 1).tight, "the recipe does not fit at all"


SETTLED = {slot: roster.plain(slot) for slot in Slot if slot is not Slot.CHECKPOINTING}


@pytest.mark.whole
def test_a_plan_leaves_the_headroom_and_where_none_can_it_says_tight() -> None:
    """The fastest recipe needs nearly all the memory, so a headroom makes the plan choose a smaller one.

    If even the smallest leaves too little, it is the answer and is marked as tight. The plan still fits.
    """
    job = small_job("bert", 2, batch_size=512, sequence_length=32)
    exact = plan(job, gpu=H200, keep=SETTLED, workers=1, headroom=0)
    assert exact.best
    assert not exact.tight
    least = plan(job, gpu=H200, keep=SETTLED, workers=1, objective="memory").best
    assert least
    fastest, smallest = exact.best.needed_bytes, least.needed_bytes
    assert fastest > smallest

    gpu = replace(H200, memory_bytes=fastest + MIB)
    roomy = plan(job, gpu=gpu, keep=SETTLED, workers=1, headroom=2 * MIB)
    assert roomy.best
    assert roomy.memory_bytes == gpu.memory_bytes
    assert roomy.headroom_bytes == 2 * MIB
    assert roomy.best.needed_bytes <= fastest - MIB
    assert not roomy.tight
    assert "should stay free" in as_text(render(roomy))

    gpu = replace(H200, memory_bytes=smallest)
    tight = plan(job, gpu=gpu, keep=SETTLED, workers=1, ranked=2)
    assert tight.fits
    assert tight.tight
    assert tight.best == tight.front[-1]
    assert tight.ranked
    assert "Tight: no recipe leaves the headroom" in as_text(render(tight))
    assert type(tight).from_json(tight.to_json()) == tight


@pytest.mark.whole
def test_many_gpus_leave_theirs() -> None:
    job = small_job("bert", 2, batch_size=2, phase="evaluate")
    (alone,) = plan_gpus(job, [H200], headroom=0, workers=1, keep=SETTLED).answers
    assert alone.choice
    exact = replace(H200, memory_bytes=alone.choice.needed_bytes)
    plans = plan_gpus(job, [exact], headroom="50%", workers=1, keep=SETTLED)
    (close,) = plans.answers
    assert close.fits
    assert close.tight
    assert close.headroom_bytes == alone.choice.needed_bytes // 2
    assert "tight" in as_text(render_gpus(plans))


@pytest.mark.parametrize("asked", ["100%", "500GiB", 500 * GIB])
def test_a_headroom_of_all_the_memory_is_refused(asked: str | int) -> None:
    """A plan for a single GPU raises the error; of many GPUs, the smaller ones just do not fit."""
    with pytest.raises(UsageError, match=r"leaves nothing of (1.* GiB|the memory) to use. Try 2%"):
        headroom_of(asked, H200)
    assert headroom_of("30GiB", RTX4090, one_of_many=True) == 30 * GIB
    with pytest.raises(UsageError, match=r"headroom: '5gb%' is not an amount of memory.*or a share: 2%"):
        headroom_of("5gb%", H200)


def test_one_byte_is_an_amount_of_memory() -> None:
    assert parse_bytes("1 B") == 1
    with pytest.raises(UsageError, match="less than a byte"):
        parse_bytes("0.9 B")
