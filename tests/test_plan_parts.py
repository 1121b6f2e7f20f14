"""Parts of a plan.

Cached parts serve every recipe, and pieces of a step are timed like the whole step. Bounds from few layers
and few micro-batches never exceed the exact figures.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from small_models import small_job
from snugfit.errors import SnugfitError
from snugfit.job.batch import SyntheticDataset
from snugfit.job.gpu import find_gpu
from snugfit.planning.cost.batch_sizes import rehearse_sizes, update_of
from snugfit.planning.cost.figures import Bound
from snugfit.planning.cost.lowered import CACHE_SHARE
from snugfit.planning.cost.parts import Parts
from snugfit.planning.cost.parts_pool import parts_pool
from snugfit.planning.cost.periodic import MIN_PERIODIC, AllocatorPeaks, Requests, replay_periodic
from snugfit.planning.cost.same_trace import trace_under
from snugfit.planning.cost.timer import GpuTimers, seconds_of
from snugfit.planning.search.state import TIME_BOUND_MARGIN
from snugfit.prediction.allocator import Allocator, Replay, replay
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.splice import rehearse_update
from snugfit.rehearsal.trace.relative import Alloc, Free, PhaseStart, TraceEvent
from snugfit.rehearsal.trace.repeat import PeriodicRun, Piece
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step import batches
from snugfit.techniques.batching.micro_batches import MicroBatches
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from tiers import crossed, slow_but

GPUS = [find_gpu(name) for name in ("h200", "v100-16gb")]


@pytest.mark.parametrize(
    ("recipe", "pieces"),
    crossed(["as_loaded", "fp16 + every_layer"], [1, 3]),  # the scaler makes the host wait
)
def test_pieces_of_a_step_take_as_long_as_the_step(recipe: str, pieces: int) -> None:
    job, setup = small_job("bert", 2, batch_size=4), Recipe.parse(recipe).setup()
    passes = rehearse_sizes(job, setup, CudaPolicy(), [1], whole=False)
    update = update_of(rehearse_update(job, setup, CudaPolicy(), passes.gradients))
    works = [passes.by_samples[1].first, *[passes.by_samples[1].further] * (pieces - 1), update.work]
    clock = GpuTimers(GPUS)
    told = seconds_of(clock, works)
    assert told == pytest.approx(seconds_of(clock.__call__, works), rel=1e-12)
    assert len(told) == 2
    assert told == seconds_of(clock, works), "and again from memory"


def test_what_was_rehearsed_for_tf32_is_not_taken_for_ieee() -> None:
    job, clock = small_job("bert", 1, batch_size=2), GpuTimers(GPUS[:1])
    setups = [Recipe.parse(text).setup() for text in ("tf32", "ieee")]
    together, alone = Parts(job, GPUS[:1], clock), [Parts(job, GPUS[:1], clock) for _ in setups]
    assert [together.evaluate([setup]) for setup in setups] == [
        parts.evaluate([setup]) for parts, setup in zip(alone, setups, strict=True)
    ]
    assert together.screen(setups)[1] == alone[1].screen(setups[1:])[0]
    dtypes = {kernel.dtype for kernel in whole_trace(together, setups[0]).kernels}
    assert "tf32" not in dtypes


def test_a_clock_that_does_not_join_is_given_a_trace() -> None:
    seen: list[Trace] = []

    def clock(trace: Trace) -> tuple[float]:
        seen.append(trace)
        return (float(len(trace.kernels)),)

    job, setup = small_job("bert", 2), Recipe.parse("fp16").setup()
    passes = rehearse_sizes(job, setup, CudaPolicy(), [], whole=True)
    update = update_of(rehearse_update(job, setup, CudaPolicy(), passes.gradients))
    assert passes.whole is not None
    first, last = passes.whole.first, update.work
    assert seconds_of(clock, [first, last]) == (len(first.kernels) + len(last.kernels),)
    offset = len(first.kernels)
    assert seen[0].waits == (*first.waits, *(offset + place for place in last.waits))


def answers(pool: WorkerPool, questions: list[Question]) -> dict[int, object]:
    """Return the pool's answers, by the number of the question."""
    return dict(pool.answers_to(questions))


@pytest.mark.whole
def test_workers_answer_as_parts_do_and_a_killed_one_is_told() -> None:
    job, clock = small_job("bert", 2, batch_size=2), GpuTimers(GPUS[:1])
    setups = [Recipe.parse(text).setup() for text in ("as_loaded", "bf16")]
    questions: list[Question] = [
        Question(0, "evaluate", ([setups[0]],)),
        Question(1, "screen", ([setups[1]],)),
    ]
    processes = []

    def ask_and_kill() -> None:
        with parts_pool(job, GPUS[:1], clock, workers=2, shallow=True) as pool:
            processes.extend(worker.process for worker in pool.workers)
            assert answers(pool, questions) == answers(WorkerPool([Parts(job, GPUS[:1], clock)]), questions)
            processes[0].kill()
            processes[0].join()
            answers(pool, questions)

    with pytest.raises(SnugfitError, match="killed"):
        ask_and_kill()
    assert [process.is_alive() for process in processes] == [False, False]


