"""Memory budgets of compiled layers. Memory falls as torch chooses, and forward and backward use one dropout
mask.

Law 1 (real and simulated allocations are equal) holds for them on the CPU, event by event. The bytes that
they save on a GPU are computed below from the layer's own sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from compiled_on_cpu import idle_kernels, no_vectors  # noqa: F401
from test_compiled import OTHERS
from torch._functorch import config as functorch

from aligned import compare
from cpu_scratch import compared
from reported import foreseen, reports
from small_models import small_job
from small_runs import killed_in, losses, small_run
from snugfit.errors import RecipeError, SnugfitError
from snugfit.features.compile.memory_budget import InductorWithin
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.keep import kept_of
from snugfit.planning.search.grades import find_grades
from snugfit.planning.search.space import space_of
from snugfit.planning.search.state import SearchState
from snugfit.prediction.predict import predict
from snugfit.prediction.worker_pool import WorkerPool
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot
from snugfit.training.run.train import train
from snugfit.units import MIB
from tiers import slow_but

LLAMA = "meta-llama/Llama-3.2-1B"

KEPT = {1.0: 280.5, 0.75: 184.5, 0.5: 136.0, 0.25: 68.0, 0.0: 0.0}
"""MiB that a layer of Llama-3.2-1B saves beside its input, by budget, for 2 x 2,048 tokens in bfloat16.

The budget is `torch._functorch.config.activation_memory_budget` (2.11 and 2.13). A hidden state is 16 MiB,
and keys and values are 4 MiB each. Each projection of the MLP is 64 MiB; the logarithms of attention's sums
are 0.5 MiB. A quarter saves one such projection and the keys; a half saves both projections, keys and values.
Three quarters also save queries, attention's result, its projection and the sums. The whole budget adds both
norms' results and the input of the last product.
"""


def setup_of(share: float) -> Any:
    return Recipe.parse(f"compiled + budget({share})").setup()


@functools.cache
def of_llama(share: float) -> Trace:
    """Return the trace of the first simulation of two layers within this budget; the tests share it."""
    return rehearse(small_job("llama", layers=2), setup_of(share), CpuPolicy())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "share"),
    slow_but(
        [("llama", 0.25), ("llama", 0.5), ("bert", 0.5), ("llama", 0.0), ("bert", 0.25), ("gpt2", 0.5)], 1
    ),
)
@pytest.mark.usefixtures("idle_kernels")
def test_a_step_within_a_budget_allocates_what_its_trace_says(family: str, share: float) -> None:
    this = small_job(family, layers=2)
    trace = foreseen(of_llama(share) if family == "llama" else rehearse(this, setup_of(share), CpuPolicy()))
    torch._dynamo.reset()
    real = reports(this, setup_of(share))
    third = [compared([event for event in events if event.step == 2]) for events in (real, trace)]
    assert all(third)
    assert compare(*third).similarity == 1.0


@pytest.mark.slow
def test_what_is_kept_on_a_gpu_is_the_largest_that_the_budget_allows() -> None:
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    job = Job(model=Model.find(LLAMA), batch_size=2, sequence_length=2048)

    def requested(share: float) -> int:
        footprint = predict(job, f"bf16_pure + compiled + budget({share})", gpu="h200").footprint
        assert footprint
        return footprint.requested_bytes

    least = requested(0.0)
    for share, kept in KEPT.items():
        seen = (requested(share) - least) / 16 / MIB
        assert seen == pytest.approx(kept, abs=0.1)
        assert seen <= share * KEPT[1.0] + 0.1


def masked(budget: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a compiled module with dropout, and the expected one from the forward pass's
    mask."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    first, second = (torch.nn.Linear(32, 32, bias=False) for _ in range(2))

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.nn.functional.dropout(first(x), 0.5)
        return second(torch.nn.functional.gelu(hidden)), hidden

    x = torch.randn(512, 32)
    out, hidden = torch.compile(layer, backend=InductorWithin(budget))(x)
    out.sum().backward()
    again = ((x @ first.weight.t()).detach() * (hidden != 0) * 2).requires_grad_()
    (of_hidden,) = torch.autograd.grad(second(torch.nn.functional.gelu(again)).sum(), again)
    assert first.weight.grad is not None
    return first.weight.grad, (of_hidden * (hidden != 0) * 2).t() @ x


@pytest.mark.whole
@pytest.mark.parametrize("budget", slow_but([0.5, 0.1], lambda budget: budget == 0.5))
def test_the_backward_pass_drops_what_the_forward_pass_dropped(budget: float) -> None:
    """Without our change torch draws another mask in the backward pass (pytorch issue 190758)."""
    seen, right = masked(budget)
    torch.testing.assert_close(seen, right, rtol=1e-4, atol=1e-4)


@pytest.mark.whole
@pytest.mark.slow
def test_the_law_of_dropout_would_notice_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.features.compile.memory_budget._draws", lambda node: False)
    with torch._inductor.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        seen, right = masked(0.5)
    assert not torch.allclose(seen, right, rtol=1e-2)


@pytest.mark.whole
def test_two_budgets_of_one_process_have_programs_of_their_own() -> None:
    """Dynamo and torch's caches on disk use a separate key for each budget."""
    weight = torch.randn(32, 32, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x @ weight)
        return x

    def kept(budget: float) -> int:
        sizes: dict[int, int] = {}

        def pack(one: torch.Tensor) -> torch.Tensor:
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            torch.compile(layer, backend=InductorWithin(budget))(torch.randn(64, 32))
        return sum(sizes.values())

    torch._dynamo.reset()
    first = [kept(budget) for budget in (1.0, 0.25, 1.0)]
    torch._dynamo.reset()  # from here on, programs come from the disk
    second = [kept(budget) for budget in (0.25, 1.0)]
    assert first[1] < first[0] == first[2]
    assert second == [first[1], first[0]]
    assert functorch.activation_memory_budget == 1.0


