"""Law 5, for layers, steps and micro-batches: what is written again equals what is rehearsed whole.

Equal is meant in every field of a tape: each block with its module and kind, each event, each mark, each
kernel with its work. From equal tapes follow equal footprints; that is asserted once, for the eye.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from small_models import small_job
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.prediction.allocator import replay
from snugfit.rehearsal import rehearse as room
from snugfit.rehearsal.depth import comes_round, depth_of
from snugfit.rehearsal.extend import extended
from snugfit.rehearsal.grow import grown
from snugfit.rehearsal.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse, rehearsed
from snugfit.rehearsal.score import Birth, Entry, Score
from snugfit.rehearsal.tape import Tape
from snugfit.step.batches import micro_batches
from snugfit.step.step import open_step
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Call, OptimizerWish, Setup

CUDA = CudaPolicy()


def setup_of(recipe: str) -> Setup:
    return Recipe.parse(recipe).setup()


def whole(job: Job, setup: Setup, *, loop: str = "plain", steps: int = 3) -> tuple[Tape, Score]:
    """A rehearsal in which nothing is written again."""
    tape, notes = rehearsed(open_step(job, setup, loop, torch.device("meta")), CUDA, steps)
    return tape, Score.of(tape, notes)


def same(left: Tape | None, right: Tape) -> None:
    """All fields are equal; says which differs first."""
    assert left is not None, "refused"
    for name in ("events", "blocks", "marks", "kernels", "waits", "attention", "doubts"):
        mine, theirs = getattr(left, name), getattr(right, name)
        if mine != theirs and isinstance(mine, tuple):
            place = next((n for n, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]), -1)
            pytest.fail(f"{name}[{place}]: {mine[place]} is not {theirs[place]}; {len(mine)}, {len(theirs)}")
        assert mine == theirs, name


SCORES = [
    ("bert", "plain"),
    ("gpt2", "fp16 + every_layer"),
    ("llama", "bf16 + adafactor + micro_batches(2)"),
    ("t5", "adamw_loop"),
]


@pytest.mark.parametrize(("family", "recipe"), SCORES)
def test_a_score_is_its_tape(family: str, recipe: str) -> None:
    tape, score = whole(small_job(family, 2), setup_of(recipe))
    same(score.tape(), tape)


# ---- layers --------------------------------------------------------------------------------------------

LAYERS = [
    ("bert", 7, "fp16", {"clip": 1.0, "padding": 0.3}),
    ("bert", 7, "lora + bf16", {}),
    ("bert", 6, "eager + every_layer + micro_batches(3)", {"batch_size": 3}),
    ("bert", 7, "bf16", {"phase": Phase.EVALUATE}),
    ("gpt2", 14, "segments(2) + adamw_loop", {}),
    ("gpt2", 12, "every_nth_layer(2) + sgd", {}),
    ("llama", 7, "micro_batches(2) + adafactor_torch", {}),
    ("t5", 6, "every_layer + sgd", {}),
    ("vit", 7, "bf16", {}),
    ("mixtral", 7, "fp16 + every_layer", {}),
    ("gemma2", 13, "bf16", {}),
    ("modernbert", 19, "sgd", {}),
]
if os.environ.get("SNUGFIT_ALL_TRUTH") == "1":  # what the ones above say too, once more
    LAYERS += [
        ("bert", 7, "plain", {}),
        ("bert", 9, "adafactor", {"decay_groups": True}),
        ("bert", 14, "segments(2)", {}),
        ("bert", 7, "adamw_fused", {"build_on": "host"}),
        ("llama", 8, "bf16_pure + every_layer", {"clip": 1.0}),
        ("t5", 6, "plain", {}),
    ]


@pytest.mark.parametrize(("family", "layers", "recipe", "more"), LAYERS)
def test_few_layers_extended_equal_many(
    family: str, layers: int, recipe: str, more: dict[str, object]
) -> None:
    job, setup = small_job(family, layers, **more), setup_of(recipe)
    found, truth = extended(job, setup, CUDA), whole(job, setup)[0]
    same(found, truth)
    assert found is not None
    assert found.digest() == truth.digest()
    assert replay(found) == replay(truth)


@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_layers_extend_under_the_other_loops_too(loop: str) -> None:
    job, setup = small_job("bert", 7), setup_of("bf16")
    same(extended(job, setup, CUDA, loop=loop), whole(job, setup, loop=loop)[0])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("meta-llama/Llama-3.1-8B", "bf16_pure + every_layer + lora")],
)
def test_full_size_models_extend(name: str, recipe: str) -> None:
    task = Task.CAUSAL_LM if "llama" in name else Task.SEQUENCE_CLASSIFICATION
    job, setup = Job(model=Model.find(name), task=task, batch_size=2), setup_of(recipe)
    same(extended(job, setup, CUDA), rehearse(job, setup, CUDA))


def test_layers_that_never_come_round_are_refused() -> None:
    """Four layers with full attention, then four with a window: no number of layers repeats that."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}
    job, setup = small_job("qwen2", 8, window), setup_of("plain")
    assert depth_of(job, setup) is None
    assert extended(job, setup, CUDA) is None


