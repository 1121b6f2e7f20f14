"""Law 5, for layers, steps and micro-batches: an extended trace equals a trace recorded in full.

The traces must be equal in every field: blocks with their module and kind, events, marks, and kernels
with their work. Equal traces have equal footprints; one test also asserts that directly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from small_models import small_job
from snugfit.job.job import Job, Phase
from snugfit.rehearsal import rehearse as room
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import record_step, rehearse
from snugfit.rehearsal.trace.depth import depth_of, is_periodic
from snugfit.rehearsal.trace.relative import PhaseStart, RelativeTrace
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.batches import micro_batches
from snugfit.step.open_step import open_step
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from tiers import slow_but

CUDA = CudaPolicy()


def setup_of(recipe: str) -> Setup:
    return Recipe.parse(recipe).setup()


def whole(job: Job, setup: Setup, *, loop: str = "plain", steps: int = 3) -> tuple[Trace, RelativeTrace]:
    """Return a trace recorded in full, and its relative form."""
    recording = record_step(open_step(job, setup, loop, torch.device("meta")), CUDA, steps)
    return recording.trace, RelativeTrace.of(recording.trace, recording.marks)


def same(left: Trace | None, right: Trace) -> None:
    """Require equal fields, and report the first difference."""
    assert left is not None, "refused"
    for name in ("events", "blocks", "marks", "kernels", "waits", "attention"):
        mine, theirs = getattr(left, name), getattr(right, name)
        if mine != theirs and isinstance(mine, tuple):
            place = next((n for n, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]), -1)
            pytest.fail(f"{name}[{place}]: {mine[place]} is not {theirs[place]}; {len(mine)}, {len(theirs)}")
        assert mine == theirs, name


RELATIVE = [
    ("bert", "plain"),
    ("gpt2", "fp16 + every_layer"),
    ("llama", "bf16 + adafactor + micro_batches(2)"),
    ("t5", "adamw_loop"),
]


@pytest.mark.parametrize(("family", "recipe"), slow_but(RELATIVE, 2))
def test_a_relative_trace_is_its_trace(family: str, recipe: str) -> None:
    trace, relative = whole(small_job(family, 2), setup_of(recipe))
    same(relative.trace(), trace)


# ---- layers --------------------------------------------------------------------------------------------


def test_layers_that_never_come_round_are_refused() -> None:
    """Four layers with full attention and four with a window have no period."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}
    job, setup = small_job("qwen2", 8, window), setup_of("plain")
    assert depth_of(job, setup) is None


def test_a_stranger_among_the_layers_is_seen_in_the_model_itself() -> None:
    """A layer of another structure is visible in the model only; the config does not list it."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(9))
    assert is_periodic(torch.nn.Sequential(layers), 9, 1)
    layers[5] = torch.nn.Linear(4, 4, bias=False)
    assert not is_periodic(torch.nn.Sequential(layers), 9, 1)


def test_two_stacks_of_layers_of_different_depth_are_refused() -> None:
    assert depth_of(small_job("t5", 8, {"num_decoder_layers": 4}), setup_of("plain")) is None


# ---- steps and micro-batches ---------------------------------------------------------------------------

PIECES = [
    ("bert", "micro_batches(4) + fp16 + every_layer", {"clip": 1.0, "padding": 0.3}),
    ("gpt2", "micro_batches(4) + adafactor + lora", {}),
    ("llama", "micro_batches(8) + bf16 + adafactor_torch", {"decay_groups": True}),
    ("t5", "micro_batches(4) + adamw_loop", {}),
    ("vit", "micro_batches(4) + bf16_pure", {"phase": Phase.EVALUATE}),
]


@pytest.mark.parametrize(
    ("family", "recipe", "more"),
    slow_but(PIECES, 1),
)
def test_three_micro_batches_tell_of_many(
    family: str, recipe: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(step: object, *arguments: object) -> object:
        asked.append(step)
        return record_step(step, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "record_step", counted)
    job, setup = small_job(family, 2, batch_size=8, **more), setup_of(recipe)
    found = rehearse(job, setup, CUDA)
    assert [step.setup.micro_batches for step in asked] == [3], "simulated in full"  # type: ignore[attr-defined]
    same(found, whole(job, setup)[0])


STEADY = [
    ("bert", "plain", {"padding": 0.3}),
    ("gpt2", "micro_batches(2) + adafactor + lora", {}),
    ("llama", "micro_batches(3) + fp16 + every_layer", {"clip": 1.0}),
    ("vit", "bf16_pure + adamw_loop", {}),
]


@pytest.mark.parametrize(("family", "recipe", "more"), slow_but(STEADY, lambda case: case[0] == "gpt2"))
def test_two_steps_tell_of_three_where_they_are_known_to_be_steady(
    family: str, recipe: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []

    def counted(step: object, policy: object, steps: int) -> object:
        recorded.append(steps)
        return record_step(step, policy, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "record_step", counted)
    job, setup = small_job(family, 2, batch_size=6, **more), setup_of(recipe)
    found = rehearse(job, setup, CUDA, steady=True)
    assert recorded == [2]
    same(found, whole(job, setup)[0])
    rehearse(job, setup, CUDA)
    assert recorded == [2, 3]


@pytest.mark.parametrize(("recipe", "steady"), [("micro_batches(4)", False), ("micro_batches(2)", True)])
def test_a_step_that_is_not_steady_is_rehearsed_whole(
    recipe: str, steady: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer stores one more value in every step, so the third step differs from the second."""
    setup = replace(setup_of(recipe), optimizer=OptimizerWish(factory=Call(path=f"{__name__}:hoarder")))
    job = small_job("bert", 1)
    found = rehearse(job, setup, CUDA, steady=steady)
    same(found, whole(job, setup)[0])
    hoarded = [block for block in found.blocks if block.phase == "update" and block.nbytes == 12_345 * 4]
    assert len(hoarded) == 1 + 2 + 4


def hoarder(parameters: object, **_: object) -> torch.optim.Optimizer:
    class Hoarder(torch.optim.Optimizer):
        kept: tuple[torch.Tensor, ...] = ()

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            more = (torch.empty(12_345, device="meta") for _ in range(len(self.kept) + 1))
            self.kept = (*self.kept, *more)

    return Hoarder(parameters, {})  # type: ignore[arg-type]


def test_the_cpu_s_policy_repeats_too() -> None:
    job, setup = small_job("gpt2", 2), setup_of("micro_batches(4)")
    trace = record_step(open_step(job, setup, "plain", torch.device("meta")), CpuPolicy(), 3).trace
    same(rehearse(job, setup, CpuPolicy()), trace)


def test_marks_say_which_step_it_is() -> None:
    found = RelativeTrace.of(rehearse(small_job("bert", 2), setup_of("micro_batches(4)"), CUDA))
    assert {move.step for move in found.moves if isinstance(move, PhaseStart)} == {-1, 0, 1, 2}


def test_a_rehearsed_batch_takes_the_memory_of_one_sample() -> None:
    """A million pictures are twelve gigabytes, and a laptop must be able to plan for such a batch."""
    job = small_job("vit", 2, batch_size=1 << 20)
    batch = next(micro_batches(job, setup_of("plain"), torch.device("meta"), 1))[0]
    assert batch["pixel_values"].shape == (1 << 20, 3, 32, 32)
    assert batch["pixel_values"].untyped_storage().nbytes() == 3 * 32 * 32 * 4
    inputs = [block.nbytes for block in rehearse(job, setup_of("sgd"), CUDA).blocks if block.phase == "load"]
    assert inputs[:2] == [(3 * 32 * 32 * 4) << 20, 8 << 20]
