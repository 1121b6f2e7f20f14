"""Plans for a dataset's lengths: a comparison of ways of padding, on invented lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from small_models import small_job
from snugfit.errors import JobError, UsageError
from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.length_plan import LengthPlan
from snugfit.features.lengths.padding import Way
from snugfit.features.lengths.search import job_of, plan_lengths
from snugfit.job.gpu import find_gpu
from snugfit.prediction.predict import predict

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

MIXED = Lengths.of({3: 40, 6: 90, 11: 60, 19: 30, 24: 6})
BERT = small_job("bert", layers=1, facts={"max_position_embeddings": 64})


@pytest.fixture(scope="module")
def mixed() -> LengthPlan:
    """Plan in fp32 with stored scores: no kernel prefers a longer length to a shorter one there."""
    return plan_lengths(BERT, "eager", lengths=MIXED, gpu="h200", cut=16)


def way(plan: LengthPlan, order: str, multiple: int = 1) -> Way:
    return next(one for one in plan.ways if (one.order, one.multiple) == (order, multiple))


def test_one_length_makes_every_way_the_same() -> None:
    plan = plan_lengths(BERT, "bf16", lengths=Lengths.of({64: 100}), gpu="h200")
    assert plan.job.padding == 0
    assert len({replace(one, order="", multiple=0) for one in plan.ways}) == 1
    alone = predict(plan.job, "bf16", gpu="h200")
    assert alone.timing is not None
    for one in plan.ways:
        assert one.padding == 0
        assert one.needed_bytes == alone.needed_bytes
        assert one.step_seconds == pytest.approx(alone.timing.step_seconds)
        assert one.tokens_per_second == pytest.approx(64 * alone.timing.samples_per_second)


def test_grouping_pads_less_than_chance_and_chance_less_than_all_alike(mixed: LengthPlan) -> None:
    for multiple in (1, 8):
        padding = [way(mixed, order, multiple).padding for order in ("grouped", "random", "fixed")]
        assert padding == sorted(padding)
        assert padding[0] < padding[2]


def test_more_padding_is_never_faster(mixed: LengthPlan) -> None:
    """Each pair rounds lengths up further, or replaces grouped batches by random ones or a fixed length."""
    chains = [[way(mixed, order, multiple) for multiple in (1, 8, 64)] for order in ("random", "grouped")]
    chains += [[way(mixed, o, multiple) for o in ("grouped", "random", "fixed")] for multiple in (1, 8)]
    for less, more in (pair for chain in chains for pair in pairwise(chain)):
        assert (more.padding or 0) > (less.padding or 0)
        assert (more.step_seconds or 0) >= (less.step_seconds or 0) * (1 - 1e-9)


def test_bytes_are_those_of_the_longest_batch(mixed: LengthPlan) -> None:
    for multiple, length in ((1, 24), (8, 24), (64, 64)):
        job = replace(BERT, sequence_length=length, padding=0.5)
        for order in ("fixed", "random", "grouped"):
            assert way(mixed, order, multiple).length == length
            assert way(mixed, order, multiple).needed_bytes == predict(job, "eager", gpu="h200").needed_bytes


def test_seconds_are_the_mean_over_the_batches(mixed: LengthPlan) -> None:
    """With batches of one length, the plan must equal a prediction for that length."""
    alone = predict(replace(BERT, sequence_length=24, padding=0.5), "eager", gpu="h200").timing
    fixed = way(mixed, "fixed")
    assert alone is not None
    assert fixed.step_seconds == pytest.approx(alone.step_seconds)
    assert fixed.samples_per_second == pytest.approx(alone.samples_per_second)
    assert (fixed.tokens_per_second or 0) / (fixed.samples_per_second or 1) == pytest.approx(
        MIXED.mean, rel=0.02
    )
    for one in mixed.ways:
        assert (one.longest_step_seconds or 0) >= (one.step_seconds or 0) * (1 - 1e-9)


def test_a_list_and_its_histogram_have_one_answer() -> None:
    """Both are the same lengths, and a plan receives only these."""
    lengths = [length for length, samples in MIXED.counts for _ in range(samples)]
    assert Lengths.of(lengths) == MIXED


def test_cutting_is_another_job_and_shown_apart(mixed: LengthPlan) -> None:
    assert mixed.cut is not None
    assert mixed.cut.at == 16
    assert mixed.cut.samples == pytest.approx(36 / 226)
    assert mixed.cut.tokens == pytest.approx((30 * 3 + 6 * 8) / MIXED.tokens)
    assert {one.length for one in mixed.cut.ways} == {16, 64}
    assert mixed.best in mixed.ways
    assert way(mixed, "fixed").length == 24
    with pytest.raises(UsageError, match="changes nothing: the longest of given has 24"):
        plan_lengths(BERT, lengths=MIXED, gpu="h200", cut=24)


def test_a_batch_of_one_sample_is_never_padded_but_by_rounding() -> None:
    job = replace(BERT, batch_size=2)
    plan = plan_lengths(job, "bf16 + micro_batches(2)", lengths=Lengths.of({8: 3, 12: 3}), gpu="h200")
    assert way(plan, "random").padding == 0
    assert (way(plan, "random", 8).padding or 0) > 0
    unpadded = predict(replace(job, sequence_length=12), plan.recipe, gpu="h200")
    padded = predict(replace(job, sequence_length=16, padding=0.5), plan.recipe, gpu="h200")
    assert way(plan, "random").needed_bytes == unpadded.needed_bytes
    assert way(plan, "random", 8).needed_bytes == padded.needed_bytes


def test_rounding_past_the_last_position_cannot_be() -> None:
    job = small_job("bert", layers=1)  # 32 positions
    plan = plan_lengths(job, "bf16", lengths=MIXED, gpu="h200")
    refused = [one for one in plan.ways if one.why_not]
    assert {one.multiple for one in refused} == {64}
    assert "64 is more than the model's 32 positions" in refused[0].why_not
    assert plan.best is not None
    assert plan.best.multiple != 64


def test_a_sample_past_the_last_position_needs_a_cut() -> None:
    job, long = small_job("bert", layers=1), Lengths.of({20: 50, 40: 2})
    with pytest.raises(
        JobError, match=r"40 is more than the model's 32 positions.*The longest of given has 40"
    ):
        plan_lengths(job, lengths=long, gpu="h200")
    plan = plan_lengths(job, lengths=long, gpu="h200", cut=32)
    assert plan.ways == ()
    assert plan.best is None
    assert plan.cut is not None
    assert plan.cut.ways[0].needed_bytes is not None


def test_what_does_not_fit_is_not_the_best(mixed: LengthPlan) -> None:
    least = min(one.needed_bytes or 0 for one in mixed.ways)
    for memory, fits in ((least - 1, False), (least, True), (None, None)):
        plan = replace(mixed, memory_bytes=memory)
        assert (plan.best is None) is (fits is False)
        assert plan.to_json()["fits"] is fits
        assert LengthPlan.from_json(plan.to_json()) == plan
    assert replace(mixed, ways=()).to_json()["fits"] is None


def test_of_ways_as_fast_the_simplest_is_the_best(mixed: LengthPlan) -> None:
    alike = tuple(replace(one, samples_per_second=100 + (one.order == "fixed") / 2) for one in mixed.ways)
    best = replace(mixed, ways=alike).best
    assert best is not None
    assert (best.order, best.multiple) == ("random", 1)
    slower = tuple(replace(one, samples_per_second=1.0) if one.order == "random" else one for one in alike)
    best = replace(mixed, ways=slower).best
    assert best is not None
    assert best.order == "grouped"


def test_a_gain_by_the_assumed_price_of_alignment_says_so(mixed: LengthPlan) -> None:
    def priced(step: float, aligned: float) -> LengthPlan:
        ways = tuple(
            replace(one, step_seconds=step, aligned_step_seconds=aligned, samples_per_second=4 / step)
            if one.multiple == 1
            else replace(one, step_seconds=1.0, aligned_step_seconds=1.0, samples_per_second=4.0)
            for one in mixed.ways
            if one.multiple < 64
        )
        return replace(mixed, ways=ways, gpu=find_gpu("h100-sxm"))

    assert priced(1.2, 1.0).is_assumed
    assert not priced(1.2, 1.2).is_assumed
    assert not priced(1.0, 1.0).is_assumed
    assert not replace(priced(1.2, 1.0), gpu=find_gpu("h200")).is_assumed, "measured there"


@pytest.mark.parametrize(
    ("family", "changes"), [("t5", {"target_length": 9}), ("gpt2", {"phase": "evaluate"})]
)
def test_targets_and_evaluation(family: str, changes: dict[str, object]) -> None:
    job = small_job(family, layers=1, **changes)
    plan = plan_lengths(job, "bf16", lengths=Lengths.of({8: 20, 24: 5}), gpu="h200")
    assert plan.best is not None
    assert any("every target has 9 tokens" in doubt for doubt in plan.doubts) is (family == "t5")


def test_pictures_have_no_lengths() -> None:
    with pytest.raises(JobError, match="the task image-classification has none"):
        job_of(small_job("vit", layers=1), MIXED)


def test_the_document_is_read_back(mixed: LengthPlan) -> None:
    document = json.loads(json.dumps(mixed.to_json(), allow_nan=False))
    again = LengthPlan.from_json(document)
    assert again == mixed
    assert mixed.best is not None
    assert document["best"]["step_seconds"] == mixed.best.step_seconds
    for damaged in ({**document, "schema": 0}, {**document, "ways": 3}, {"what": "plan"}):
        with pytest.raises(UsageError):
            LengthPlan.from_json(damaged)


def test_freed_pieces_are_a_doubt_where_segments_do_not_grow(mixed: LengthPlan) -> None:
    few = Lengths.of({8: 20, 24: 20})
    growing = plan_lengths(BERT, "eager + expandable", lengths=few, gpu="h200")
    assert any("fragment the memory" in doubt for doubt in mixed.doubts)
    assert not any("fragment the memory" in doubt for doubt in growing.doubts)