def test_a_stranger_among_the_layers_is_seen_in_the_model_itself() -> None:
    """The config says nothing of a layer that was built otherwise; the model does."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(9))
    assert comes_round(torch.nn.Sequential(layers), 9, 1)
    layers[5] = torch.nn.Linear(4, 4, bias=False)
    assert not comes_round(torch.nn.Sequential(layers), 9, 1)


def test_what_has_too_few_layers_is_refused() -> None:
    assert extended(small_job("bert", 5), setup_of("plain"), CUDA) is None
    assert extended(small_job("bert", 12), setup_of("segments"), CUDA) is None
    assert depth_of(small_job("t5", 8, {"num_decoder_layers": 4}), setup_of("plain")) is None


def test_the_third_score_is_the_proof() -> None:
    """Another size, another death or a move more in it, and nothing is grown from the other two."""
    scores = [whole(small_job("bert", layers), setup_of("sgd"))[1] for layers in (3, 4, 5)]
    assert grown(scores, 2) == scores[2]
    moves = list(scores[2].moves)
    place = next(n for n, move in enumerate(moves) if isinstance(move, Birth) and move.phase == "backward")
    birth = moves[place]
    assert isinstance(birth, Birth)
    wrong = [
        [*moves[:place], birth._replace(nbytes=birth.nbytes + 512), *moves[place + 1 :]],
        [*moves[:place], birth, *moves[place:]],
        [*moves[:place], *moves[place + 1 :]],
    ]
    for tampered in wrong:
        assert grown([*scores[:2], Score(tuple(tampered), scores[2].attention)], 4) is None


# ---- steps and micro-batches ---------------------------------------------------------------------------

PIECES = [
    ("bert", "micro_batches(4)", {}),
    ("bert", "micro_batches(4) + fp16 + every_layer", {"clip": 1.0, "padding": 0.3}),
    ("gpt2", "micro_batches(4) + adafactor + lora", {}),
    ("llama", "micro_batches(8) + bf16 + adafactor_torch", {"decay_groups": True}),
    ("t5", "micro_batches(4) + adamw_loop", {}),
    ("vit", "micro_batches(4) + bf16_pure", {"phase": Phase.EVALUATE}),
]


@pytest.mark.parametrize(("family", "recipe", "more"), PIECES)
def test_three_micro_batches_tell_of_many(
    family: str, recipe: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(step: object, *arguments: object) -> object:
        asked.append(step)
        return rehearsed(step, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "rehearsed", counted)
    job, setup = small_job(family, 2, batch_size=8, **more), setup_of(recipe)
    found = rehearse(job, setup, CUDA)
    assert [step.setup.micro_batches for step in asked] == [3], "rehearsed whole"  # type: ignore[attr-defined]
    same(found, whole(job, setup)[0])


def test_a_step_that_is_not_steady_is_rehearsed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that keeps something more with every step: a third step is not the second again."""
    setup = replace(
        setup_of("micro_batches(4)"), optimizer=OptimizerWish(factory=Call(path=f"{__name__}:hoarder"))
    )
    job = small_job("bert", 2)
    found = rehearse(job, setup, CUDA)
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
    tape, _ = rehearsed(open_step(job, setup, "plain", torch.device("meta")), CpuPolicy(), 3)
    same(rehearse(job, setup, CpuPolicy()), tape)


def test_marks_say_which_step_it_is() -> None:
    found = Score.of(rehearse(small_job("bert", 2), setup_of("micro_batches(4)"), CUDA))
    assert {move.step for move in found.moves if isinstance(move, Entry)} == {-1, 0, 1, 2}


def test_a_rehearsed_batch_takes_the_memory_of_one_sample() -> None:
    """A million pictures are twelve gigabytes; a planner asks about such batches on a laptop."""
    job = small_job("vit", 2, batch_size=1 << 20)
    batch = next(micro_batches(job, setup_of("plain"), torch.device("meta")))[0]
    assert batch["pixel_values"].shape == (1 << 20, 3, 32, 32)
    assert batch["pixel_values"].untyped_storage().nbytes() == 3 * 32 * 32 * 4
    inputs = [block.nbytes for block in rehearse(job, setup_of("sgd"), CUDA).blocks if block.phase == "load"]
    assert inputs[:2] == [(3 * 32 * 32 * 4) << 20, 8 << 20]
