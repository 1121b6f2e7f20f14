"""Steps that are recorded as CUDA graphs and replayed: equal numbers, equal guarantees and accurate
rehearsals.

CUDA graphs need a GPU. Here a replay runs the recorded work again (`run_again.py`). The results and memory of
a GPU are measured there (`src/snugfit/features/engine/tests/captured_on_gpu.py`).
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_again import RunAgain, batch_of, captured_on_cpu

from small_models import small_job
from small_runs import CPU, assert_same_weights, bert_job, events, killed_in, layers_of, losses, small_run
from snugfit.errors import RecipeError, SnugfitError, UsageError
from snugfit.features.engine.replay.batch import fill_up, layout_of, longest_sequence
from snugfit.features.engine.replay.graphs import REHEARSED
from snugfit.features.engine.replay.step import CapturedStep
from snugfit.frontends.next_recipe import next_recipe
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import COPY_IN, Trace
from snugfit.step.applier import refuse_unsupported
from snugfit.step.build import build_model
from snugfit.step.open_step import open_step
from snugfit.step.selective import checkpoint_arguments
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.loop import TrainingStep
from snugfit.training.run.train import train
from tiers import crossed, slow_but

RECIPES = (
    "plain",
    "bf16 + adamw_fused",
    "micro_batches(2) + sgd",
    "bf16_pure + adafactor + micro_batches(4)",
    "bf16_master + adamw_fused",
    "lora + adamw_fused",
)
PLAYED_UPDATES = ("plain", "bf16 + adamw_fused", "bf16_master + adamw_fused", "lora + adamw_fused")
"""Recipes whose optimizers can be recorded."""


class Quiet(Observer):
    """An observer that ignores all events."""


def run(recipe: str, family: str = "bert", *, clip: float | None = 0.05, steps: int = 5) -> Any:
    job = replace(small_job(family, 2, batch_size=4), clip=clip, learning_rate=1e-2)
    torch.manual_seed(3)
    step = open_step(job, Recipe.parse(recipe).setup(), "plain", torch.device("cpu"), keep_losses=True)
    return step, step.run(steps, Quiet())


# ---- the same numbers ------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(("clip", "recipe"), crossed([None, 0.05], RECIPES))
def test_steps_that_are_played_are_those_that_are_written(recipe: str, clip: float | None) -> None:
    """Losses and weights are equal bit for bit, with dropout. From the second step on, all work is
    replayed.
    """
    written, expected = run(recipe, clip=clip)
    with captured_on_cpu() as graphs:
        played, ours = run("captured" if recipe == "plain" else f"{recipe} + captured", clip=clip)
    assert ours == expected
    assert_same_weights(played.model, written.model)
    count = Recipe.parse(recipe).setup().micro_batches
    per_step = 2 * count + (clip is not None) + (recipe in PLAYED_UPDATES)
    assert graphs[0].played == 4 * per_step
    assert graphs[0].recorded == 2 * min(count, 2) + (clip is not None) + (recipe in PLAYED_UPDATES)


@pytest.mark.whole
@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_what_cannot_be_recorded_runs_as_it_is_written(refused: int) -> None:
    _, expected = run("plain")
    with captured_on_cpu(refused) as graphs:
        played, ours = run("captured")
    assert ours == expected
    assert (graphs[0].recorded, graphs[0].played) == (refused, 0)
    assert played.runner.why_not == "it waits"


@pytest.mark.whole
def test_without_a_gpu_steps_run_as_they_are_written() -> None:
    played, ours = run("captured")
    assert ours == run("plain")[1]
    assert played.runner is None


# ---- a run -----------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(["adamw_fused", "bf16_pure + adafactor", "bf16_master + released"], 1)
)
def test_a_run_is_the_same_and_goes_on_where_it_was_killed(tmp_path: Path, recipe: str) -> None:
    """Losses, norms, learning rates and weights agree, with a schedule, clipping, dropout and batches of
    several lengths.
    """
    recorded = f"{recipe} + captured(multiple=1)"
    job = bert_job(clip=1.0, layers=layers_of(recorded))
    whole = train(small_run(tmp_path / "written", recipe, job=job))
    with captured_on_cpu() as graphs:
        played = train(small_run(tmp_path / "played", recorded))
        killed_in(small_run(tmp_path / "killed", recorded, save_steps=5), 8)
        resumed = train(small_run(tmp_path / "killed", recorded, save_steps=5))
    assert graphs[0].played
    assert losses(tmp_path / "played") == losses(tmp_path / "written")
    assert_same_weights(played.model, whole.model)
    assert losses(tmp_path / "killed") == losses(tmp_path / "written")
    assert_same_weights(resumed.model, whole.model)


@pytest.mark.whole
def test_a_step_that_cannot_be_recorded_is_told_once(tmp_path: Path) -> None:
    with captured_on_cpu(1):
        train(small_run(tmp_path, "captured(multiple=16)"))
    told = [one["text"] for one in events(tmp_path, "warning")]
    assert told == ["Steps run without CUDA graphs: it waits. To record them, remove the cause."]


@pytest.mark.whole
def test_a_loss_that_is_no_number_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a replayed step too, the loss is read between the passes and the update."""
    recipe = "captured(multiple=16)"
    plain, count = TrainingStep.take, [0]

    def take(self: TrainingStep, running: Any, *more: Any) -> Any:
        count[0] += 1
        spoils = (
            running.model.register_forward_hook(lambda m, i, out: _spoilt(out)) if count[0] == 5 else None
        )
        try:
            return plain(self, running, *more)
        finally:
            if spoils is not None:
                spoils.remove()

    with captured_on_cpu():
        whole = train(small_run(tmp_path / "whole", recipe))
        monkeypatch.setattr(TrainingStep, "take", take)
        with pytest.raises(SnugfitError, match=r"Step 5: The loss is nan\. No weight was changed"):
            train(small_run(tmp_path / "run", recipe))
        monkeypatch.undo()
        resumed = train(small_run(tmp_path / "run", recipe))
    assert events(tmp_path / "run", "started")[1]["resumed_from"] == 4
    assert_same_weights(resumed.model, whole.model)