# ---- bounds from few layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("as_loaded", marks=pytest.mark.slow),
        pytest.param(
            "fp16 + every_nth_layer(2) + micro_batches(4)",  # the scaler's check makes the host wait
            marks=pytest.mark.slow,
        ),
        "bf16 + tf32 + segments + adamw_8bit + workers",  # waits for each parameter
        pytest.param("bf16_pure + every_layer + adafactor_torch + micro_batches(2)", marks=pytest.mark.slow),
    ],
)
def test_joined_pieces_of_few_layers_take_no_longer_than_the_step(recipe: str) -> None:
    pytest.importorskip("bitsandbytes")
    job, setup = small_job("bert", 9, batch_size=4), Recipe.parse(recipe).setup()
    parts = Parts(job, GPUS, GpuTimers(GPUS))
    for least, figures in zip(parts.screen([setup])[0], parts.evaluate([setup])[0], strict=True):
        assert 0.99 * figures.seconds < least.seconds <= (1 + TIME_BOUND_MARGIN) * figures.seconds
        assert least.needed_bytes <= figures.requested_bytes + figures.context_bytes


@pytest.mark.whole
@pytest.mark.parametrize(("n", "layers"), slow_but([(2, 12), (3, 20)], 1))
def test_what_only_a_second_recomputed_layer_keeps_is_not_taken_for_growth(n: int, layers: int) -> None:
    """T5's first layers create the attention biases, which the checkpoints of later layers keep."""
    job, setup = small_job("t5", layers, batch_size=2), Recipe.parse(f"lora + every_nth_layer({n})").setup()
    parts = Parts(job, GPUS[:1], GpuTimers(GPUS[:1]))
    assert len(parts.shallow_jobs.of(setup)) == 2
    trace = whole_trace(parts, setup)
    assert parts.lower_bounds.of([setup]).per_setup[0].live_bytes <= trace.peak().nbytes


def test_updates_are_rehearsed_once_whatever_is_recomputed() -> None:
    parts = Parts(small_job("bert", 9, batch_size=2), GPUS[:1], GpuTimers(GPUS[:1]))
    for recipe in ("as_loaded", "every_nth_layer(2)"):
        parts.screen([Recipe.parse(recipe).setup()])
    assert len(parts.lower_bounds._updates) == 2, "one for each of two depths"


@pytest.mark.parametrize("pieces", slow_but([MIN_PERIODIC, 2 * MIN_PERIODIC], 1))
@pytest.mark.parametrize(
    ("family", "recipe"),
    slow_but(
        [
            ("llama", "lora + bf16 + expandable"),
            ("bert", "fp16 + every_layer + adamw_loop"),
            ("llama", "fp16 + every_layer + adamw_loop"),
            ("bert", "lora + bf16 + expandable"),
        ],
        1,
    ),
)
def test_few_micro_batches_tell_what_many_take(family: str, recipe: str, pieces: int) -> None:
    job = small_job(family, 2, batch_size=pieces)
    setup = Recipe.parse(f"{recipe} + micro_batches({pieces})").setup()
    parts = Parts(job, GPUS, GpuTimers(GPUS))
    found = parts.evaluate([setup])[0]
    trace = whole_trace(parts, setup)
    after = replay(trace, expandable=setup.expandable_segments)
    assert found[0][:3] == (after.requested_peak, after.allocated_peak, after.reserved_peak)
    seconds = GpuTimers(GPUS)(trace_under(setup, trace))
    assert [each.seconds for each in found] == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("pieces", slow_but([17, 3, 16, 23], 1))
