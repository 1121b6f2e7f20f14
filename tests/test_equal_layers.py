"""Predictions from few layers and few micro-batches: equal to those of the whole step, to the last digit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.prediction import predict as room
from snugfit.prediction import seconds as queue
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.rehearsal import few_layers
from snugfit.rehearsal import rehearse as rehearsing
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.splice import rehearse_passes, rehearse_update, splice
from snugfit.rehearsal.trace.relative import Alloc, PhaseStart
from snugfit.rehearsal.trace.repeat import widen
from snugfit.rehearsal.trace.trace import MarkKind
from snugfit.step.step import SKIPPED
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

GPU = find_gpu("h200")
CUDA = policy_for(GPU, Software())
DEEP = 9
CASES = [
    ("bert", "bf16", True),
    ("gpt2", "fp16 + micro_batches(4) + every_layer", True),
    ("llama", "lora + bf16 + every_layer + micro_batches(4)", True),
    ("llama", "bf16", False),
    ("t5", "adafactor + bf16_pure", False),
    ("mixtral", "lora + bf16 + micro_batches(2)", True),
    ("bert", "adamw_8bit + tf32 + expandable", True),
]
OFTEN = [CASES[6]]


@pytest.mark.parametrize(("family", "recipe", "is_used"), slow_but(CASES, OFTEN.__contains__))
def test_a_prediction_from_few_layers_is_the_whole_one(
    family: str, recipe: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the whole document: bytes, seconds, timeline, anatomy and doubts.

    A step is simulated in full if few layers leave the result open. Here T5 is slow, because
    `test_law_depth.py` derives its moves from few layers in every run.
    """
    pytest.importorskip("peft" if "lora" in recipe else "bitsandbytes" if "8bit" in recipe else "torch")
    monkeypatch.setattr(few_layers, "DEEP", DEEP)
    monkeypatch.setattr(few_layers, "FEWEST_PERIODS", 2)
    monkeypatch.setattr(few_layers, "WRITTEN_SHARE", 0)
    found: list[bool] = []

    def few(*asked: Any, **how: Any) -> Any:
        trace = rehearse_from_few_layers(*asked, **how)
        found.append(trace is not None)
        return trace

    job = small_job(family, DEEP, batch_size=8)
    monkeypatch.setattr(room, "rehearse_from_few_layers", few)
    short = predict(job, recipe, gpu=GPU)
    monkeypatch.setattr(room, "rehearse_from_few_layers", lambda *asked, **how: None)
    whole = predict(job, recipe, gpu=GPU)
    assert json.dumps(short.to_json()) == json.dumps(whole.to_json())
    assert found == [True] or not is_used


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe", "loop"),
    slow_but(
        [
            ("gpt2", "lora + bf16 + micro_batches(5)", "trainer"),
            ("bert", "fp16 + adamw_fused + micro_batches(5)", "accelerate"),
            ("llama", "bf16 + every_layer + micro_batches(2)", "trainer"),
            ("mixtral", "adafactor + micro_batches(5)", "trainer"),
        ],
        1,
    ),
)
def test_few_layers_and_micro_batches_of_another_loop_are_its_whole_steps(
    family: str, recipe: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft" if "lora" in recipe else loop.replace("trainer", "accelerate"))
    monkeypatch.setattr(few_layers, "DEEP", DEEP - 2)
    monkeypatch.setattr(few_layers, "FEWEST_PERIODS", 2)
    monkeypatch.setattr(few_layers, "WRITTEN_SHARE", 0)
    job, setup = small_job(family, DEEP - 2, batch_size=10), Recipe.parse(recipe).setup()
    found = rehearse_from_few_layers(job, setup, CUDA, loop=loop)
    monkeypatch.setattr(rehearsing, "short_run", lambda *asked, **how: None)
    assert found == rehearsing.rehearse(job, setup, CUDA, loop=loop)


def test_skipped_micro_batches_that_are_not_periodic_are_refused() -> None:
    """The skipped span frees a block that the repeated one does not allocate again."""
    kept, more = Alloc(4, "aten::add", "", "forward", "activations"), Alloc(8, "aten::mul", "", "forward", "")
    step: list[Any] = [PhaseStart(0, "load")]
    for phase in ("forward", "forward", SKIPPED, "forward"):
        step += [PhaseStart(0, phase), PhaseStart(0, "clip")]
    pieces = widen([*step, MarkKind.STEP_END], 4)
    assert pieces is not None
    assert [times for _, times in pieces] == [1, 2, 1]
    before = step.index(PhaseStart(0, SKIPPED))
    assert widen([*step[:before], kept, *step[before:]], 4) is None
    assert widen([*step[: before + 1], more, *step[before + 1 :]], 4) is None


def test_what_is_no_passes_and_update_is_rehearsed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "DEEP", 4)
    monkeypatch.setattr(few_layers, "FEWEST_PERIODS", 2)
    monkeypatch.setattr(few_layers, "WRITTEN_SHARE", 0)
    job = small_job("bert", 9, batch_size=8)
    assert rehearse_from_few_layers(job, Recipe.parse("bf16").setup(), CUDA) is not None
    for recipe, gpus in (("ddp", 2), ("released", 1), ("captured", 1)):
        setup = room.on_gpus(Recipe.parse(recipe).setup(), gpus)
        assert rehearse_from_few_layers(job, setup, CUDA) is None, recipe