def _spoilt(out: Any) -> Any:
    out.loss = out.loss * float("nan")
    return out


@pytest.mark.whole
def test_when_memory_runs_out_what_was_recorded_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out within a replayed step. The run continues with smaller micro-batches, which are
    recorded again."""
    plain, steps = CapturedStep.update, [0]

    def update(self: CapturedStep, *more: Any) -> None:
        steps[0] += 1
        if steps[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        plain(self, *more)

    monkeypatch.setattr(CapturedStep, "update", update)
    with captured_on_cpu() as graphs:
        done = train(small_run(tmp_path, "captured(multiple=16)"), replan=next_recipe(CPU))
    assert done.outcome == "finished"
    assert len(graphs) == 2
    assert graphs[1].played
    assert [event["step"] for event in events(tmp_path, "step")] == [*range(1, 13)]


# ---- batches ---------------------------------------------------------------------------------------------


def test_lengths_are_filled_up_to_a_multiple_and_mean_the_same() -> None:
    labels = torch.tensor([[1, -100], [2, 3]])
    more = {"token_type_ids": torch.ones(2, 37)}
    pieces = [batch_of(30), batch_of(37, **more), {**batch_of(2), "labels": labels}]
    filled = fill_up(pieces, 16)
    assert [piece["input_ids"].shape for piece in filled] == [(2, 48)] * 3
    assert all(
        not piece["attention_mask"][:, length:].any()
        for piece, length in zip(filled, (30, 37, 2), strict=True)
    )
    assert filled[1]["token_type_ids"][:, 37:].eq(0).all()
    assert filled[2]["labels"][:, 2:].eq(-100).all()
    assert layout_of(filled[0]) == layout_of(batch_of(48))
    assert layout_of(filled[0]) != layout_of(filled[1])


def test_a_batch_without_a_mask_keeps_its_length() -> None:
    piece = {"input_ids": torch.ones(2, 30, dtype=torch.long)}
    assert fill_up([piece], 64)[0]["input_ids"].shape == (2, 30)


def test_no_batch_is_filled_up_beyond_the_model_s_positions() -> None:
    job = small_job("bert", 2, batch_size=2)
    assert longest_sequence(job) == 32
    piece = {name: torch.ones(2, 20, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    assert fill_up([piece], 64, longest_sequence(job))[0]["input_ids"].shape == (2, 32)
    assert longest_sequence(small_job("llama", 2, batch_size=2)) is None
    assert fill_up([piece], 64, 16)[0]["input_ids"].shape == (2, 20)


def test_classes_are_no_tokens() -> None:
    piece = {**batch_of(4), "labels": torch.tensor([0, 1])}
    assert torch.equal(fill_up([piece], 8)[0]["labels"], piece["labels"])


# ---- rehearsed -------------------------------------------------------------------------------------------


@functools.cache
def rehearsed(recipe: str, family: str = "bert", clip: float | None = 1.0, **changes: Any) -> Trace:
    job = replace(small_job(family, 2, batch_size=4), clip=clip, **changes)
    return rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())


class Unplayed(RunAgain):
    """Drops the recorded work, because a GPU's graphs do not hold Python objects either."""

    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        work()
        return lambda: None


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("bert", "bf16_master + fused + captured"),
        ("llama", "fused + captured + chunked_loss + first_layers(k=1)"),
        ("llama", "fused + released"),
        ("gpt2", "fused + segments(k=2)"),
    ],
)
def test_graphs_and_weights_go_with_the_step_that_made_them(family: str, recipe: str) -> None:
    """CUDA graphs and weights must be freed at once, because Python's garbage collector ignores their GPU
    memory.
    """
    job = replace(small_job(family, 2), clip=1.0)
    # The first import of a model's code leaves its callers' frames in a cycle within torch.
    build_model(job, Recipe().setup(), torch.device("meta"))
    graphs = [Unplayed()]
    token = REHEARSED.set(lambda: graphs[0])
    gc.disable()
    try:
        step: Any = open_step(job, Recipe.parse(recipe).setup(), "plain", CPU)
        step.run(3, Quiet())
        if "captured" in recipe:
            assert step.runner.norm is not None, step.runner.why_not
        parts = (step, graphs.pop(), *step.model.modules(), *step.model.parameters())
        kept = [weakref.ref(one) for one in parts]
        del parts
        del step
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()
        REHEARSED.reset(token)


