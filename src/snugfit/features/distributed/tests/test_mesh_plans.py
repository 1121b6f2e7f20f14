"""Plans in which groups of GPUs work on the same samples: they share matrices or sequences, or form stages.

With made-up bytes and seconds, a plan is compared with the best of all recipes; other tests compare it with
predictions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from made_up_judge import MadeUpJudge, best_of_all, is_best

from kept import REST
from small_models import small_job
from snugfit.errors import UsageError
from snugfit.features.distributed.plan import cards_report as report_of_cards
from snugfit.features.distributed.plan import search
from snugfit.features.distributed.plan.candidates import cuts, sharings, ways
from snugfit.features.distributed.plan.evidence import MARGIN
from snugfit.features.distributed.plan.judge import Judge
from snugfit.features.distributed.plan.kind import GAIN, counts_of, why_mesh
from snugfit.features.distributed.plan.plan import CardPlans, CardsOfKind, OnGpus, SeveralGpusPlan
from snugfit.features.distributed.plan.report import render
from snugfit.features.distributed.plan.search import plan_cards, plan_several_gpus
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Kept, kept_of
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB
from tiers import slow_but

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 128}
JOB = small_job("llama", 12, HEADS, batch_size=16, sequence_length=512)
"""A job whose matrices and sequences up to eight GPUs can share."""
UNCUT = small_job("llama", 12, {"num_key_value_heads": 1, "vocab_size": 97}, batch_size=16)
"""A job that GPUs can only share by pipeline stages, because its sizes cannot be divided."""
EXPERTS = small_job("mixtral", 12, {**HEADS, "num_local_experts": 4}, batch_size=16)
"""A job with four experts in each layer, which groups of up to four GPUs can share."""
H200 = find_gpu("h200")
COUNTS = [1, 2, 4, 8, 16]


# ---- combinations of techniques ----------------------------------------------------------------------------


def recipes(job: Job, gpus: int, axes: int, fixed: Kept | None = None) -> set[str]:
    return {str(one.recipe) for one in ways(job, Recipe(), gpus, fixed or Kept(), axes)}


def test_meshes_are_of_groups_within_a_host_beside_what_shares_the_batch() -> None:
    alone, one_axis, two_axes = (recipes(JOB, 16, axes) for axes in (0, 1, 2))
    assert not any(word in recipe for recipe in alone for word in ("tensor", "context", "pipeline"))
    assert {"fsdp + tensor(8)", "fsdp + context(2)", "fsdp + pipeline(4)", "ddp + tensor(2)"} <= one_axis
    assert {"fsdp + tensor(2) + pipeline(2)", "tensor(8) + pipeline(2)"} <= two_axes
    assert not any("context" in recipe for recipe in two_axes), "compatible with no other axis"
    assert not any("expert" in recipe for recipe in one_axis | two_axes)


def test_a_mixture_of_experts_is_shared_with_its_experts_whole() -> None:
    alone, one_axis, two_axes = (recipes(EXPERTS, 16, axes) for axes in (0, 1, 2))
    assert not any("expert" in recipe for recipe in alone)
    assert {"fsdp + tensor(2) + expert(2)", "hsdp(4) + tensor(2) + expert(2)"} <= one_axis
    assert "fsdp + tensor(4) + expert(4)" in one_axis
    assert not any("tensor(8)" in recipe for recipe in one_axis), "eight GPUs cannot divide four experts"
    assert all(("tensor" in recipe) is ("expert" in recipe) for recipe in one_axis)
    assert not two_axes, "experts are incompatible with stages"
    kept = replace(kept_of(EXPERTS, "tensor(2)"), several_gpus=True)
    assert "fsdp + tensor(2) + expert(2)" in recipes(EXPERTS, 16, 0, kept)


def test_copies_of_the_weights_are_spread_over_whole_hosts() -> None:
    found = recipes(JOB, 16, 1)
    assert "hsdp(4) + tensor(2)" in found
    assert "hsdp(2) + tensor(2)" not in found
    assert "hsdp(8) + tensor(2)" not in found, "fsdp already covers one copy"


def test_a_batch_is_shared_by_groups_where_gpus_cannot_share_it() -> None:
    job = replace(JOB, batch_size=24)
    assert not recipes(job, 16, 0)
    assert {"fsdp + tensor(2)", "fsdp + pipeline(2)"} <= recipes(job, 16, 1)
    assert not list(sharings(replace(JOB, batch_size=3), 16, Kept(), 1))
    assert counts_of([5, 8, 16, 32], job, Kept()) == [8, 16, 32]


def test_stages_are_looked_at_with_enough_micro_batches() -> None:
    shared = next(one for one in ways(JOB, Recipe(), 4, Kept(), 1) if one.key == "pipeline(4)")
    assert [str(one) for one in cuts(JOB, shared, Kept())] == [f"micro_batches({n})" for n in (4, 8, 16)]


def by_name(gpus: int, axes: int, job: Job = JOB) -> dict[str, Shared]:
    return {one.key: one for one in ways(job, Recipe(), gpus, Kept(), axes)}


def test_larger_groups_hold_no_more() -> None:
    alone, meshes = by_name(16, 0), by_name(16, 1)
    assert meshes["fsdp + tensor(4)"].holds_no_more_than(meshes["fsdp + tensor(2)"])
    assert meshes["fsdp + tensor(4)"].holds_no_more_than(meshes["ddp + tensor(2)"])
    assert meshes["fsdp + context(2)"].holds_no_more_than(alone["fsdp"])
    assert not alone["fsdp"].holds_no_more_than(meshes["fsdp + tensor(2)"])
    assert not meshes["fsdp + pipeline(2)"].holds_no_more_than(alone["fsdp"]), "a stage stays gathered"
    assert meshes["hsdp(4) + tensor(2)"].is_wider_than(alone["hsdp(8)"])
    assert not meshes["fsdp + tensor(2)"].is_wider_than(alone["ddp(bucket_views=true)"])


def test_larger_groups_that_share_experts_hold_no_more() -> None:
    alone, meshes = by_name(16, 0, EXPERTS), by_name(16, 1, EXPERTS)
    four, two = meshes["fsdp + tensor(4) + expert(4)"], meshes["fsdp + tensor(2) + expert(2)"]
    for one, other in [(four, two), (four, alone["fsdp"]), (two, alone["fsdp"])]:
        assert one.holds_no_more_than(other)
        assert one.is_wider_than(other)
        assert one.has_groups_of(other)
        assert not other.holds_no_more_than(one)
    cut = replace(four, recipe=Recipe.parse("fsdp + tensor(4)"))
    assert not cut.is_wider_than(two), "it cuts each expert"
    assert not cut.holds_no_more_than(two)
    assert cut.is_wider_than(alone["fsdp"])


# ---- memory and time of stages -----------------------------------------------------------------------------


PIPELINES = [
    ("pipeline(2) + micro_batches(6)", 2, 4),
    ("bf16 + fsdp + pipeline(2) + micro_batches(6)", 4, 21),
    ("pipeline(4) + micro_batches(8)", 4, 8),
    ("every_layer + pipeline(2, schedule=gpipe) + micro_batches(4)", 2, 21),
]
"""Recipes, their numbers of GPUs and of layers."""


@pytest.mark.stored_rehearsals
@pytest.mark.parametrize(("recipe", "gpus", "layers"), slow_but(PIPELINES, 1))
def test_few_layers_and_micro_batches_of_each_stage_tell_what_many_take(
    recipe: str, gpus: int, layers: int
) -> None:
    job = small_job("llama", layers, batch_size=48)
    judged = Judge(job, H200).judge(gpus, Recipe.parse(recipe))
    whole = predict(job, recipe, gpu=H200, gpus=gpus)
    assert whole.footprint.reserved_bytes is not None
    off = abs(judged.needed_bytes - whole.needed_bytes)
    assert off < 0.2 * whole.footprint.reserved_bytes, "a share of the reserved bytes, without NCCL's memory"
    assert whole.timing is not None
    assert judged.step_seconds == pytest.approx(whole.timing.step_seconds, rel=0.02)
    exposed = whole.timing.exposed_communication_seconds
    assert judged.exposed_seconds == pytest.approx(exposed, rel=0.05, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "gpus", "layers"), PIPELINES)
def test_stages_with_all_layers_take_what_a_prediction_takes(recipe: str, gpus: int, layers: int) -> None:
    job = small_job("llama", layers, batch_size=48)
    full = Judge(job, H200).in_full(gpus, Recipe.parse(recipe))
    whole = predict(job, recipe, gpu=H200, gpus=gpus)
    assert full.needed_bytes == pytest.approx(whole.needed_bytes, rel=1e-3)


# ---- the plan ----------------------------------------------------------------------------------------------


class World(NamedTuple):
    """A cluster with made-up bytes and seconds (`MadeUpJudge`), and the techniques that a plan must choose by
    number of GPUs.
    """

    job: Job
    states: float
    sample: float
    exchange: float
    tensor: float
    context: float
    expected: dict[int, str]
    whole: float = 0.0


WORLDS = {
    "exchanges between many bind": World(JOB, 160, 1, 0.2, 0.0, 0.1, {16: "tensor(8)"}),
    "one sample is too much, sequences are cheap to cut": World(
        JOB, 160, 1500, 0, 0.3, 0.0, {2: "", 4: "context", 8: "context"}
    ),
    "states of what fits on many alone": World(JOB, 1500, 1, 1e-4, 0.05, 0.05, {8: "", 16: "fsdp"}),
    "only stages share a batch of nine": World(
        replace(UNCUT, batch_size=9),
        160,
        6,
        0.02,
        0.0,
        0.0,
        {2: "pipeline(2)", 4: "pipeline(4)", 8: "pipeline(8)"},
    ),
    "stages are faster": World(UNCUT, 4, 1, 0.5, 0.0, 0.0, {8: "pipeline", 16: "pipeline"}),
    "a batch of four": World(
        replace(JOB, batch_size=4), 160, 6, 0.02, 0.05, 0.05, {8: "tensor", 16: "tensor"}
    ),
    "exchanges between many bind, and there are experts": World(
        EXPERTS, 160, 1, 0.2, 0.0, 0.1, {16: "tensor(4) + expert(4)"}
    ),
    "four samples of a mixture of experts": World(
        replace(EXPERTS, batch_size=4), 160, 6, 0.02, 0.05, 0.05, {8: "expert", 16: "expert"}
    ),
    "two axes for one sample": World(
        replace(JOB, batch_size=1), 10, 6, 0.02, 0.05, 0.05, {2: "(2)", 4: "(4)", 8: "(8)"}
    ),
    "nothing fits": World(JOB, 50_000, 6, 0.02, 0.05, 0.05, dict.fromkeys(COUNTS, "")),
}


def set_world(judge: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    for name in ("states", "sample"):
        monkeypatch.setattr(judge, name, getattr(world, name) * GIB)
    for name in ("exchange", "tensor", "context", "whole"):
        monkeypatch.setattr(judge, name, getattr(world, name))
    monkeypatch.setattr(judge, "asked", [])


def counts_for(job: Job) -> list[int]:
    return [count for count in COUNTS if any(recipes(job, count, axes) for axes in range(3))]


SOME_WORLDS = (
    "stages are faster",
    "two axes for one sample",
)


@pytest.mark.parametrize("name", slow_but(WORLDS, SOME_WORLDS.__contains__))
def test_the_fastest_of_all_meshes_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS[name]
    monkeypatch.setattr(search, "Judge", MadeUpJudge)
    set_world(MadeUpJudge, monkeypatch, world)
    counts = counts_for(world.job)
    plan = plan_several_gpus(world.job, gpu=H200, gpus=counts, headroom=0, workers=1)
    bound = H200.memory_bytes or 0
    for one in plan.answers:
        best = best_of_all(world.job, H200, one.gpus, bound, Recipe(), MARGIN)
        assert one.fits == (best is not None), one.gpus
        if best is not None:
            assert is_best(world.job, H200, one, bound, best), one
        expected = world.expected.get(one.gpus)
        assert expected is None or (one.fits == bool(expected) and expected in one.recipe), one
    assert len(MadeUpJudge.asked) == len(set(MadeUpJudge.asked)), "no recipe is evaluated twice"


def test_stages_are_given_the_micro_batches_with_which_they_are_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More micro-batches than the smallest fitting number are best, because with that number GPUs wait for
    each other."""
    job = replace(UNCUT, batch_size=64)
    monkeypatch.setattr(search, "Judge", MadeUpJudge)
    set_world(MadeUpJudge, monkeypatch, World(job, 1, 0.1, 0, 0, 0, {}))
    (answer,) = plan_several_gpus(job, gpu=H200, gpus=4, keep="pipeline(4)", headroom=0, workers=1).answers
    by_pieces = {
        pieces: MadeUpJudge.of(job, H200, 4, Recipe.parse(f"pipeline(4) + micro_batches({pieces})"))
        for pieces in (4, 8, 16, 32, 64)
    }
    best = min(by_pieces, key=lambda pieces: by_pieces[pieces].step_seconds)
    assert 4 < best < 64
    assert answer.recipe == f"micro_batches({best}) + pipeline(4)"