@pytest.mark.parametrize(
    ("family", "recipe", "pieces"),
    slow_but(
        [
            ("llama", "micro_batches(8) + every_layer", 8),
            ("t5", "micro_batches(8) + fp16", 8),
            ("bert", "bf16 + micro_batches(8)", 8),
            ("gpt2", "micro_batches(8)", 8),
        ],
        1,
    ),
)
def test_equal_micro_batches_are_written_and_replayed_once(family: str, recipe: str, pieces: int) -> None:
    """The trace equals the moves of all micro-batches, and the allocator has the same state after it."""
    job, setup = small_job(family, 2, batch_size=16), Recipe.parse(recipe).setup()
    passes = rehearse_passes(job, setup, CUDA)
    run = splice(passes, rehearse_update(job, setup, CUDA, passes.gradients), micro_batches=pieces)
    assert run is not None
    written, plain = run.trace(), run.relative().trace()
    assert written == plain
    assert written.periods
    for period in written.periods:
        ends = range(period.start, period.start + period.events * period.times, period.events)
        first = written.events[ends[0] : ends[0] + period.events]
        for time, start in enumerate(ends):
            by = time * period.blocks
            assert written.events[start : start + period.events] == tuple(
                event + by if event > 0 else event - by for event in first
            )
    for how in ({}, {"expandable": True}, {"limit": 1 << 20}):
        assert replay(written, **how) == replay(plain, **how)


def test_kernels_that_are_one_object_are_asked_about_once() -> None:
    setup = Recipe.parse("bf16 + micro_batches(8)").setup()
    job = small_job("bert", 2, batch_size=8)
    passes = rehearse_passes(job, setup, CUDA)
    run = splice(passes, rehearse_update(job, setup, CUDA, passes.gradients), micro_batches=8)
    assert run is not None
    kernels = run.trace().kernels
    asked: list[Any] = []
    for given in (kernels, list(kernels), tuple(replace_first(kernels))):
        asked.clear()
        values = queue.each_once(lambda kernel: (asked.append(kernel), kernel.flops)[1], given)
        assert values == [kernel.flops for kernel in given]
        assert len(asked) < len(given) / 2


def replace_first(kernels: Any) -> Any:
    first, *rest = kernels
    return first._replace(flops=1), *rest


def test_a_trace_is_equal_whatever_is_known_of_its_periods() -> None:
    setup = Recipe.parse("micro_batches(4)").setup()
    job = small_job("bert", 1, batch_size=8)
    passes = rehearse_passes(job, setup, CUDA)
    run = splice(passes, rehearse_update(job, setup, CUDA, passes.gradients), micro_batches=4)
    assert run is not None
    trace = run.trace()
    assert replace(trace, periods=()) == trace