@pytest.mark.parametrize("recipe", ["bf16 + adamw_fused", "bf16 + adamw_fused + micro_batches(2)"])
def test_the_last_step_plays_all_and_allocates_nothing(recipe: str) -> None:
    written, played = rehearsed(recipe), rehearsed(f"{recipe} + captured")
    last = max(block.step for block in played.blocks)
    assert last < max(mark.step for mark in played.phases)
    launched = [kernel.operator for kernel in played.kernels if not kernel.played]
    assert set(launched) <= {COPY_IN, "aten::fill_"}
    graphs = sum(kernel.programs for kernel in played.kernels)
    assert graphs == (4 if "micro" not in recipe else 6)
    assert [k.operator for k in played.kernels if k.played and k.operator != "aten::mul"] == [
        k.operator for k in written.kernels if k.operator not in (COPY_IN, "aten::mul")
    ]


def test_an_update_that_cannot_be_recorded_is_launched() -> None:
    played = rehearsed("bf16 + adafactor + captured")
    assert all(kernel.played for kernel in played.kernels if kernel.phase in ("forward", "backward"))
    assert not any(kernel.played for kernel in played.kernels if kernel.phase == "update")


def test_code_that_reads_the_device_is_not_recorded_and_that_is_said() -> None:
    played = rehearsed("bf16 + adamw_fused + captured", "mixtral")
    waits = rehearsed("bf16 + adamw_fused", "mixtral").waits
    assert bool(waits) == (not any(kernel.played for kernel in played.kernels))
    assert bool(waits) == any("cannot be recorded as CUDA graphs" in doubt for doubt in played.doubts)