def test_whole_periods_of_micro_batches_are_left_out(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job, setup = small_job("llama", 2, batch_size=pieces), Recipe.parse(f"micro_batches({pieces})").setup()
    run = Parts(job, GPUS, GpuTimers(GPUS)).run(setup)
    assert run is not None
    after = replay(run.relative().trace())
    allocations: list[int] = []
    allocate = Allocator.allocate

    def count(self: Allocator, nbytes: int, *where: Any) -> Any:
        allocations.append(nbytes)
        return allocate(self, nbytes, *where)

    monkeypatch.setattr(Allocator, "allocate", count)
    assert replay_periodic(Requests(run), expandable=False) == peaks(after)
    assert len(allocations) < max(0.5, 6 / pieces) * sum(event > 0 for event in run.relative().trace().events)


def test_runs_by_chance_take_what_they_take_in_full() -> None:
    """The result also holds if micro-batches leave blocks behind, so that each starts from another state."""
    rng = random.Random(0)
    for _ in range(60):
        run = run_by_chance(rng)
        trace = run.relative().trace()
        for expandable in (False, True):
            after = replay(trace, expandable=expandable)
            assert replay_periodic(Requests(run), expandable=expandable) == peaks(after)


def run_by_chance(rng: random.Random) -> PeriodicRun:
    """Return a random run. Each piece frees as many blocks as it allocates, of the same sizes. A
    micro-batch may keep one."""
    sizes = (700, 600_000, 3 << 20, 12 << 20, 30 << 20)
    stacks = [Alloc(size, "", "", rng.choice(("forward", "backward")), "") for size in sizes]
    build = rng.choices(stacks, k=3)
    counted = itertools.count()
    live = Counter(build)

    def churn() -> list[TraceEvent]:
        allocs = rng.choices(stacks, k=rng.randrange(1, 6))
        there = live + Counter(allocs)
        moves: list[TraceEvent] = [*allocs]
        for alloc in rng.sample(allocs, len(allocs)):
            moves.append(Free(alloc, rng.randrange(there[alloc])))
            there[alloc] -= 1
        return moves

    def step() -> list[Piece]:
        gradient = rng.choice(stacks)
        first = [PhaseStart(next(counted), "forward"), *churn(), gradient]
        live[gradient] += 1
        middle = churn() + [rng.choice(stacks)] * (rng.random() < 0.2)
        last = [*churn(), Free(gradient, 0)]
        live[gradient] -= 1
        return [Piece(first), Piece(middle, rng.randrange(1, 12)), Piece(last)]

    return PeriodicRun(build, [step(), step()], 3, (), (), ())


def peaks(after: Replay) -> AllocatorPeaks:
    return AllocatorPeaks(after.requested_peak, after.allocated_peak, after.reserved_peak)


def whole_trace(parts: Parts, setup: Setup) -> Trace:
    """Return the spliced step in full."""
    run = parts.run(setup)
    assert run is not None
    return run.relative().trace()


def test_millions_of_samples_are_not_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a million has 49 divisors, and their micro-batches hold two and a half million samples."""
    made: list[int] = []
    for kind in (batches._OneSample, SyntheticDataset):
        plain = kind.__getitem__

        def count(self: Any, index: int, plain: Any = plain) -> Any:
            made.append(index)
            return plain(self, index)

        monkeypatch.setattr(kind, "__getitem__", count)
    job = small_job("bert", 2, batch_size=1_000_000)
    sizes = [job.batch_size // cut.n for cut in MicroBatches.settings(job)]
    assert len(sizes) == 48
    assert sizes == [size for size in range(500_000, 0, -1) if 1_000_000 % size == 0]
    passes = rehearse_sizes(job, Recipe().setup(), CudaPolicy(), sizes[:3], whole=True)
    assert set(passes.by_samples) == set(sizes[:3])
    assert len(made) < 50


@pytest.mark.parametrize("recipe", slow_but(["bf16_pure", "bf16 + micro_batches(2)", "eager"], 1))
@pytest.mark.parametrize("architecture", slow_but(["t5", "gpt2"], 1))
def test_recomputing_takes_no_less_than_what_is_said_of_it_beforehand(architecture: str, recipe: str) -> None:
    """Recomputation may choose another attention kernel. T5's bias is then contiguous, and cuDNN's
    libraries may be loaded or not."""
    parts = Parts(small_job(architecture, 2, batch_size=2), GPUS[:1], GpuTimers(GPUS[:1]))
    without, recomputed = (
        parts.screen([Recipe.parse(f"{recipe} + {technique}").setup()])[0][0]
        for technique in ("keep_all", "every_layer")
    )
    assert recomputed.needed_bytes >= without.resting_bytes
    assert recomputed.seconds >= without.seconds * (1 - CACHE_SHARE)


WIDE = {"hidden_size": 512, "intermediate_size": 2048}


def parts_of_wide_layers() -> Parts:
    return Parts(small_job("bert", 2, WIDE, batch_size=2), GPUS[:1], GpuTimers(GPUS[:1]))


def screened_recomputed(parts: Parts, engine: str) -> Bound:
    recipe = Recipe.parse(f"bf16 + every_layer + micro_batches(2) + sgd + {engine}")
    return parts.screen([recipe.setup()])[0][0]


@pytest.mark.slow  # Inductor lowers the layers
@pytest.mark.whole
def test_recomputed_compiled_layers_take_no_less_than_uncompiled_ones_say() -> None:
    """Autocast keeps weight copies until an uncompiled forward pass ends, but none for compiled layers."""
    parts = parts_of_wide_layers()
    uncompiled, compiled = (screened_recomputed(parts, engine) for engine in ("uncompiled", "compiled"))
    assert uncompiled.needed_bytes > compiled.needed_bytes >= uncompiled.compiled_bytes


def test_the_bound_of_recomputed_compiled_layers_leaves_out_a_layer_s_weight_copies() -> None:
    parts = parts_of_wide_layers()
    bound = screened_recomputed(parts, "uncompiled")
    copied = 2 * 2 * WIDE["hidden_size"] * WIDE["intermediate_size"]
    assert bound.resting_bytes <= bound.compiled_bytes <= bound.needed_bytes - copied