def test_a_mesh_that_is_a_little_faster_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "Judge", MadeUpJudge)
    set_world(MadeUpJudge, monkeypatch, World(JOB, 160, 1, 0.01, 0.0, 0.0, {}))
    (answer,) = plan_several_gpus(JOB, gpu=H200, gpus=16, headroom=0, workers=1).answers
    mesh = MadeUpJudge.of(JOB, H200, 16, Recipe.parse("ddp + tensor(8)"))
    assert GAIN * answer.step_seconds < mesh.step_seconds < answer.step_seconds
    assert "tensor" not in answer.recipe
    assert not answer.why


@pytest.mark.parametrize("name", ["only stages share a batch of nine", "a batch of four"])
def test_cards_are_counted_with_meshes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS[name]
    monkeypatch.setattr(search, "Judge", MadeUpJudge)
    set_world(MadeUpJudge, monkeypatch, world)
    (kind,) = plan_cards(world.job, ["h200"], gpus=[2, 4, 8], workers=1).answers
    bound = (H200.memory_bytes or 0) - headroom_of(None, H200, one_of_many=True)
    best = {count: best_of_all(world.job, H200, count, bound, Recipe()) for count in (2, 4, 8)}
    known = {count: one for count, one in best.items() if one is not None}
    assert kind.fewest is not None
    assert kind.fewest.gpus == min(known)
    assert kind.fewest.step_seconds == known[min(known)].step_seconds
    if "tensor" in kind.fewest.recipe or "pipeline" in kind.fewest.recipe:
        assert "cannot be shared evenly" in kind.fewest.why