@pytest.mark.parametrize("copies", ["moved", "made", ""])
def test_a_copy_from_the_host_is_not_recorded(copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows have none; a model that makes a tensor of numbers has one."""
    job = small_job("llama", 2, {"model_type": "mistral", "sliding_window": 4})
    if copies:
        from transformers.models.mistral.modeling_mistral import MistralMLP

        def two(device: torch.device) -> torch.Tensor:
            return torch.tensor([2.0], device=device) if copies == "made" else torch.tensor([2.0]).to(device)

        own = MistralMLP.forward
        monkeypatch.setattr(MistralMLP, "forward", lambda self, x: own(self, x) * two(x.device))
    trace = rehearse(job, Recipe.parse("captured").setup(), CudaPolicy())
    refused = [doubt for doubt in trace.doubts if "cannot be recorded as CUDA graphs" in doubt]
    assert bool(refused) == bool(copies)
    assert all("memory of the host that is not pinned" in doubt for doubt in refused)


def test_layers_are_recomputed_where_they_draw_no_random_numbers() -> None:
    """With recomputed layers, a model with dropout is not recorded. A model without dropout is recorded, and
    recomputes in the replay.
    """
    played = rehearsed("bf16 + adamw_fused + every_layer + captured", "llama")
    products = [
        kernel.phase
        for kernel in played.kernels
        if kernel.played and "scaled_dot_product" in kernel.operator and "backward" not in kernel.operator
    ]
    assert products == ["forward"] * 2 + ["backward"] * 2
    with pytest.raises(RecipeError, match=r"dropout again \(hidden_dropout_prob=0\.1\)"):
        Recipe.parse("every_layer + captured").check(small_job("bert"))
    # the config does not reveal its dropout
    drawing = rehearsed("bf16 + adamw_fused + every_layer + captured")
    assert not any(kernel.played for kernel in drawing.kernels)
    assert any("draws random numbers in a layer that is recomputed" in doubt for doubt in drawing.doubts)


@pytest.mark.whole
def test_layers_that_are_recomputed_give_the_same_numbers() -> None:
    written, expected = run("bf16 + every_layer", "llama")
    with captured_on_cpu() as graphs:
        played, ours = run("bf16 + every_layer + captured", "llama")
    assert ours == expected
    assert_same_weights(played.model, written.model)
    assert graphs[0].played


KEPT = "bf16 + adamw_fused + fused + selective(attention)"


def test_attention_with_dropout_is_kept_where_other_dropout_has_seeds() -> None:
    """A recorded step computes attention once; an eager step recomputes it."""
    played, written = rehearsed(f"{KEPT} + captured"), rehearsed(KEPT)
    assert not any("cannot be recorded as CUDA graphs" in doubt for doubt in played.doubts)
    assert [phase for phase in phases_of_attention(played) if phase] == ["forward"] * 2
    assert set(phases_of_attention(written)) == {"forward", "backward"}
    again = [one for one in played.kernels if one.played and one.phase == "backward"]
    assert any("add_norm" in one.operator and "backward" not in one.operator for one in again)


def test_so_it_is_of_padded_batches() -> None:
    """Padded batches use FlashAttention for sequences of several lengths, called by its operator's name."""
    played = rehearsed(f"{KEPT} + captured", padding=0.25)
    assert not any("cannot be recorded as CUDA graphs" in doubt for doubt in played.doubts)
    assert phases_of_attention(played) == ["forward"] * 2


def test_that_attention_is_computed_again_is_said_where_it_is() -> None:
    job = small_job("bert")
    said = [
        [one for one in Recipe.parse(recipe).check(job) if "computed again and not kept" in one]
        for recipe in (KEPT, f"{KEPT} + captured")
    ]
    assert [len(one) for one in said] == [1, 0]
    assert said[0][0].startswith("selective(attention): attention has dropout (attention_probs_dropout_prob")


def phases_of_attention(trace: Trace) -> list[str]:
    return [
        kernel.phase
        for kernel in trace.kernels
        if ("scaled_dot_product" in kernel.operator or "_flash_attention" in kernel.operator)
        and "backward" not in kernel.operator
        and (kernel.played or not any(one.played for one in trace.kernels))
    ]


@pytest.mark.whole
def test_dropout_with_seeds_is_the_same_in_layers_that_are_recomputed() -> None:
    """In 32 bits, results are equal to the bit. In 16 bits the residual must also be rounded before the first
    layer, because a recomputed layer reads it rounded."""
    job = replace(small_job("bert", 2, {"attention_probs_dropout_prob": 0.0}), clip=0.05)
    recipes = ("fused", "fused + selective(attention)", "bf16 + fused + selective(attention)")
    for kept, again in itertools.pairwise(recipes):
        steps = []
        for recipe in (kept, again):
            torch.manual_seed(3)
            with captured_on_cpu() as graphs:
                setup = Recipe.parse(f"{recipe} + captured").setup()
                step: Any = open_step(job, setup, "plain", CPU, keep_losses=True)
                steps.append((step.run(4, Quiet()), step.model))
            assert graphs[0].played
        if "bf16" not in again:
            assert steps[0][0] == steps[1][0]
            assert_same_weights(steps[0][1], steps[1][1])
        else:
            assert steps[0][0] == pytest.approx(steps[1][0], abs=2e-3)


def test_what_draws_beside_attention_that_is_kept_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    arguments = checkpoint_arguments("attention", keep_drawn=True)
    given = torch.ones(4, requires_grad=True)
    with pytest.raises(RecipeError, match="draws random numbers by aten::"):
        checkpoint(torch.nn.functional.dropout, given, use_reentrant=False, **arguments)


def test_the_host_no_longer_decides() -> None:
    job = replace(small_job("bert", 4, batch_size=4), clip=1.0)
    written, played = (predict(job, f"bf16 + adamw_fused{more}", gpu="h200") for more in ("", " + captured"))
    assert written.timing is not None
    assert played.timing is not None
    assert played.timing.step_seconds < written.timing.step_seconds / 4
    assert played.footprint.requested_bytes == pytest.approx(written.footprint.requested_bytes, rel=0.02)


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("fp16 + captured", "cannot be recorded"),
        ("captured(multiple=0)", "from 1 to"),
        ("captured + compiled", "engine"),
        ("fused + every_layer + captured", r"draw the same numbers twice.*'fused \+ selective\(attention\)'"),
        ("selective(attention) + captured", "draw the same numbers twice"),
    ],
)
def test_what_it_does_not_go_with_is_named(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        predict(small_job("bert"), recipe, gpu="h200")


@pytest.mark.parametrize("loop", ["accelerate", "trainer", "custom_loop", "script"])
def test_loops_that_cannot_record_say_so(loop: str) -> None:
    with pytest.raises(UsageError, match=r"capture|engine"):
        refuse_unsupported(loop, Recipe.parse("captured").setup())
