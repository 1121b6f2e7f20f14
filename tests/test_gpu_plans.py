"""Plans for many GPUs: each GPU gets its single-GPU plan, which brute force confirms; more memory never
hurts."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.errors import SnugfitError, UsageError
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.planning.cost import parts as parts_room
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.parts import Parts
from snugfit.planning.cost.same_trace import with_sizes
from snugfit.planning.cost.timer import (
    ComposableTimer,
    GpuTimers,
    PerGpuTimers,
    SingleGpuTimer,
    TimersWithGaps,
    seconds_of,
)
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.fleet.kinds import kinds_of, search_kinds
from snugfit.planning.fleet.search_gpus import plan_gpus, search_each
from snugfit.planning.keep import Kept, kept_of
from snugfit.planning.search.progress import Tell
from snugfit.planning.search.search import plan
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import Candidate, Space, space_of
from snugfit.prediction.device import common_policy, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.worker_pool import SpareProcesses, WorkerPool
from snugfit.rehearsal.device.policy import ComparedPolicy, PoliciesDiffer
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Kernel, Trace, Work
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.units import MIB

H200 = find_gpu("h200")

KEPT = {slot: roster.plain(slot) for slot in (Slot.CHECKPOINTING, Slot.ALLOCATOR, Slot.ENGINE)}
"""Fixed slots of tests that only compare two searches."""

FREE = (Slot.ATTENTION, Slot.OPTIMIZER, Slot.CHECKPOINTING, Slot.BATCHING, Slot.ALLOCATOR, Slot.LOADING)
FEW = {slot: roster.plain(slot) for slot in Slot if slot not in FREE}
"""Fixed slots of tests that evaluate each recipe by itself."""

ALL_BUT_PRECISION = {slot: roster.plain(slot) for slot in Slot if slot is not Slot.PRECISION}
"""Fixed slots of tests for which few recipes suffice."""


LT = {("cuBLASLt workspace", 1048576): 1048576}


@dataclass(frozen=True)
class Invented:
    """An invented device: a kernel takes the larger of arithmetic and traffic, and a launch."""

    bandwidth: float

    def __call__(self, trace: Trace) -> float:
        return sum(map(self._seconds, trace.kernels))

    def _seconds(self, kernel: Kernel) -> float:
        return max(kernel.flops / 1e11, kernel.nbytes / self.bandwidth) + 1e-6


def clock_of(gpu: Gpu) -> Invented:
    """Return an invented GPU's clock; the table's entry has its bandwidth."""
    return Invented(float(gpu.bandwidth or 0))


def invented(memory: int, *, bandwidth: int = 10**9, like: str = "h200") -> Gpu:
    key = f"{like}-{memory}-{bandwidth}"
    return replace(find_gpu(like), key=key, memory_bytes=memory, bandwidth=bandwidth)


@pytest.fixture(scope="module")
def job() -> Job:
    return small_job("gpt2", 2, batch_size=1, sequence_length=32)


@pytest.fixture(scope="module")
def everything(job: Job) -> list[tuple[Recipe, Figures, Figures]]:
    """Return every recipe as exact as the plain one, with its figures on a slow device and on a fast one.

    Recipes of one trace are evaluated together. `test_plan_parts` shows that this changes no figure.
    """
    clock = PerGpuTimers((Invented(1e8), Invented(1e12)))
    parts = Parts(job, [H200, H200], clock, shallow=False)
    traces: dict[int, list[Candidate]] = defaultdict(list)
    few = kept_of(job, FEW)
    for each in space_of(job, fidelity=Fidelity.SAME, capability=(9, 0), fixed=few).candidates:
        traces[each.trace].append(each)
    judged = (
        zip(same, parts.evaluate([each.setup for each in same]), strict=True) for same in traces.values()
    )
    return [(each.recipe, slow, fast) for group in judged for each, (slow, fast) in group]


def sizes(everything: list[tuple[Recipe, Figures, Figures]]) -> list[int]:
    """Return memory sizes between which the best recipe changes, and one that is too small for all."""
    found = sorted({slow.needed_bytes for _, slow, _ in everything})
    return sorted({found[0] - 1, *found[:: max(1, len(found) // 5)], found[-1]})


def not_plain(recipe: Recipe) -> int:
    return sum(recipe[slot] != roster.plain(slot) for slot in Slot)


def simplest_of(everything: list[tuple[Recipe, Figures, Figures]], which: int, memory: int | None) -> Figures:
    """Return the figures of the simplest recipe that is as fast as the fastest fitting one.

    It equals that one except for plain techniques in some slots.
    """

    def order(recipe: Recipe, figures: Figures) -> tuple[float, int, int, str]:
        return figures.seconds, figures.needed_bytes, not_plain(recipe), str(recipe)

    fitting = [(each[0], each[which]) for each in everything if each[which].needed_bytes <= (memory or 0)]
    fastest, most = min(fitting, key=lambda each: order(*each))
    as_fast = [
        (recipe, figures)
        for recipe, figures in fitting
        if figures.seconds <= most.seconds * (1 + AS_FAST)
        and all(recipe[slot] in (fastest[slot], roster.plain(slot)) for slot in Slot)
    ]
    return min(as_fast, key=lambda each: (not_plain(each[0]), *order(*each)))[1]


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_each_gpu_gets_what_brute_force_finds(
    job: Job, everything: list[tuple[Recipe, Figures, Figures]]
) -> None:
    gpus = [
        invented(memory, bandwidth=bandwidth) for memory in sizes(everything) for bandwidth in (10**8, 10**12)
    ]
    found = plan_gpus(job, gpus, headroom=0, fidelity="same", clock_of=clock_of, workers=1, keep=FEW)
    assert [answer.gpu for answer in found.answers] == gpus
    assert len(found.counts) == 1, "one search for all"
    for answer in found.answers:
        which = 1 if answer.gpu.bandwidth == 10**8 else 2
        fitting = [each[which] for each in everything if each[which].needed_bytes <= answer.gpu.memory_bytes]
        assert answer.fits == bool(fitting)
        assert answer.choice is not None
        if fitting:
            best = simplest_of(everything, which, answer.gpu.memory_bytes)
            assert answer.choice.step_seconds == pytest.approx(best.seconds)
            assert answer.choice.needed_bytes == best.needed_bytes
        else:
            least = min(each[which].needed_bytes for each in everything)
            near = [each[which] for each in everything if each[which].needed_bytes <= least * 1.03]
            assert answer.choice.needed_bytes <= least * 1.03
            assert answer.choice.step_seconds == pytest.approx(min(figures.seconds for figures in near))


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_more_memory_or_bandwidth_never_gives_a_slower_answer(
    job: Job, everything: list[tuple[Recipe, Figures, Figures]]
) -> None:
    memories, bandwidths = sizes(everything)[1:], (10**8, 10**9, 10**10)
    gpus = [invented(memory, bandwidth=bandwidth) for bandwidth in bandwidths for memory in memories]
    found = plan_gpus(job, gpus, headroom=0, fidelity="same", clock_of=clock_of, workers=1, keep=FEW)
    rows = [found.answers[n : n + len(memories)] for n in range(0, len(gpus), len(memories))]
    seconds = [[answer.pace(None) or 0.0 for answer in row] for row in rows]
    for row in seconds:
        for less, more in itertools.pairwise(row):
            assert more <= less * (1 + AS_FAST), "less memory was faster"
    for column in zip(*seconds, strict=True):
        for less, more in itertools.pairwise(column):
            assert more <= less * (1 + AS_FAST), "less bandwidth was faster"
    assert found.smallest is not None
    assert found.smallest.gpu.memory_bytes == memories[0]
    assert found.smallest.gpu.bandwidth == 10**10, "the fastest of equal recipes"
    assert found.fastest is not None
    assert found.fastest.gpu.bandwidth == 10**10


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_together_as_one_by_one(job: Job) -> None:
    """Search three GPUs of the table in two searches, and compare the answers with three plans."""
    gpus = [find_gpu(name) for name in ("t4", "rtx 4090", "rtx 5090")]
    found = plan_gpus(job, [*gpus, "RTX 4090"], fidelity="same", workers=1, keep=KEPT | FEW)
    assert len(found.counts) == 2
    for gpu, answer in zip(gpus, found.answers, strict=True):
        alone = plan(job, gpu=gpu, fidelity="same", workers=1, keep=KEPT | FEW)
        assert answer.choice == alone.best
        assert answer.measured_rates is False
        assert "data sheet" in answer.rates


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_an_answer_is_by_the_gpu_s_own_scratch_and_workspaces() -> None:
    """The scratch memory of sums over many rows depends on the number of multiprocessors."""
    job = small_job("bert", 1, {"max_position_embeddings": 2048}, batch_size=4, sequence_length=2048)
    gpus = [find_gpu(name) for name in ("rtx 3060", "rtx 4090", "rtx pro 6000")]
    found = plan_gpus(job, gpus, fidelity="same", objective="memory", workers=1, keep=KEPT)
    assert len(found.counts) == 1
    taken = set()
    for answer in found.answers:
        assert answer.choice is not None
        alone = predict(job, answer.choice.recipe, gpu=answer.gpu).footprint
        assert answer.choice.reserved_bytes == alone.reserved_bytes
        assert answer.choice.requested_bytes == alone.requested_bytes
        assert answer.choice.needed_bytes == alone.nvml_bytes
        taken.add(answer.choice.requested_bytes)
    assert len(taken) > 1, "this job shows no difference between the GPUs"
    assert all(answer.verified for answer in found.answers), "scratch is a large share of so small a job"


def test_one_rehearsal_tells_what_gpus_of_other_sizes_take() -> None:
    """Compare block by block, including sums over many rows and workspaces.

    A GPU with another number of buffers is left out.
    """
    job = small_job("bert", 1, {"max_position_embeddings": 2048}, batch_size=4, sequence_length=2048)
    setup = Recipe.parse("bf16").setup()
    names = ("rtx 3060", "rtx 4090", "rtx pro 6000")
    first, *others = (policy_for(find_gpu(name), Software()) for name in names)
    compared = ComparedPolicy.of(first, others)
    trace = rehearse(job, setup, compared)
    owns = {other: rehearse(job, setup, other) for other in others}
    told = {other: with_sizes(trace, sizes) for other, sizes in compared.sizes.items() if sizes is not None}
    assert all(owns[other] == own for other, own in told.items())
    assert any(own != trace for own in told.values()), "this job shows no difference between the GPUs"


def test_recipes_of_one_trace_are_simulated_in_full_by_one_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result on each GPU equals that of a separate simulation; a later GPU reuses the same simulation.

    Two steps are recorded for recipes whose steps were found alike.
    """
    job = small_job("bert", 1, batch_size=2)
    gpus = [find_gpu(name) for name in ("rtx 3060", "rtx 4090")]
    rehearsed: list[bool] = []

    def counted(*arguments: Any, steady: bool = False) -> Trace:
        rehearsed.append(steady)
        return rehearse(*arguments, steady=steady)

    monkeypatch.setattr(parts_room, "rehearse", counted)
    parts, judged = (Parts(job, gpus, TimersWithGaps.on(gpus)) for _ in range(2))
    plain, other = (Recipe.parse(text).setup() for text in ("bf16", "bf16 + expandable + workers"))
    together = parts.whole([(plain, [0, 1]), (other, [1])])
    [[[first]], [[second]]] = (parts.whole([(plain, [gpu])]) for gpu in (0, 1))
    assert [[first, second], *parts.whole([(other, [1])])] == together
    assert rehearsed == [False]
    judged.evaluate([plain])
    [[second]] = judged.whole([(plain, [1])])
    [[first]] = judged.whole([(plain, [0])])  # derived from a rehearsal for the other GPU
    assert [[first, second], *judged.whole([(other, [1])])] == together
    assert rehearsed == [False, True]
    assert together[0][1].seconds != together[1][0].seconds, "workers make its batches"