@pytest.mark.whole
@pytest.mark.slow
def test_rehearsals_of_two_budgets_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds in a plan's worker processes, in which Dynamo reuses traced graphs."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    job = small_job("llama", layers=2)

    def shown(share: float) -> Any:
        trace = rehearse(job, setup_of(share), CpuPolicy())
        return trace.blocks, trace.events, trace.kernels

    whole, quarter, again = (shown(share) for share in (1.0, 0.25, 1.0))
    assert whole == again
    assert len(quarter[2]) > len(whole[2])
    assert quarter[2] == of_llama(0.25).kernels


@pytest.mark.whole
def test_what_a_program_computes_again_is_no_work_of_the_model() -> None:
    def work(trace: Trace) -> int:
        products = [one for one in trace.kernels if one.operator in ("aten::mm", "aten::addmm", "aten::bmm")]
        return sum(one.flops for one in products if not one.recomputed)

    again = rehearse(
        small_job("llama", layers=2), Recipe.parse("compiled + every_layer").setup(), CpuPolicy()
    )
    assert work(again) == work(of_llama(0.25)) == work(of_llama(1.0))


# ---- refused combinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "words", "told"),
    [
        ("llama", "budget(0.5)", r"compiled \+ budget"),
        ("bert", "compiled + budget(0)", "dropout"),
        ("llama", "compiled + budget(2)", "from 0.0 to 1.0"),
    ],
)
def test_what_cannot_be_is_said(family: str, words: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Recipe.parse(words).check(small_job(family), installed=False)


@pytest.mark.whole
def test_a_module_that_drops_without_a_config_is_refused_when_nothing_is_kept() -> None:
    with pytest.raises(SnugfitError, match=r"budget\(0.1\)"):
        rehearse(small_job("bert", layers=2), setup_of(0.0), CpuPolicy())


# ---- front-ends and exports -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.whole
def test_a_run_within_a_budget_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout and a program compiled by g++, the losses are the same bit for bit. Some weights differ in
    the last bit between two uninterrupted runs, with or without a budget."""
    for kind in roster.techniques():
        if kind.name in ("compiled", "budget"):
            monkeypatch.setattr(kind, "needs", ())
    recipe = "compiled + budget(0.5)"
    whole = train(small_run(tmp_path / "whole", recipe, max_steps=4))
    killed_in(small_run(tmp_path / "killed", recipe, max_steps=4, save_steps=2), 3)
    resumed = train(small_run(tmp_path / "killed", recipe, max_steps=4, save_steps=2))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


# ---- plans ------------------------------------------------------------------------------------------------


class _Judge:
    """A worker of a plan with made-up predictions: a budget takes half of the seconds that recomputing every
    layer would add.
    """

    def evaluate(self, setups: Sequence[Setup]) -> list[tuple[Figures]]:
        return [(self.figures(setup),) for setup in setups]

    def figures(self, setup: Setup) -> Figures:
        share = 1 - setup.lowering.budget if setup.lowering else 0.0
        if (wish := setup.checkpoint) is not None:
            return Figures(100 - 10 * (wish.first or 5), 0, 100 - 10 * (wish.first or 5), 0, 20.0)
        return Figures(0, 0, int(100 - 50 * share), 0, 10 + 1.5 * share)


@pytest.mark.parametrize(("memory", "budget"), [(100, None), (90, 0.75), (80, 0.5), (62, 0.25)])
def test_a_plan_takes_the_largest_budget_that_fits(
    memory: int, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in roster.techniques():
        if kind.name in ("compiled", "budget"):
            monkeypatch.setattr(kind, "needs", ())
    job = small_job("llama")
    space = space_of(job, fixed=kept_of(job, f"{OTHERS} + adamw_fused"))
    assert not any(one.setup.has_budget for one in space.candidates)
    worker, state = _Judge(), SearchState(space, memory_bytes=memory)
    for checkpoint in ("keep_all", "every_layer"):
        number = space.number(Recipe.parse(f"{OTHERS} + adamw_fused + compiled + {checkpoint}"))
        assert number is not None
        figures = worker.figures(space.candidates[number].setup)
        state.bounds[number] = Bound(figures.needed_bytes, figures.seconds)
        state.store(number, figures)
    found = find_grades(state, WorkerPool([worker]), job, lambda what: None)  # type: ignore[list-item]
    fitting = [n for n in state.evaluated if state.fits(state.evaluated[n].needed_bytes)]
    fastest = found.candidates[min(fitting, key=state.rank)].recipe
    wanted = "keep_all" if budget is None else f"budget({budget})"
    assert str(fastest[Slot.CHECKPOINTING]) == wanted