# ---- simulations and reports -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sample_for_each_of_two_gpus_is_planned_on_four() -> None:
    job = small_job("llama", 2, HEADS, batch_size=2)
    plan = plan_several_gpus(job, gpu=H200, gpus=4, workers=1)
    (answer,) = plan.answers
    assert answer.why.endswith("because a batch of 2 cannot be shared evenly by 4 GPUs.")
    whole = predict(job, answer.recipe, gpu=H200, gpus=4)
    assert answer.needed_bytes == whole.needed_bytes
    assert whole.timing is not None
    assert answer.step_seconds == whole.timing.step_seconds
    assert any("measured" in doubt and "H100" in doubt for doubt in plan.doubts)


@pytest.mark.whole
@pytest.mark.slow
def test_a_mixture_of_experts_is_planned_on_more_gpus_than_samples() -> None:
    job = small_job("mixtral", 2, batch_size=2)
    kept = f"{REST} + sdpa + default + inline + adamw_fused + bf16"
    plan = plan_several_gpus(job, gpu=H200, gpus=4, keep=kept, workers=1)
    (answer,) = plan.answers
    assert answer.recipe.endswith(" + tensor(2) + expert(2)")
    assert "each GPU with 1/2 of its experts, because a batch of 2 cannot be shared" in answer.why
    whole = predict(job, answer.recipe, gpu=H200, gpus=4)
    assert answer.needed_bytes == whole.needed_bytes
    assert whole.timing is not None
    assert answer.step_seconds == whole.timing.step_seconds
    assert any("measured" in doubt and "H100" in doubt for doubt in plan.doubts)
    assert any(doubt.startswith("expert(2): Each GPU is taken to") for doubt in plan.doubts)