def test_what_a_model_makes_of_a_gpu_s_threads_is_its_own() -> None:
    """cuDNN's dropout has as many states as the GPU has threads; they are no buffer of a kernel."""
    first, *others = (policy_for(find_gpu(name), Software()) for name in ("rtx 3060", "rtx 4090"))
    compared = ComparedPolicy.of(first, others)
    assert compared.sizes == {others[0]: {("cuBLAS workspace", 8519680): 8519680, **LT}}
    assert compared.resident_threads == 28 * 1536
    assert compared.sizes == {others[0]: None}


@pytest.mark.parametrize("width", [128, 224])
def test_gpus_that_run_another_attention_are_not_told_by_this_one(width: int) -> None:
    wide = {"hidden_size": 2 * width, "num_attention_heads": 2, "hidden_dropout_prob": 0.1}
    names = ("rtx 4090", "rtx 3060", "a100-sxm-80")
    first, *others = (policy_for(find_gpu(name), Software()) for name in names)
    compared = ComparedPolicy.of(first, others)
    rehearse(small_job("bert", 1, wide), Recipe.parse("bf16").setup(), compared)
    alike, larger = (compared.sizes[other] is not None for other in others)
    assert (alike, larger) == (True, width == 128)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_the_smallest_recipe_is_the_same_question_for_all(
    job: Job, everything: list[tuple[Recipe, Figures, Figures]]
) -> None:
    gpus = [invented(1 << 40, bandwidth=bandwidth) for bandwidth in (10**8, 10**12)]
    asked = {"fidelity": "same", "objective": "memory", "keep": FEW}
    found = plan_gpus(job, gpus, clock_of=clock_of, workers=1, **asked)
    least = min(slow.needed_bytes for _, slow, _ in everything)
    assert {answer.choice.needed_bytes for answer in found.answers if answer.choice} == {least}


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_what_cannot_be_told_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(find_gpu("t4"), key="no-rates", bandwidth=None)
    unsized = replace(find_gpu("t4"), key="no-size", memory_bytes=None)
    found = plan_gpus(job, [slow, find_gpu("mi300x"), unsized], fidelity="same", workers=1, keep=KEPT | FEW)
    no_rates, no_cuda, no_size = found.answers
    assert no_rates.fits is True, "its bytes are known"
    assert no_rates.choice is not None
    assert no_rates.choice.step_seconds == no_rates.choice.samples_per_second == 0
    assert no_rates.pace(None) is None
    assert "seconds" in no_rates.why
    t4 = find_gpu("t4")
    [smallest] = plan_gpus(job, [t4], fidelity="same", objective="memory", workers=1, keep=KEPT | FEW).answers
    assert smallest.choice is not None
    assert no_rates.choice.needed_bytes == smallest.choice.needed_bytes, (
        "the smallest, because its speed is unknown"
    )
    for answer in (no_cuda, no_size):
        assert (answer.fits, answer.choice) == (None, None)
        assert answer.why
    assert found.fastest is None


