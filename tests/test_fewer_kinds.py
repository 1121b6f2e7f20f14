"""A search simulates fewer kinds of passes: it derives them from equal kinds or from other micro-batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.planning.cost.figures import Bound
from snugfit.planning.cost.parts import Parts
from snugfit.planning.cost.short_passes import short_passes
from snugfit.planning.cost.timer import GpuTimers
from snugfit.planning.keep import kept_of
from snugfit.planning.search.other_sizes import MOST_SAVED, PEAK_SHARE, OtherSizes
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.twins import SimilarRecipes
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.rehearsal.few_layers import RecordPasses, passes_from_few_layers
from snugfit.rehearsal.splice import rehearse_passes
from snugfit.techniques.loading import workers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity
from tiers import slow_but

GPU = find_gpu("h200")
CUDA = policy_for(GPU, Software())
SETTLED = "sdpa + bf16 + ieee + whole_logits + on_device + adamw + all_gradients + default + inline"


@cache
def space() -> Space:
    """Return recipes of a small Llama that differ in kernels, engine, recomputation and micro-batches."""
    job = small_job("llama", 2, batch_size=8)
    return space_of(job, fidelity=Fidelity.ROUNDS, fixed=kept_of(job, SETTLED))


def number_of(recipe: str) -> int:
    """Return the index of the candidate with these techniques."""
    number = space().number(Recipe.parse(f"{SETTLED} + {recipe}"))
    assert number is not None
    return number


def twins_of(
    bounds: dict[int, Bound], bases: dict[int, int], refused: frozenset[int] = frozenset()
) -> SimilarRecipes:
    return SimilarRecipes(
        space(),
        bases.get,
        bounds.get,
        lambda number: number not in refused,
        refused.__contains__,
    )


@pytest.mark.parametrize(
    ("own", "stands"),
    [
        (Bound(20, 2.0, 5, 7), True),
        (Bound(20, 0.5, 5, 7), False),
        (Bound(9, 2.0, 5, 7), False),
        (Bound(20, 2.0, 5, 6), False),
    ],
)
def test_a_kind_that_is_better_in_nothing_is_left_out_for_other_kernels(own: Bound, stands: bool) -> None:
    plain, fused = number_of("every_layer"), number_of("every_layer + fused")
    bases = {plain: number_of("keep_all"), fused: number_of("fused")}
    bounds = {bases[plain]: own, bases[fused]: Bound(10, 1.0, 5, 7)}
    twins = twins_of(bounds, bases)
    assert twins.of(space().candidates[plain].passes, [plain]) == ([fused] if stands else [])
    bounds |= {plain: Bound(80, 2.0), fused: Bound(100, 1.5)}  # smaller than its twin after all
    twins.drop_if_misleading()
    assert not twins.of(space().candidates[plain].passes, [plain])
    assert twins.stand != stands


def test_a_step_that_cannot_be_recorded_has_the_unrecorded_one_for_its_twin() -> None:
    plain, fused = number_of("every_layer + captured"), number_of("every_layer + fused + captured")
    unrecorded = number_of("every_layer + fused")
    bases = {
        plain: number_of("captured"), fused: number_of("fused + captured"), unrecorded: number_of("fused"),
    }  # fmt: skip
    bounds = {bases[plain]: Bound(20, 2.0), bases[fused]: Bound(10, 1.0), bases[unrecorded]: Bound(10, 3.0)}
    kind = space().candidates[plain].passes
    assert twins_of(bounds, bases).of(kind, [plain]) == [fused]
    assert not twins_of(bounds, bases, frozenset([fused])).of(kind, [plain])
    bounds[bases[unrecorded]] = Bound(10, 1.5)
    assert twins_of(bounds, bases, frozenset([fused])).of(kind, [plain]) == [unrecorded]


def test_two_sizes_of_a_micro_batch_bound_a_larger_one() -> None:
    recipe = "every_layer + micro_batches"
    bounds = {number_of(f"{recipe}(8)"): Bound(1100, 4.0), number_of(f"{recipe}(4)"): Bound(1300, 3.8)}
    bounds |= {number_of(f"micro_batches({n})"): Bound(9, 3.0 + n / 100) for n in (4, 2)}
    least = OtherSizes(space(), bounds).least(number_of(f"{recipe}(2)"))
    assert least.needed_bytes == int(1700 * (1 - PEAK_SHARE))
    assert least.seconds == pytest.approx(3.8 - MOST_SAVED * 0.02)


def test_one_compiled_size_bounds_a_larger_one_where_its_passes_decide() -> None:
    bounds = {number_of("compiled + micro_batches(4)"): Bound(1200, 4.0)}
    bounds |= {number_of(f"micro_batches({n})"): Bound(1000 + 1200 // n, 4.0) for n in (4, 2)}
    large = number_of("compiled + micro_batches(2)")
    assert OtherSizes(space(), bounds).least(large).needed_bytes == int(1400 * (1 - PEAK_SHARE))
    bounds[number_of("compiled + micro_batches(4)")] = Bound(1200, 4.0, resting_bytes=1200)
    assert OtherSizes(space(), bounds).least(large).needed_bytes == 0


@pytest.mark.parametrize("record", slow_but([short_passes, rehearse_passes], 1))
def test_gradients_that_share_a_block_are_written_out_from_few_layers(record: RecordPasses) -> None:
    job = small_job("bert", 16, batch_size=2)
    setup = Recipe.parse("bf16_master + fused").setup()
    few, whole = passes_from_few_layers(job, setup, CUDA, record), record(job, setup, CUDA)
    assert few is not None
    assert len(whole.shared) > 10
    assert (few.trace, few.gradients, few.shared) == (whole.trace, whole.gradients, whole.shared)


def test_an_update_is_not_spliced_to_a_model_that_was_built_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused kernels place weights side by side in memory as the model is built, and leave the same
    gradients."""
    pytest.importorskip("peft")
    job = small_job("llama", 2, batch_size=4)
    parts = Parts(job, [GPU], GpuTimers([GPU]))
    whole: list[Setup] = []
    monkeypatch.setattr(Parts, "_whole_trace", lambda parts, setup: whole.append(setup))
    for kernels in ("fused", "torch_kernels"):
        assert parts.run(Recipe.parse(f"lora(r=4) + bf16 + {kernels}").setup()) is not None
    assert whole == []


def test_a_space_of_tokens_builds_no_model_and_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this imports torch and transformers in the process that only waits")

    monkeypatch.setattr("snugfit.job.build._from_facts", refuse)
    monkeypatch.setattr("snugfit.job.batch.SyntheticDataset.__getitem__", refuse)
    assert [one.n for one in workers.Workers.settings(small_job("bert", 2, batch_size=2))] == [
        workers.TOKEN_WORKERS
    ]
    job = small_job("bert", 2, batch_size=2)
    assert space_of(job, fidelity=Fidelity.ROUNDS, fixed=kept_of(job, "uncompiled")).candidates


def test_a_setup_is_copied_with_its_own_fields_alone() -> None:
    setup = Setup()
    assert setup.with_fields(attention="eager").attention == "eager"
    assert setup == Setup()
    with pytest.raises(TypeError, match="atention"):
        setup.with_fields(atention="eager")
