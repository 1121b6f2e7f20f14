"""Plans for several GPUs: the fewest GPUs that fit, the fastest recipe, and invalid arguments."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_up_judge import MadeUpJudge, best_of_all, is_best

from kept import REST
from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.distributed.plan import search
from snugfit.features.distributed.plan.building import built_where_it_fits
from snugfit.features.distributed.plan.candidates import cuts, sharings, ways
from snugfit.features.distributed.plan.command import read_counts
from snugfit.features.distributed.plan.evidence import MARGIN
from snugfit.features.distributed.plan.judge import Judge, with_a_further_piece
from snugfit.features.distributed.plan.plan import OnGpus, SeveralGpusPlan
from snugfit.features.distributed.plan.report import render
from snugfit.features.distributed.plan.search import plan_several_gpus
from snugfit.job.gpu import find_gpu
from snugfit.planning.keep import Kept, kept_of
from snugfit.prediction.device import policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.startup import model_size
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.units import GIB, MIB
from tiers import slow_but

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

JOB = replace(small_job("llama", 12), batch_size=8)
SHALLOW = replace(small_job("llama", 2), batch_size=8)
"""A job of two layers, whose bytes need not be extrapolated from fewer layers."""
H200 = find_gpu("h200")
OTHERS = f"sdpa + default + inline + {REST}"
"""Recipe for the slots that tests of several GPUs do not search."""
H200_POLICY = policy_for(H200, Software())


# ---- combined recipes --------------------------------------------------------------------------------------


def test_one_gpu_shares_with_nobody_and_several_do() -> None:
    alone, four, sixteen = (
        [str(Recipe(one)) for one in sharings(replace(JOB, batch_size=16), gpus, Kept(), 0)]
        for gpus in (1, 4, 16)
    )
    assert alone == ["plain"]
    assert {"ddp(bucket_views=true)", "fsdp", "fsdp(reshard=none)"} <= set(four)
    assert not any(one.startswith("hsdp") for one in four), "within a host, smaller groups only take more"
    assert "hsdp(8)" in sixteen
    assert "hsdp(2)" not in sixteen


def test_each_way_recomputes_nothing_first() -> None:
    recomputing = [str(one.recomputing) for one in ways(JOB, Recipe(), 2, Kept())]
    first = recomputing.index("every_layer")
    assert set(recomputing[:first]) <= {"keep_all", "selective(attention)"}
    assert recomputing[0] == "keep_all"


def test_the_batch_of_one_gpu_is_cut() -> None:
    shared = next(ways(JOB, Recipe(), 4, Kept()))
    assert [str(one) for one in cuts(JOB, shared, Kept())] == ["whole_batch", "micro_batches(2)"]


def test_what_is_kept_stays() -> None:
    fixed = replace(kept_of(JOB, "every_layer + fsdp"), several_gpus=True)
    kinds = {str(one.recipe) for one in ways(JOB, Recipe.parse("every_layer + fsdp"), 2, fixed)}
    assert kinds == {"every_layer + fsdp"}


def test_matrices_are_cut_where_that_is_kept() -> None:
    fixed = replace(kept_of(JOB, "tensor(2)"), several_gpus=True)
    every = [{str(one.recipe) for one in ways(JOB, Recipe(), gpus, fixed)} for gpus in (2, 4)]
    assert "tensor(2)" in every[0]
    assert "fsdp + tensor(2)" not in every[0], "no ranks remain to split the batch"
    assert {"fsdp + tensor(2)", "ddp + tensor(2)"} <= every[1], "ddp without its refused views"
    assert not any("tensor" in str(one.recipe) for one in ways(JOB, Recipe(), 4, Kept()))


def test_what_gathers_less_often_or_recomputes_less_is_faster() -> None:
    by_name = {str(one.recipe): one for one in ways(JOB, Recipe(), 2, Kept())}
    kept, dropped = by_name["fsdp(reshard=none)"], by_name["fsdp"]
    assert dropped.is_slower_than(kept)
    assert not kept.is_slower_than(dropped)
    assert not by_name["ddp(bucket_views=true)"].is_slower_than(kept)
    assert by_name["every_layer + fsdp"].is_slower_than(dropped)


# ---- evaluated recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", slow_but(["bf16 + fsdp", "ddp(bucket_views=true) + every_layer"], 1))
def test_few_layers_tell_what_many_take(recipe: str) -> None:
    job = replace(small_job("llama", 6), batch_size=8)
    judged = Judge(job, H200).judge(2, Recipe.parse(recipe))
    whole = predict(job, recipe, gpu=H200, gpus=2)
    assert judged.needed_bytes == pytest.approx(whole.needed_bytes, rel=0.03)
    assert whole.timing is not None
    assert judged.step_seconds == pytest.approx(whole.timing.step_seconds, rel=0.02)


@pytest.mark.parametrize("recipe", slow_but(["fsdp + micro_batches(8)", "zero1 + micro_batches(8)"], 0))
def test_few_micro_batches_tell_what_many_take(recipe: str) -> None:
    job = replace(small_job("llama", 4), batch_size=32)
    judge = Judge(job, H200)
    judged, full = judge.judge(2, Recipe.parse(recipe)), judge.in_full(2, Recipe.parse(recipe))
    whole = predict(job, recipe, gpu=H200, gpus=2)
    assert judged.needed_bytes == pytest.approx(whole.needed_bytes, rel=0.01)
    assert full.needed_bytes == pytest.approx(whole.needed_bytes, rel=1e-3)
    assert whole.timing is not None
    assert judged.step_seconds == pytest.approx(whole.timing.step_seconds, rel=0.005)
    exposed = whole.timing.exposed_communication_seconds
    assert judged.exposed_seconds == pytest.approx(exposed, rel=0.05, abs=5e-5)
    assert full.timing is None, "it has fewer micro-batches"


@pytest.mark.parametrize(
    "recipe", slow_but(["fsdp(reshard=none) + every_layer", "ddp(bucket_views=true)", "fsdp"], 1)
)
def test_one_micro_batch_more_is_the_second_once_more(recipe: str) -> None:
    few, more = (
        rehearse(
            job_of_rank(replace(small_job("llama", 2), batch_size=4 * pieces), setup), setup, H200_POLICY
        )
        for pieces in (3, 4)
        for setup in [on_gpus(Recipe.parse(f"{recipe} + micro_batches({pieces})").setup(), 2)]
    )
    longer = with_a_further_piece(few)
    assert longer is not None
    assert [one._replace(after=()) for one in longer.kernels] == [
        one._replace(after=()) for one in more.kernels
    ]
    assert longer.waits == more.waits
    seconds, right = (step_seconds(one, H200, batch_size=16).step_seconds for one in (longer, more))
    assert seconds == pytest.approx(right, rel=1e-6)
    assert with_a_further_piece(more) is None


def test_what_cannot_be_simulated_says_why() -> None:
    judged = Judge(JOB, H200).judge(2, Recipe.parse("segments + fsdp"))
    assert "recomputed several at a time" in judged.why_not


# ---- the plan ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> SeveralGpusPlan:
    """Plan with one precision, one optimizer and whole batches. `test_mesh_plans.py` tests their choice."""
    kept = f"{OTHERS} + bf16 + adamw_fused + whole_batch"
    return plan_several_gpus(SHALLOW, gpu=H200, gpus=[1, 2], keep=kept, workers=1)


@pytest.mark.whole
def test_a_plan_answers_for_each_number_of_gpus(plan: SeveralGpusPlan) -> None:
    assert [one.gpus for one in plan.answers] == [1, 2]
    assert all(one.fits for one in plan.answers)
    assert plan.fewest is not None
    assert plan.fewest.gpus == 1
    assert plan.fastest == min(plan.answers, key=lambda one: one.step_seconds)
    assert plan.answers[0].scaling_efficiency is None
    for one in plan.answers:
        whole = predict(SHALLOW, one.recipe, gpu=H200, gpus=one.gpus)
        assert one.needed_bytes == whole.needed_bytes
        assert whole.timing is not None
        assert one.step_seconds == whole.timing.step_seconds


@pytest.mark.whole
@pytest.mark.slow
def test_an_answer_recomputes_as_many_layers_as_it_has_to() -> None:
    job = small_job("llama", 4, {"hidden_size": 256}, batch_size=16, sequence_length=512)
    rest = "adamw_fused + fsdp"
    none, every = (predict(job, recipe + rest, gpu=H200, gpus=2) for recipe in ("", "every_layer + "))
    memory = (none.needed_bytes + every.needed_bytes) // 2
    kept = f"{rest} + whole_batch + fp32 + {OTHERS}"
    plan = plan_several_gpus(job, gpu=H200, gpus=2, memory_bytes=memory, headroom=0, keep=kept, workers=1)
    (answer,) = plan.answers
    wish = Recipe.parse(answer.recipe).setup().checkpoint
    assert wish is not None
    assert wish.first is not None
    assert 1 <= wish.first <= 3
    whole = predict(job, answer.recipe, gpu=H200, gpus=2)
    assert answer.needed_bytes == whole.needed_bytes <= memory
    assert whole.timing is not None
    assert every.timing is not None
    assert answer.step_seconds == whole.timing.step_seconds < every.timing.step_seconds


@pytest.mark.whole
def test_a_plan_goes_through_json(plan: SeveralGpusPlan) -> None:
    document = json.loads(json.dumps(plan.to_json()))
    assert SeveralGpusPlan.from_json(document) == plan
    assert document["fewest"] == 1
    assert plan.to_rows()[1]["gpus"] == 2


@pytest.mark.whole
@pytest.mark.slow
def test_where_nothing_fits_it_says_what_is_lacking() -> None:
    """The memory limit is half the bytes of a step that shards and recomputes everything. `test_cards.py`
    also tests the nearest miss.
    """
    rest = "bf16 + adamw_fused + fsdp"
    least = predict(SHALLOW, f"{rest} + every_layer", gpu=H200, gpus=2).needed_bytes
    none = plan_several_gpus(
        SHALLOW, gpu=H200, gpus=[2], memory_bytes=least // 2, keep=f"{OTHERS} + {rest}", workers=1
    )
    assert not none.fitting
    assert none.fastest is None
    assert none.answers[0].needed_bytes > least // 2


@pytest.fixture
def by_formulas(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpJudge]:
    monkeypatch.setattr(MadeUpJudge, "asked", [])
    monkeypatch.setattr(search, "Judge", MadeUpJudge)
    return MadeUpJudge


@pytest.mark.parametrize(
    ("states", "sample", "exchange", "more"),
    slow_but(
        [
            (1, 20, 0.0, 1.2),
            (160, 0.1, 0.02, 1.0),
            (700, 6, 1e-4, 1.0),
            (160, 6, 1e-4, 1.2),
            (700, 20, 0.02, 1.2),
        ],
        lambda case: case == (160, 6, 1e-4, 1.2),
    ),
)
def test_the_fastest_on_each_number_is_that_of_every_recipe(
    by_formulas: type[MadeUpJudge],
    monkeypatch: pytest.MonkeyPatch,
    states: int,
    sample: float,
    exchange: float,
    more: float,
) -> None:
    """The result also holds if the whole model takes a fifth more than few layers predict.
    `test_mesh_plans.py` tests it in clusters whose exchanges are the bottleneck."""
    monkeypatch.setattr(by_formulas, "states", states * GIB)
    monkeypatch.setattr(by_formulas, "sample", sample * GIB)
    monkeypatch.setattr(by_formulas, "exchange", exchange)
    monkeypatch.setattr(by_formulas, "more_in_full", more)
    job, counts = replace(JOB, batch_size=128), [1, 2, 8, 64]
    plan = plan_several_gpus(job, gpu=H200, gpus=counts, headroom=0, workers=1)
    bound = H200.memory_bytes or 0
    for one in plan.answers:
        best = best_of_all(job, H200, one.gpus, bound, Recipe(), max(more, MARGIN))
        assert one.fits == (best is not None)
        if best is not None:
            assert is_best(job, H200, one, bound, best), one
    every = sum(
        len(cuts(job, shared, Kept())) for count in counts for shared in ways(job, Recipe(), count, Kept())
    )
    assert len(by_formulas.asked) == len(set(by_formulas.asked)) < every / 3


@pytest.fixture
def of_large_samples(by_formulas: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch) -> type[MadeUpJudge]:
    """Make one sample too large for a GPU without recomputing, and small with full recomputing."""
    for name, value in {"states": 8 * GIB, "sample": 150 * GIB, "exchange": 1e-4}.items():
        monkeypatch.setattr(by_formulas, name, value)
    for name in ("tensor", "context", "stage"):
        monkeypatch.setattr(by_formulas, name, 0.5)
    return by_formulas


@pytest.mark.parametrize(
    ("more", "layers"), slow_but([(1.2, [11, 9, 4]), (1.0, [11, 8, 2]), (1.05, [11, 8, 3])], 1)
)
def test_the_fewest_layers_are_recomputed_with_which_a_step_fits(
    of_large_samples: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch, more: float, layers: list[int]
) -> None:
    """The result also holds if the whole model takes more than few layers predict."""
    monkeypatch.setattr(of_large_samples, "more_in_full", more)
    plan = plan_several_gpus(JOB, gpu=H200, gpus=[2, 4, 8], headroom=0, workers=1)
    bound = H200.memory_bytes or 0
    for one in plan.answers:
        best = best_of_all(JOB, H200, one.gpus, bound, Recipe(), max(more, MARGIN))
        assert best is not None
        assert is_best(JOB, H200, one, bound, best), one
    wishes = [Recipe.parse(one.recipe).setup().checkpoint for one in plan.answers]
    assert [wish and wish.first for wish in wishes] == layers


def test_no_layer_is_recomputed_where_few_layers_said_too_much(
    of_large_samples: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_large_samples, "more_in_full", 0.8)
    (answer,) = plan_several_gpus(JOB, gpu=H200, gpus=[8], headroom=0, workers=1).answers
    assert answer.recipe == "ddp(bucket_views=true)"
    assert answer.fits
    assert not answer.why


def test_what_fewer_recomputed_layers_gain_is_told(of_large_samples: type[MadeUpJudge]) -> None:
    plan = plan_several_gpus(JOB, gpu=H200, gpus=[4, 8], headroom=0, workers=1)
    answer, was = plan.answers[1], plan.alternatives[0]
    assert was.recipe == "every_layer + ddp(bucket_views=true)"
    more = 100 * (was.step_seconds / answer.step_seconds - 1)
    assert answer.why == (
        "the first 2 layers are recomputed, of 12. With none a step needs about 158.00 GiB of each GPU, of "
        f"which 139.80 GiB may be used. With every_layer it takes {more:.1f} % longer."
    )
    assert "8 GPUs: the first 2 layers are recomputed, of 12. With none" in render(plan).markdown()


def test_of_many_answers_only_those_with_a_name_recompute_fewer_layers(
    of_large_samples: type[MadeUpJudge],
) -> None:
    job = replace(JOB, batch_size=32)
    plan = plan_several_gpus(job, gpu=H200, gpus=[2, 4, 8, 16, 32], headroom=0, workers=1)
    assert plan.fastest == plan.cheapest == plan.answers[-1]
    assert [one.recipe.split("(")[0].split(" ")[0] for one in plan.answers] == [
        *["every_layer"] * 4, "first_layers",
    ]  # fmt: skip


def test_weights_are_gathered_again_where_more_layers_are_kept_for_it(
    of_large_samples: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_large_samples, "states", 160 * GIB)
    (answer,) = plan_several_gpus(JOB, gpu=H200, gpus=8, headroom=0, workers=1, keep="whole_batch").answers
    for recipe, layers in (("fsdp", 3), ("fsdp(reshard=none)", 5)):
        fits = [
            MadeUpJudge.of(JOB, H200, 8, Recipe.parse(f"first_layers({k}) + {recipe}")).needed_bytes
            <= (H200.memory_bytes or 0)
            for k in (layers - 1, layers)
        ]
        assert fits == [False, True]
    assert answer.recipe == "first_layers(3) + fsdp"
    assert "With every_layer + fsdp(reshard=none) it takes" in answer.why


@pytest.mark.parametrize("keep", ["every_layer", "pipeline(2)"])
def test_layers_are_recomputed_as_they_are_kept_and_in_stages(
    of_large_samples: type[MadeUpJudge], keep: str
) -> None:
    plan = plan_several_gpus(JOB, gpu=H200, gpus=[8], headroom=0, workers=1, keep=keep)
    assert "every_layer" in plan.answers[0].recipe


def made_up() -> SeveralGpusPlan:
    """Return made-up plans for one GPU, and for two that are a little faster."""
    one = OnGpus(gpus=1, recipe="plain", needed_bytes=1, step_seconds=10.0, samples_per_second=1.0)
    two = replace(one, gpus=2, step_seconds=6.0)
    return SeveralGpusPlan(
        job=JOB, gpu=H200, memory_bytes=MIB, headroom_bytes=0, fidelity="rounds", answers=(one, two),
        versions={},
    )  # fmt: skip


def test_the_cheapest_takes_the_fewest_gpu_seconds() -> None:
    assert made_up().cheapest == made_up().answers[0]
    assert made_up().fastest == made_up().answers[1]


def test_the_report_names_the_fewest_the_fastest_and_the_cheapest() -> None:
    text = render(made_up()).markdown()
    for line in ("The fewest GPUs that fit: 1 x", "The fastest: 2 x", "The cheapest: 1 x"):
        assert line in text
    nothing = replace(made_up(), answers=(replace(made_up().answers[0], fits=False, needed_bytes=3 * MIB),))
    assert (
        "Nothing fits. The nearest miss is on 1 x H200-SXM and is short by 2.0 MiB"
        in render(nothing).markdown()
    )


# ---- invalid arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"), [("8", [8]), ("2,4,8", [2, 4, 8]), ("1..8", [1, 2, 4, 8]), ("3..20", [3, 6, 12])]
)
def test_numbers_of_gpus_are_read(text: str, counts: list[int]) -> None:
    assert read_counts(text) == counts


@pytest.mark.parametrize("text", ["many", "0..8", "8..2", "..", "2,x"])
def test_what_is_not_a_number_of_gpus_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number of GPUs"):
        read_counts(text)


def test_numbers_that_cannot_share_the_batch_are_told() -> None:
    with pytest.raises(UsageError, match=r"cannot be shared evenly by 3 GPUs\. Name a divisor of it"):
        plan_several_gpus(JOB, gpu=H200, gpus=3, workers=1)
    with pytest.raises(UsageError, match="whole numbers from 1"):
        plan_several_gpus(JOB, gpu=H200, gpus=0, workers=1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--verify", "2"], "does not take --verify"),
        (["--objective", "memory"], "does not take --objective"),
        (["--gpus", "3"], "cannot be shared evenly"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    asked = ["plan", "bert-base-uncased", "--task", "sequence-classification", "--gpu", "h200", "--gpus", "2"]
    assert run([*asked, *more]) == 2
    assert why in capsys.readouterr().err


def test_a_price_says_what_samples_cost_and_is_shown() -> None:
    plan = replace(made_up(), price_per_hour=3.6)
    answer = plan.answers[0]
    cost = plan.usd_per_1000_samples(answer)
    assert cost == pytest.approx(0.001 * answer.gpus * 1000 / answer.samples_per_second)
    text = render(plan).markdown()
    assert "USD per 1,000 samples" in text
    assert "USD" not in render(made_up()).markdown()
    assert SeveralGpusPlan.from_json(plan.to_json()).price_per_hour == 3.6
    assert made_up().usd_per_1000_samples(answer) is None


def test_a_model_that_exceeds_a_gpu_is_built_on_the_host() -> None:
    weights = 4 * model_size(JOB).numbers
    assert built_where_it_fits(JOB, 2 * weights) == JOB
    assert built_where_it_fits(JOB, weights).build_on == "host"
    on_host = replace(JOB, build_on="host")
    assert built_where_it_fits(on_host, 2 * weights) == on_host