def test_gpus_that_run_other_kernels_are_searched_apart() -> None:
    """Within a kind, only the clock and the workspaces differ; attention and techniques are the same."""
    names = ("T4", "V100-SXM2-16", "RTX4090", "RTX5090", "A100-SXM-80", "H200-SXM", "B200")
    kinds = {name: policy_for(find_gpu(name), Software()).decisions for name in names}
    assert kinds["T4"] == kinds["V100-SXM2-16"] != kinds["RTX4090"]
    assert kinds["RTX4090"] == kinds["RTX5090"]
    assert len({kinds[key] for key in ("RTX4090", "A100-SXM-80", "H200-SXM", "B200")}) == 4, (
        "wide heads make them differ"
    )
    setup, job = Recipe.parse("bf16").setup(), small_job("bert", 2)
    traces = {
        key: rehearse(job, setup, policy_for(find_gpu(key), Software())).kernels
        for key in ("RTX4090", "RTX5090", "H200-SXM", "B200")
    }
    assert traces["RTX4090"] == traces["RTX5090"]
    assert traces["H200-SXM"] == traces["B200"] != traces["RTX4090"]


def test_gpus_that_differ_by_grouped_products_share_a_search_of_models_without() -> None:
    """One simulation meets a decision on which the GPUs differ: the search then runs for each GPU alone."""
    gpus = [find_gpu("b300"), find_gpu("rtx 4090")]
    (kind,), _ = kinds_of(gpus, Kept())
    assert kind == gpus
    own, other = (policy_for(gpu, Software()) for gpu in gpus)
    common, compared = common_policy(gpus, Software()), ComparedPolicy.of(own, [other])
    assert own.decisions != other.decisions
    assert not common.fuses_groups(torch.float32)
    assert not compared.fuses_groups(torch.float32)
    assert compared.sizes[other] is not None
    with pytest.raises(PoliciesDiffer, match="different kernels"):
        common.fuses_groups(torch.bfloat16)
    assert compared.fuses_groups(torch.bfloat16)
    assert compared.sizes[other] is None