def test_reasons_name_the_mesh_in_plain_words() -> None:
    shared = by_name(16, 1)["fsdp + tensor(4)"]
    assert why_mesh(JOB, shared, 2.0, 3.0) == (
        "groups of 4 GPUs compute each layer together, because data parallelism alone takes at least 1.5 "
        "times as long."
    )
    experts = by_name(16, 1, EXPERTS)["fsdp + tensor(4) + expert(4)"]
    assert why_mesh(EXPERTS, experts, 2.0, 3.0).startswith(
        "groups of 4 GPUs compute each layer together, each GPU with 1/4 of its experts, because"
    )
    stages = by_name(16, 2)["fsdp + tensor(2) + pipeline(2)"]
    assert why_mesh(JOB, stages, 2.0, None) == (
        "groups of 2 GPUs compute each layer together and the layers are divided into 2 stages, one "
        "after the "
        "other, because nothing fits with data parallelism alone."
    )
    assert why_mesh(JOB, by_name(16, 0)["fsdp"], 2.0, None) == ""


def test_reports_and_documents_say_why() -> None:
    why = "groups of 2 GPUs compute each layer together, because of this."
    one = OnGpus(
        gpus=2, recipe="tensor(2)", needed_bytes=1, step_seconds=1.0, samples_per_second=1.0, why=why
    )
    plan = SeveralGpusPlan(
        job=JOB, gpu=H200, memory_bytes=2, headroom_bytes=0, fidelity="rounds", answers=(one,), versions={}
    )
    assert f"2 GPUs: {why}" in render(plan).markdown()
    assert SeveralGpusPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    cards = CardPlans(
        job=JOB,
        fidelity="rounds",
        gpus=(2,),
        answers=(CardsOfKind(gpu=H200, fits=True, answers=(one,), measured_rates=True),),
    )
    assert f"2 x H200-SXM: {why}" in report_of_cards.render(cards).markdown()


def test_stages_may_be_kept_and_offload_to_deepspeed_may_not() -> None:
    replace(kept_of(JOB, "pipeline(2)"), several_gpus=True).refuse()
    with pytest.raises(UsageError, match="plans do not search with zero3"):
        replace(kept_of(JOB, "zero3"), several_gpus=True).refuse()
