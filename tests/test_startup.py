"""One-time costs of a run: predicted, compared with recorded runs, and spread over the run of a plan."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.errors import UsageError
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.cost.parts import Parts
from snugfit.planning.cost.startup_share import ENDLESS_RUN, PlannedRun, StartupShares
from snugfit.planning.cost.timer import SingleGpuTimer
from snugfit.planning.fleet.search_gpus import plan_gpus
from snugfit.planning.keep import kept_of
from snugfit.planning.search.search import plan
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import space_of
from snugfit.prediction.device import policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.startup import STARTUP_RATES, StartupRates, distinct_kernels, model_size, startup
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import PREPARED, Kernel, Trace
from snugfit.report import prediction as report
from snugfit.report.text.terminal import as_text
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot
from tiers import slow_but

H200 = find_gpu("h200")
RECORDED = json.loads((Path(__file__).parent / "data" / "once-h200.json").read_text(encoding="utf-8"))["runs"]
SHOWN = ("openai-community/gpt2",)
BAND = 0.20


def kernel(operator: str = "aten::add", **changes: Any) -> Kernel:
    whole = Kernel(operator, "", "forward", 1, 8, ((16, 16), (16, 16)), "torch.float32", 2)
    return whole._replace(**changes)


def setup_of(recipe: str) -> Setup:
    return Recipe.parse(recipe).setup()


def once(
    job: Job, recipe: str, kernels: tuple[Kernel, ...] = (), rate: StartupRates = STARTUP_RATES
) -> float:
    return startup(job, setup_of(recipe), distinct_kernels(kernels), rates=rate).total_seconds(0.0)


# ---- foreseen --------------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_once() -> None:
    job = small_job("bert", 2, batch_size=2)
    alone, twice = (kernel(),), (kernel(), kernel(module="another", phase="backward", shapes=((8, 8),)))
    more = (*twice, kernel(dtype="torch.bfloat16"))
    assert once(job, "plain", alone) == once(job, "plain", twice)
    assert once(job, "plain", more) == pytest.approx(once(job, "plain", alone) + STARTUP_RATES.kernel)


def test_products_are_chosen_by_their_sizes() -> None:
    mm = kernel("aten::mm")
    alike, larger = mm._replace(shapes=((17, 16), (16, 31))), mm._replace(shapes=((16, 4096), (4096, 16)))
    assert len(distinct_kernels([mm, alike])) == 1
    assert len(distinct_kernels([mm, larger])) == 2


def test_what_a_recipe_brings_is_paid_for() -> None:
    job = small_job("bert", 2, batch_size=2)
    plain = once(job, "plain")
    assert once(job, "workers(3)") == pytest.approx(plain + 3 * STARTUP_RATES.worker)
    assert once(job, "adamw_8bit") == pytest.approx(plain + STARTUP_RATES.package)
    assert once(job, "lora") == pytest.approx(plain + STARTUP_RATES.package)
    assert once(job, "adafactor") == plain, "transformers is imported by every run"


def test_a_model_is_built_number_by_number_on_the_host() -> None:
    device = small_job("bert", 2, batch_size=2)
    host, size = replace(device, build_on="host"), model_size(device)
    assert size.tensors > 30
    assert once(host, "plain") == pytest.approx(
        once(device, "plain") + STARTUP_RATES.host_number * size.numbers
    )
    deeper = model_size(small_job("bert", 4, batch_size=2))
    assert deeper.tensors > size.tensors
    assert deeper.numbers > size.numbers


def test_a_prediction_has_a_start_up_for_the_plain_loop() -> None:
    job = small_job("bert", 2, batch_size=2)
    found, richer = predict(job, gpu=H200), predict(job, "bf16 + workers", gpu=H200)
    assert found.startup is not None
    assert found.timing is not None
    assert richer.startup is not None
    assert found.startup.first_step_seconds > found.timing.step_seconds
    assert richer.startup.total_seconds(0) > found.startup.total_seconds(0), "casts, and two processes"
    assert found.to_json()["startup"] == found.startup.to_json()
    assert "Start-up takes about" in as_text(report.render(found), width=200)
    assert predict(job, loop="accelerate", gpu=H200).startup is None
    assert predict(job).startup is None


# ---- recorded --------------------------------------------------------------------------------------------


def name_of(run: dict[str, Any]) -> str:
    return run["model"] + ("/host" if run["build_on"] == "host" else "") + f" {run['recipe']}"


@pytest.mark.parametrize("run", RECORDED, ids=name_of)
def test_what_was_paid_once_on_an_h200(run: dict[str, Any]) -> None:
    """Most cases run only with SNUGFIT_ALL_TRUTH=1, since each is a rehearsal."""
    if os.environ.get("SNUGFIT_ALL_TRUTH") != "1" and name_of(run).split()[0] not in SHOWN:
        pytest.skip("SNUGFIT_ALL_TRUTH=1 checks all")
    fields = {name: run[name] for name in ("task", "batch_size", "sequence_length", "build_on")}
    job, setup = Job(model=Model.find(run["model"]), **fields), setup_of(run["recipe"])
    steps, reached = run["step_seconds"], run["reached_seconds"]
    paid = reached["built"] + steps[0] - statistics.median(steps[1:])
    trace = rehearse(job, setup, policy_for(H200, Software()))
    foreseen = startup(job, setup, distinct_kernels(trace.kernels)).total_seconds(0.0)
    assert foreseen == pytest.approx(paid, rel=BAND)


# ---- spread over a run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowLoading:
    """An invented device that waits for batches, except for those from loader processes."""

    batch: float = 1.0

    def __call__(self, trace: Trace) -> float:
        return sum(map(self._seconds, trace.kernels))

    def _seconds(self, kernel: Kernel) -> float:
        waits = self.batch if kernel.phase == "load" and kernel.operator != PREPARED else 0.0
        return waits + 1e-4 + kernel.flops / 1e11 + kernel.nbytes / 1e9


DEAR = StartupRates(
    imports=5.0, package=1.0, context=1.0, tensor=1e-3, host_number=0.0, kernel=1e-3, worker=100.0
)


FREE = (Slot.PRECISION, Slot.OPTIMIZER, Slot.CHECKPOINTING, Slot.BATCHING, Slot.LOADING)
KEPT = {slot: roster.plain(slot) for slot in Slot if slot not in FREE}
"""Fixed slots. One-time costs that are spread over a run differ in the other slots."""


@pytest.fixture(scope="module")
def job() -> Job:
    return small_job("gpt2", 2, batch_size=1, sequence_length=32)


@cache
def searched(job: Job, steps: int | None) -> Any:
    """Return the plan of a run of this many steps, and cache it."""
    told: list[str] = []
    found = plan(
        job, gpu=H200, fidelity="same", clock=SlowLoading(), steps=steps, once=DEAR, workers=1,
        tell=told.append, keep=KEPT,
    )  # fmt: skip
    assert not [line for line in told if "beginning again" in line], "every lower bound held"
    return found


@pytest.mark.stored_rehearsals
@pytest.mark.whole
def test_a_short_run_has_another_best_recipe(job: Job) -> None:
    endless, short = searched(job, None), searched(job, 3)
    assert "workers" in endless.best.recipe
    assert "workers" not in short.best.recipe
    assert short.best.step_seconds > endless.best.step_seconds
    assert endless.best.once_seconds > short.best.once_seconds + 100
    assert (endless.steps, short.steps) == (None, 3)


@pytest.mark.stored_rehearsals
@pytest.mark.whole
def test_the_best_of_a_run_is_what_brute_force_finds(job: Job) -> None:
    """Evaluate every recipe alone: (once + steps x step) / steps, beside the steady step."""
    steps = 3
    parts = Parts(
        job, [H200], SingleGpuTimer(SlowLoading()), shallow=False, run=PlannedRun(steps=steps, rates=DEAR)
    )
    steady = Parts(job, [H200], SingleGpuTimer(SlowLoading()), shallow=False)
    paces = {}
    space = space_of(job, fidelity=Fidelity.SAME, capability=(9, 0), fixed=kept_of(job, KEPT))
    for each in space.candidates:
        figures = parts.evaluate([each.setup])[0][0]
        assert figures.step_seconds == pytest.approx(steady.evaluate([each.setup])[0][0].seconds)
        assert figures.seconds == pytest.approx((figures.once + steps * figures.step_seconds) / steps)
        paces[str(each.recipe)] = figures.seconds
    best = searched(job, steps).best
    assert best.pace(steps) <= min(paces.values()) * (1 + AS_FAST), "a simpler recipe may be slightly slower"
    assert best.pace(steps) == pytest.approx(paces[best.recipe])


@pytest.mark.stored_rehearsals
@pytest.mark.whole
def test_many_gpus_look_at_the_run_too(job: Job) -> None:
    asked = {
        "fidelity": "same",
        "keep": KEPT,
        "clock_of": lambda gpu: SlowLoading(),
        "once": DEAR,
        "workers": 1,
    }
    long, short = (plan_gpus(job, [H200], steps=steps, **asked) for steps in (100_000, 3))
    assert "workers" in long.answers[0].choice.recipe
    assert "workers" not in short.answers[0].choice.recipe
    alone = searched(job, 3).best
    assert short.answers[0].choice.recipe == alone.recipe
    assert short.answers[0].choice.step_seconds == pytest.approx(alone.step_seconds)
    assert short.answers[0].choice.once_seconds == alone.once_seconds


@pytest.mark.parametrize("family", slow_but(["gpt2", "gemma2"], 1))
def test_few_layers_tell_what_many_pay_once(family: str) -> None:
    """The lower bound of the share never exceeds the share. In this test both are equal."""
    deep = small_job(family, 6, batch_size=2)
    parts = Parts(deep, [H200], SingleGpuTimer(lambda trace: 0.0), run=PlannedRun(steps=1))
    setup = setup_of("bf16 + every_layer + micro_batches(2)")
    ((bound,),) = parts.screen([setup])
    assert bound.seconds == pytest.approx(parts.evaluate([setup])[0][0].once)


def test_a_run_without_end_shares_nothing(job: Job) -> None:
    opening, trace = StartupShares(job, ENDLESS_RUN), Trace((), (), (), (kernel(),), (), ())
    seconds, share = opening.of(Setup(), trace)
    assert seconds > STARTUP_RATES.imports
    assert (share, opening.least_share(Setup(), [])) == (0.0, 0.0)


@pytest.mark.parametrize("steps", slow_but([0, -1, True, 1.5, "10", 10**13], lambda steps: steps in (0, 1.5)))
def test_a_length_that_is_none(job: Job, steps: Any) -> None:
    with pytest.raises(UsageError, match=r"steps is .*whole number of steps from 1"):
        plan(job, gpu=H200, steps=steps, keep=KEPT)