@pytest.mark.whole
@pytest.mark.stored_rehearsals
@pytest.mark.slow
@pytest.mark.parametrize("width", [224, 128])
def test_gpus_that_differ_by_wide_heads_share_a_search_of_narrow_ones(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 2 * width, "num_attention_heads": 2, "hidden_dropout_prob": 0.1}
    job, gpus = small_job("bert", 2, wide), ["rtx 4090", "a100-sxm-80"]
    found = plan_gpus(job, gpus, workers=1, keep=ALL_BUT_PRECISION)
    assert len(found.counts) == (1 if width <= 128 else 2)
    for gpu, answer in zip(gpus, found.answers, strict=True):
        assert answer.choice == plan(job, gpu=gpu, workers=1, keep=ALL_BUT_PRECISION).best


def test_seconds_of_those_that_have_none_are_nothing(job: Job) -> None:
    trace = rehearse(job, Recipe().setup(), policy_for(H200, Software()))
    clock, seconds = (
        TimersWithGaps.on([replace(H200, key="no-rates", bandwidth=None), H200]),
        GpuTimers([H200]),
    )
    assert clock(trace) == (0.0, *seconds(trace))
    work = Work(trace.kernels, trace.waits)
    assert seconds_of(clock, [work, work]) == (0.0, *seconds_of(seconds, [work, work]))
    assert isinstance(clock, ComposableTimer)


