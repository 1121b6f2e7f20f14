"""Parts of a plan: what is remembered serves every recipe, and pieces of a step are timed as the step is."""

from __future__ import annotations

import pytest

from small_models import small_job
from snugfit.errors import SnugfitError
from snugfit.job.gpu import find_gpu
from snugfit.planning.clock import GpuClocks, seconds_of
from snugfit.planning.parts import Parts
from snugfit.planning.workers import Bench, Question, Worker, bench
from snugfit.rehearsal.policy import CudaPolicy
from snugfit.rehearsal.sizes import rehearse_sizes, update_of
from snugfit.rehearsal.splice import rehearse_update
from snugfit.rehearsal.tape import Tape
from snugfit.techniques.recipe import Recipe

GPUS = [find_gpu(name) for name in ("h200", "v100-16gb")]


@pytest.mark.parametrize("recipe", ["fp32", "fp16 + every_layer"])  # a scaler asks: the host waits
@pytest.mark.parametrize("pieces", [1, 3])
def test_pieces_of_a_step_take_as_long_as_the_step(recipe: str, pieces: int) -> None:
    job, setup = small_job("bert", 2, batch_size=4), Recipe.parse(recipe).setup()
    passes = rehearse_sizes(job, setup, CudaPolicy(), [1], whole=False)
    update = update_of(rehearse_update(job, setup, CudaPolicy(), passes.gradients))
    works = [passes.cut[1].first, *[passes.cut[1].further] * (pieces - 1), update.work]
    clock = GpuClocks(GPUS)
    told = seconds_of(clock, works)
    assert told == pytest.approx(seconds_of(clock.__call__, works), rel=1e-12)
    assert len(told) == 2
    assert told == seconds_of(clock, works), "and again from memory"


def test_what_was_rehearsed_for_tf32_is_not_taken_for_ieee() -> None:
    job, clock = small_job("bert", 2, batch_size=2), GpuClocks(GPUS[:1])
    setups = [Recipe.parse(text).setup() for text in ("tf32", "ieee")]
    together, alone = Parts(job, GPUS[:1], clock), [Parts(job, GPUS[:1], clock) for _ in setups]
    assert [together.judge([setup]) for setup in setups] == [
        parts.judge([setup]) for parts, setup in zip(alone, setups, strict=True)
    ]
    assert together.screen(setups)[1] == alone[1].screen(setups[1:])[0]
    dtypes = {kernel.dtype for kernel in together.tape(setups[0])[0].kernels}
    assert "tf32" not in dtypes


def test_a_clock_that_does_not_join_is_given_a_tape() -> None:
    seen: list[Tape] = []

    def clock(tape: Tape) -> tuple[float]:
        seen.append(tape)
        return (float(len(tape.kernels)),)

    job, setup = small_job("bert", 2), Recipe.parse("fp16").setup()
    passes = rehearse_sizes(job, setup, CudaPolicy(), [], whole=True)
    update = update_of(rehearse_update(job, setup, CudaPolicy(), passes.gradients))
    assert passes.whole is not None
    first, last = passes.whole.first, update.work
    assert seconds_of(clock, [first, last]) == (len(first.kernels) + len(last.kernels),)
    offset = len(first.kernels)
    assert seen[0].waits == (*first.waits, *(offset + place for place in last.waits))


def answers(at: Bench, questions: list[Question]) -> dict[int, object]:
    """What a bench says to these questions."""
    waiting = list(questions)
    return dict(at.answers(lambda place: waiting.pop() if waiting else None))


def test_workers_answer_as_parts_do_and_a_killed_one_is_told() -> None:
    job, clock = small_job("bert", 2, batch_size=2), GpuClocks(GPUS[:1])
    setups = [Recipe.parse(text).setup() for text in ("fp32", "bf16")]
    questions: list[Question] = [(0, "judge", ([setups[0]],)), (1, "screen", ([setups[1]],))]
    processes = []

    def ask_and_kill() -> None:
        with bench(job, GPUS[:1], clock, workers=2, shallow=True) as there:
            processes.extend(place.process for place in there.places if isinstance(place, Worker))
            assert answers(there, questions) == answers(Bench([Parts(job, GPUS[:1], clock)]), questions)
            processes[0].kill()
            processes[0].join()
            answers(there, questions)

    with pytest.raises(SnugfitError, match="killed"):
        ask_and_kill()
    assert [process.is_alive() for process in processes] == [False, False]
