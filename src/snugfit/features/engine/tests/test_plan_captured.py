"""Plans and steps with CUDA graphs.

A captured step is composed from recorded passes. Its bytes and seconds equal those of a full simulation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kept import kept
from small_models import small_job
from snugfit.features.engine.parts import played_back
from snugfit.frontends import next_recipe as recovery
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.cost.parts import Parts
from snugfit.planning.cost.same_trace import trace_under
from snugfit.planning.cost.timer import GpuTimers
from snugfit.planning.keep import kept_of
from snugfit.planning.search.search import plan
from snugfit.planning.search.space import space_of
from snugfit.planning.search.state import TIME_BOUND_MARGIN
from snugfit.rehearsal.step_parts import UnsupportedStep
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from tiers import slow_but

pytestmark = pytest.mark.stored_rehearsals

H200 = find_gpu("h200")

RECIPES = (
    "captured",
    "bf16 + captured + expandable",
    "bf16 + adamw_fused + micro_batches(2) + captured",
    "bf16_pure + adamw_fused + micro_batches(4) + captured",
    "bf16_pure + adafactor + captured",
    "bf16 + muon + micro_batches(2) + captured",
    "sgd + micro_batches(4) + captured + expandable",
    "bf16_master + adamw_fused + captured",
    "lora(r=8) + bf16 + adamw_fused + micro_batches(2) + captured",
    "tf32 + workers + adamw_fused + captured",
    "bf16_master + adamw_fused + fused + captured",
    "bf16 + fused + captured + micro_batches(2)",
)

SOME_RECIPES = (6,)
"""Attention with dropout (below) has fused passes of two micro-batches."""


def parts_of(job: Job) -> Parts:
    return Parts(job, [H200], GpuTimers([H200]), shallow=False)


def job_of(family: str, clip: float | None = 1.0, layers: int = 2) -> Job:
    return replace(small_job(family, layers, batch_size=8), clip=clip)


def assert_as_predicted(job: Job, recipe: str) -> None:
    parts, setup = parts_of(job), Recipe.parse(recipe).setup()
    assert parts.run(setup) is not None
    [(figures,)] = parts.evaluate([setup])
    [(bound,)] = parts.screen([setup])
    full = parts.verify(Recipe.parse(recipe), figures)
    assert full.is_same
    assert full.timing is not None
    assert figures.step_seconds == pytest.approx(full.timing.step_seconds, rel=1e-9)
    assert bound.needed_bytes <= figures.needed_bytes
    assert bound.seconds * (1 - TIME_BOUND_MARGIN) <= figures.seconds


@pytest.mark.parametrize("number", slow_but(range(len(RECIPES)), SOME_RECIPES.__contains__))
def test_a_recorded_step_from_parts_is_the_one_that_is_simulated_in_full(number: int) -> None:
    assert_as_predicted(job_of("bert", (1.0, None)[number % 2]), RECIPES[number])


@pytest.mark.parametrize(
    ("family", "recipe"),
    slow_but(
        [
            ("t5", "bf16 + adamw_fused + captured"),
            ("gpt2", "bf16 + adamw_fused + micro_batches(2) + captured"),
            ("gemma2", "bf16 + adamw_fused + micro_batches(2) + captured"),
            ("modernbert", "bf16 + adamw_fused + captured"),
            ("llama", "bf16 + fused + chunked_loss"),
            ("llama", "bf16_master + adamw_fused + fused + chunked_loss + captured"),
        ],
        0,
    ),
)
def test_so_it_is_of_other_models(family: str, recipe: str) -> None:
    """With fused projections, the gradients of queries, keys and values share a memory block."""
    assert_as_predicted(job_of(family), recipe)


def test_its_bounds_are_not_those_of_the_host() -> None:
    """The lower bound from few layers has only the seconds of the device, far below those of launching
    kernels.
    """
    job = job_of("bert", layers=6)
    parts = Parts(job, [H200], GpuTimers([H200]))
    setups = [Recipe.parse(f"bf16 + adamw_fused{more}").setup() for more in ("", " + captured")]
    (written,), (captured,) = parts.screen(setups)
    figures = [parts.evaluate([setup])[0][0] for setup in setups]
    assert captured.seconds < written.seconds / 4
    for bound, own in zip((written, captured), figures, strict=True):
        assert bound.needed_bytes <= own.needed_bytes
        assert bound.seconds * (1 - TIME_BOUND_MARGIN) <= own.seconds


def test_passes_that_wait_cannot_be_recorded_and_the_rest_is_screened() -> None:
    parts = parts_of(job_of("mixtral"))
    written, captured = (Recipe.parse(f"bf16 + adamw_fused{more}").setup() for more in ("", " + captured"))
    bounds, why = parts.screen([written, captured])
    assert isinstance(why, UnsupportedStep)
    assert isinstance(bounds, tuple)
    with pytest.raises(UnsupportedStep, match="reads a number from the device"):
        parts.evaluate([captured])


def test_what_is_played_already_stays() -> None:
    job, setup = job_of("bert"), Recipe.parse("bf16 + adamw_fused + captured + micro_batches(2)").setup()
    run = parts_of(job).run(setup)
    assert run is not None
    kernels = trace_under(setup, run.steady_step(2)).kernels
    assert played_back(kernels, has_shares=True) is kernels
    assert sum(kernel.programs for kernel in kernels) == 6


# ---- plans -----------------------------------------------------------------------------------------------


@pytest.mark.whole
def test_a_plan_chooses_it_where_the_host_decides_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster.find("compiled"), "planning_objection", lambda job: "compiling takes long")
    keep = kept("bf16 + micro_batches(2)", but="engine")
    made = plan(job_of("bert"), gpu="h200", keep=keep, workers=1)
    assert made.best is not None
    assert "captured" in made.best.recipe
    assert made.verified
    engine = next(reason for reason in made.reasons if reason.slot == Slot.ENGINE)
    assert engine.because.startswith("bound by the host")


@pytest.mark.whole
def test_a_plan_leaves_it_out_where_it_cannot_be_recorded() -> None:
    made = plan(job_of("mixtral"), gpu="h200", keep=kept("bf16", but="engine"), workers=1)
    assert made.best is not None
    assert "captured" not in made.best.recipe
    assert any("cannot be recorded" in one.why for one in made.refused)


@pytest.mark.parametrize(
    ("family", "length", "recipe"),
    [
        pytest.param("bert", 32, "bf16_master + fused + captured + micro_batches(2)", marks=pytest.mark.slow),
        ("bert", 24, "bf16 + adamw_fused + captured"),
        pytest.param(
            "llama",
            48,
            "bf16 + adamw_fused + micro_batches(2) + captured + expandable",
            marks=pytest.mark.slow,
        ),
        ("llama", 48, "bf16_master + adamw_fused + fused + chunked_loss + captured"),
    ],
)
def test_so_it_is_of_padded_batches_which_are_filled_up(family: str, length: int, recipe: str) -> None:
    """Test filled-up lengths (48 to 64), lengths limited by the model's positions (24 to 32), and a
    constant length."""
    assert_as_predicted(replace(job_of(family), padding=0.25, sequence_length=length), recipe)


@pytest.mark.slow
def test_so_it_is_of_kept_attention_with_dropout() -> None:
    recipe = "bf16 + fused + captured + micro_batches(2) + selective(attention)"
    assert_as_predicted(job_of("bert", layers=3), recipe)


def test_plans_of_padded_batches_know_its_passes_from_those_that_are_launched() -> None:
    job = replace(job_of("bert"), padding=0.25)
    space = space_of(job, fixed=kept_of(job, f"adamw_fused + sdpa + inline + {OTHERS}"))
    recorded = {one.passes for one in space.candidates if one.setup.capture is not None}
    assert recorded
    assert recorded.isdisjoint(one.passes for one in space.candidates if one.setup.capture is None)


OTHERS = "full + torch_kernels + whole_logits + on_device + all_gradients"


def test_recipes_that_it_objects_to_are_no_part_of_the_space() -> None:
    job = job_of("bert")
    few = kept_of(job, f"adamw_fused + sdpa + {OTHERS}")
    with_it = [one for one in space_of(job, fixed=few).candidates if one.setup.capture is not None]
    assert with_it
    assert all(one.setup.checkpoint is None and not one.setup.scale_gradients for one in with_it)
    assert all(one.setup.capture is None for one in space_of(job, many_gpus=True, fixed=few).candidates)


@pytest.mark.whole
@pytest.mark.slow
def test_a_run_that_ran_out_of_memory_goes_on_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    recipe = Recipe.parse("bf16 + adamw_fused + captured(multiple=16)")
    following = recovery.next_recipe(torch.device("cuda"))
    smaller = following(replace(job_of("bert"), batch_size=2), recipe, "memory")
    assert isinstance(smaller, Recipe)
    assert smaller[Slot.ENGINE] == recipe[Slot.ENGINE]