@dataclass
class OwnScratch:
    """A worker in which the candidates of a space take 99 bytes, and as many seconds as their number.

    Recipes with the first size of passes take `more` by the second GPU's own policy.
    """

    space: Space
    more: int
    by_search: int = 99
    whole_ones: list[int] = field(default_factory=list)

    def number(self, setup: Setup) -> int:
        return next(n for n, one in enumerate(self.space.candidates) if one.setup is setup)

    def screen(self, setups: Sequence[Setup]) -> list[tuple[Bound, Bound]]:
        return [(Bound(10, 1.0 + self.number(setup)),) * 2 for setup in setups]

    def evaluate(self, setups: Sequence[Setup]) -> list[tuple[Figures, Figures]]:
        return [(figures(99, 1.0 + self.number(setup)),) * 2 for setup in setups]

    def whole(self, asked: Sequence[tuple[Setup, Sequence[int]]]) -> list[list[Figures]]:
        numbers = [self.number(setup) for setup, _ in asked]
        self.whole_ones += numbers
        first = self.space.candidates[0].sized
        return [
            [
                figures(
                    self.by_search
                    + (self.more if gpu and self.space.candidates[number].sized == first else 0),
                    1.0 + number,
                )
                for gpu in gpus
            ]
            for number, (_, gpus) in zip(numbers, asked, strict=True)
        ]


def own_answers(job: Job, memory: int, **how: int) -> tuple[list[Any], OwnScratch]:
    space = space_of(job, fidelity=Fidelity.SAME, fixed=kept_of(job, FEW))
    told = OwnScratch(space, **how)
    gpus = [replace(H200, key=key, memory_bytes=memory) for key in ("first", "second")]
    headroom = dict.fromkeys(("first", "second"), 0)
    pool = WorkerPool([told])  # type: ignore[list-item]
    return search_each(space, pool, gpus, headroom, [False, False], lambda what: None), told


def test_an_answer_that_does_not_fit_by_its_own_simulation_makes_way(job: Job) -> None:
    """Recipes with the same passes take as much more, and are not simulated in full."""
    (first, second), told = own_answers(job, 100, more=6)
    candidates = first.state.space.candidates
    assert (first.answer, first.verified, second.verified) == (0, True, True)
    assert candidates[second.answer].sized != candidates[0].sized
    assert told.whole_ones[-1] == second.answer
    passes = [*map(second.state.passes_of, told.whole_ones)]
    assert len(passes) == len(set(passes)), "one simulation for all recipes with the same passes"
    near, _ = own_answers(job, 98, more=6)
    assert not any(one.state.evaluated[one.answer].needed_bytes <= 98 for one in near), "the nearest miss"


@pytest.mark.parametrize(("more", "by_search", "same"), [(1, 99, True), (0, 100, False)])
def test_only_the_gpu_s_own_bytes_may_differ_from_the_search(
    job: Job, more: int, by_search: int, same: bool
) -> None:
    (_, second), _ = own_answers(job, 1000, more=more, by_search=by_search)
    assert (second.verified, second.state.evaluated[second.answer].needed_bytes) == (same, 100)


def count_concavely(trace: Trace) -> float:
    """Count time so that extrapolation from few layers fails: the line through them is above the curve."""
    return len(trace.kernels) ** 0.25


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_layers_that_do_not_grow_evenly_are_rehearsed_whole_for_all_gpus() -> None:
    job, told = small_job("gpt2", 6, batch_size=1), []
    gpus = [invented(1 << 40), invented(1 << 41)]
    found = plan_gpus(
        job, gpus, fidelity="same", objective="memory", clock_of=lambda _: count_concavely, workers=1,
        tell=told.append, keep=ALL_BUT_PRECISION,
    )  # fmt: skip
    assert any("starting again" in line for line in told)
    assert [answer.verified for answer in found.answers] == [True, True]


def figures(needed: int, seconds: float) -> Figures:
    return Figures(needed, needed, needed, 0, seconds)


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_the_answers_survive_json(job: Job) -> None:
    gpus = [invented(1 << 40), invented(100 * MIB), find_gpu("mi300x")]
    found = plan_gpus(job, gpus, fidelity="same", clock_of=clock_of, workers=1, keep=KEPT | FEW)
    document: dict[str, Any] = json.loads(json.dumps(found.to_json()))
    assert GpuPlans.from_json(document) == found
    assert document["smallest"] == document["fastest"] == gpus[0].key
    for damage in ({"schema": 99}, {"what": "plan"}, {"answers": [{}]}, {"counts": [1]}):
        with pytest.raises(UsageError):
            GpuPlans.from_json({**document, **damage})


@pytest.mark.slow
def test_two_processes_find_what_one_finds(job: Job) -> None:
    gpus = [find_gpu("t4"), find_gpu("h200")]
    alone, together = (plan_gpus(job, gpus, fidelity="same", workers=count, keep=KEPT) for count in (1, 2))
    assert [answer.choice for answer in together.answers] == [answer.choice for answer in alone.answers]


def test_an_unknown_objective_is_refused_before_any_work(job: Job) -> None:
    with pytest.raises(UsageError, match="speed"):
        plan_gpus(job, [H200], objective="sped")


def test_one_clock_is_one_of_several() -> None:
    trace = Trace((), (), (), (), (), ())
    assert SingleGpuTimer(lambda _: 2.0)(trace) == (2.0,)
    assert PerGpuTimers((lambda _: 2.0, lambda _: 3.0))(trace) == (2.0, 3.0)


def test_kinds_of_gpus_are_answered_in_order_and_split_where_they_differ() -> None:
    kinds = [[find_gpu("t4"), find_gpu("h200")], [find_gpu("a100-80gb")]]

    def search(kind: Sequence[Gpu], workers: int, tell: Tell) -> list[str]:
        if len(kind) > 1:
            raise PoliciesDiffer
        tell("searching")
        return [gpu.key for gpu in kind]

    for side_by_side in (1, 2):
        said: list[str] = []
        spare = SpareProcesses()
        found = search_kinds(
            search, kinds, workers=2, side_by_side=side_by_side, spare=spare, tell=said.append
        )
        assert spare.take() == (side_by_side > 1), "no kind is left to start"
        assert found == [[gpu.key] for kind in kinds for gpu in kind]
        assert len(said) == 3
        assert all("of 2 (1 GPUs): searching" in one for one in said)


def test_a_search_ends_where_one_beside_it_failed() -> None:
    kinds, failed = [[find_gpu("t4")], [find_gpu("h200")]], threading.Event()

    def search(kind: Sequence[Gpu], workers: int, tell: Tell) -> None:
        if kind is kinds[0]:
            failed.set()
            raise SnugfitError("no recipe")
        failed.wait()
        while True:
            tell("still searching")

    with pytest.raises(SnugfitError, match="no recipe"):
        search_kinds(search, kinds, workers=2, side_by_side=2, spare=SpareProcesses(), tell=lambda what: None)
