"""Updates within the backward pass: equal losses and weights, the same guarantees, fewer gradients in memory,
exact simulations.

`released_on_gpu.py` compares them on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_again import captured_on_cpu

from bare_process import script_in_triton
from small_models import small_job
from small_runs import (
    CPU,
    assert_same_weights,
    bert_job,
    events,
    killed_in,
    losses,
    resumed_as_whole,
    small_run,
)
from snugfit.errors import RecipeError, SnugfitError, UsageError
from snugfit.features.engine.masters.adamw import norm_in_fp32
from snugfit.features.engine.masters.one_weight import MasterUpdates
from snugfit.features.engine.replay.graphs import NotRecorded
from snugfit.features.engine.updates.hooked_pass import HookedPass
from snugfit.features.engine.updates.weight_updates import TorchUpdates
from snugfit.frontends.next_recipe import next_recipe
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.applier import refuse_unsupported
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.loop import TrainingStep
from snugfit.training.run.train import train
from third_step import hold_third_step
from tiers import crossed, slow_but

RECIPES = (
    "adamw_fused", "sgd", "bf16_master", "bf16_master + adamw_compact", "bf16 + every_layer",
    "bf16_master + adamw_compact(master_bits=24)", "bf16_pure + adamw_8bit", "bf16_pure + paged_adamw(8)",
    "bf16_pure + host_adamw", "adamw_4bit",
)  # fmt: skip


SMALL = ("bf16_pure + adamw_8bit", "bf16_pure + adamw_stochastic", "bf16_pure + host_adamw")
"""Recipes of bfloat16 weights with small states, or with states on the host."""


class Quiet(Observer):
    """An observer without effect."""


def job_of(family: str, clip: float | None) -> Job:
    return replace(small_job(family, 2, batch_size=4), clip=clip, learning_rate=1e-2)


def run(recipe: str, job: Job) -> Any:
    torch.manual_seed(3)
    step = open_step(job, Recipe.parse(recipe).setup(), "plain", torch.device("cpu"), keep_losses=True)
    return step, step.run(3, Quiet())


def clip_by_exact_norm(weights: Any, max_norm: float) -> None:
    """Clip gradients by their norm in 32 bits."""
    norm = norm_in_fp32([weight.grad for weight in weights])
    torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)


def states_by_name(step: Any) -> dict[str, dict[str, Any]]:
    """Return the optimizer states of a step's weights, by the weights' names."""
    return {
        name: dict(step.optimizer.state[weight])
        for name, weight in step.model.named_parameters()
        if weight in step.optimizer.state
    }


# ---- the same numbers ------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    ("clip", "recipe", "family"), crossed([None, 0.05], RECIPES, ["bert", "llama"], keep=7)
)
def test_weights_and_states_are_those_of_kept_gradients(
    family: str, recipe: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and states are equal bit for bit, with dropout (BERT) and with a tied head (Llama). torch's
    norm of bfloat16 gradients has 8 significant bits, so both runs clip by one of 32 bits.
    """
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_by_exact_norm)
    job = job_of(family, clip)
    kept, expected = run(recipe, job)
    released, ours = run(f"{recipe} + released", job)
    assert ours == expected
    assert_same_weights(released.model, kept.model)
    one, other = (states_by_name(step) for step in (kept, released))
    assert one.keys() == other.keys()
    for name, state in one.items():
        assert state.keys() == other[name].keys()
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][key]))
            for key, value in state.items()
        ), name
    assert not any(getattr(one, "_post_accumulate_grad_hooks", None) for one in released.model.parameters())


@pytest.mark.whole
@pytest.mark.parametrize(
    ("clip", "recipe"), crossed([None, 0.05], ["bf16_master", "bf16_master + adamw_compact"])
)
def test_passes_that_are_played_are_those_that_are_written(recipe: str, clip: float | None) -> None:
    """Dropout masks repeat in the second pass of a step and change in the next step."""
    job = job_of("bert", clip)
    written, expected = run(f"{recipe} + released", job)
    with captured_on_cpu() as graphs:
        played, ours = run(f"{recipe} + released + captured", job)
    assert ours == expected
    assert_same_weights(played.model, written.model)
    assert all(state["step"] == 3 for state in played.optimizer.state.values()), "a replayed step counts"
    assert graphs[0].played == 2 * 2 * (1 if clip is None else 2)


@pytest.mark.whole
def test_a_weight_s_first_gradient_is_not_recorded() -> None:
    """A CUDA graph would create a weight's optimizer states in each replay, so its first step runs without a
    graph.
    """
    job = job_of("llama", None)
    with captured_on_cpu() as graphs:
        step = open_step(job, Recipe.parse("bf16_master + released + captured").setup(), "plain", CPU)
        step.run(1, Quiet())
    assert not graphs[0].played
    passes: Any = step.runner
    updates = passes._attach(type("Built", (), {"optimizer": step.optimizer, "model": step.model}))
    weight = next(iter(step.optimizer.state))
    assert updates.has_states(weight)
    del step.optimizer.state[weight]
    passes._pass = HookedPass("once", passes._update, is_recorded=True)
    with pytest.raises(NotRecorded, match="first gradient"):
        passes._update(weight, torch.zeros_like(weight))


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["adamw_fused", "bf16_master"])
def test_no_more_gradients_exist_than_that_of_one_weight(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, together = [0], [0]

    def watched(kind: Any) -> None:
        plain = kind.update

        def update(self: Any, weight: torch.Tensor, gradient: torch.Tensor) -> None:
            grads = [one.grad for one in self._order if one.grad is not None]
            together[0] = max(together[0], gradient.nbytes + sum(one.nbytes for one in grads))
            largest[0] = max(largest[0], weight.nbytes)
            plain(self, weight, gradient)

        monkeypatch.setattr(kind, "update", update)

    watched(TorchUpdates)
    watched(MasterUpdates)
    run(f"{recipe} + released", job_of("bert", 0.05))
    assert 0 < together[0] == largest[0]


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_of_one_weight_do_what_those_of_all_do(device: str, tmp_path: Path) -> None:
    """The test runs in Triton's interpreter and on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SNUGFIT_TEST_GPU=1")
    told = script_in_triton(Path(__file__).with_name("one_weight_in_triton.py"), device, tmp_path / "told")
    assert "as all together" in told


# ---- a run -----------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("clip", slow_but([None, 1.0], 1))
def test_a_run_is_the_same_and_goes_on_where_it_was_killed(tmp_path: Path, clip: float | None) -> None:
    """With a schedule, dropout and batches of several lengths, it compares losses, norms, rates and
    weights."""
    job = bert_job(clip=clip, layers=2)
    kept = train(small_run(tmp_path / "kept", "bf16_master", job=job))
    released = train(small_run(tmp_path / "released", "bf16_master + released", job=job))
    killed_in(small_run(tmp_path / "killed", "bf16_master + released", job=job, save_steps=5), 8)
    resumed = train(small_run(tmp_path / "killed", "bf16_master + released", job=job, save_steps=5))
    assert losses(tmp_path / "released") == losses(tmp_path / "kept") == losses(tmp_path / "killed")
    assert_same_weights(released.model, kept.model)
    assert_same_weights(resumed.model, kept.model)
    assert not events(tmp_path / "released", "warning")


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(["bf16_pure + adamw_stochastic", "bf16_pure + adamw_8bit"], 0))
def test_bfloat16_weights_go_on_where_they_were_killed(tmp_path: Path, recipe: str) -> None:
    """The random numbers of the rounding come from the generator whose state a checkpoint has."""
    job, text = bert_job(clip=None, layers=2), f"{recipe} + released"
    resumed_as_whole(small_run(tmp_path, text, job=job, save_steps=5), 8)


@pytest.mark.whole
def test_small_updates_are_kept_within_the_backward_pass() -> None:
    """Updates that bfloat16 rounds away change more weights with stochastic rounding."""
    job = replace(job_of("llama", None), learning_rate=1e-5)
    changed = {}
    for optimizer in ("adamw_stochastic", "adamw_8bit"):
        recipe = f"bf16_pure + {optimizer} + released"
        torch.manual_seed(3)
        start = open_step(job, Recipe.parse(recipe).setup(), "plain", CPU)
        start.run(1, Quiet())
        torch.manual_seed(3)
        end = open_step(job, Recipe.parse(recipe).setup(), "plain", CPU)
        end.run(9, Quiet())
        pairs = zip(start.model.parameters(), end.model.parameters(), strict=True)
        changed[optimizer] = sum(int((one != other).sum()) for one, other in pairs)
    assert changed["adamw_stochastic"] > 2 * changed["adamw_8bit"] > 0


@pytest.mark.whole
@pytest.mark.parametrize(("clip", "what"), crossed([None, 1.0], ["gradient", "loss"], keep=1))
def test_what_is_no_number_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, clip: float | None
) -> None:
    """Without clipping, a NaN gradient is detected at the end of the step, and the run returns to its last
    state."""
    plain = TrainingStep.take

    def take(self: TrainingStep, state: Any, *more: Any) -> Any:
        spoils = state.progress.step == 4
        factor = float("nan") if what == "loss" else 1.0

        def spoil(module: Any, given: Any, out: Any) -> Any:
            out.loss = out.loss * factor
            if what == "gradient":
                out.loss.register_hook(lambda slope: slope * float("nan"))
            return out

        handle = state.model.register_forward_hook(spoil) if spoils else None
        try:
            return plain(self, state, *more)
        finally:
            if handle is not None:
                handle.remove()

    job, recipe = bert_job(clip=clip, layers=2), "bf16_master + released"
    whole = train(small_run(tmp_path / "whole", recipe, job=job, max_steps=6))
    monkeypatch.setattr(TrainingStep, "take", take)
    says = {"loss": "The loss is nan", "gradient": "A gradient is not|The gradients' norm is nan"}[what]
    with pytest.raises(SnugfitError, match=rf"Step 5: ({says}).* No weight was changed"):
        train(small_run(tmp_path / "run", recipe, job=job, max_steps=6))
    monkeypatch.undo()
    resumed = train(small_run(tmp_path / "run", recipe, job=job, max_steps=6))
    assert_same_weights(resumed.model, whole.model)


@pytest.mark.whole
def test_when_memory_runs_out_between_updates_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, updates = MasterUpdates.update, [0]

    def update(self: MasterUpdates, *more: Any) -> None:
        updates[0] += 1
        if updates[0] == 200:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        plain(self, *more)

    job, recipe = bert_job(clip=None, layers=2), "bf16_master + released"
    whole = train(small_run(tmp_path / "whole", recipe, job=job))
    monkeypatch.setattr(MasterUpdates, "update", update)
    run = small_run(tmp_path / "run", recipe, job=job, save_steps=3)
    done = train(run, replan=lambda job, recipe, cause: recipe)
    steps = [event["step"] for event in events(tmp_path / "run", "step")]
    assert done.outcome == "finished"
    assert steps == [1, 2, 3, 4, *range(4, 13)]
    assert_same_weights(done.model, whole.model)


# ---- rehearsed -------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    ("clip", "recipe"),
    [
        *crossed([1.0, None], ["bf16_master", "bf16_master + adamw_compact", "adamw_fused"], keep=1),
        # On a CPU torch's norm in 32 bits copies 16-bit gradients, which no trace has.
        *slow_but([(None, recipe) for recipe in SMALL], 1),
    ],
)
def test_a_real_step_allocates_what_its_trace_says(recipe: str, clip: float | None) -> None:
    hold_third_step(job_of("bert", clip), Recipe.parse(f"{recipe} + released").setup())


@pytest.mark.parametrize("clip", slow_but([1.0, None], 1))
def test_played_passes_allocate_nothing_and_update_within(clip: float | None) -> None:
    job = replace(small_job("bert", 2, batch_size=4), clip=clip)
    setup = Recipe.parse("bf16_master + fused + released + captured").setup()
    trace = rehearse(job, setup, CudaPolicy())
    assert not any("cannot be recorded as CUDA graphs" in doubt for doubt in trace.doubts)
    played = [kernel.operator for kernel in trace.kernels if kernel.played]
    updates = played.count("triton::adamw_of_weight")
    assert updates == updates_of_a_step(job)
    assert played.count("triton::squares_of_gradient") == (updates if clip else 0)


def updates_of_a_step(job: Job) -> int:
    """Count the weights that a step updates."""
    setup = Recipe.parse("bf16_master + fused + released").setup()
    trace = rehearse(job, setup, CudaPolicy())
    return sum(kernel.operator == "triton::adamw_of_weight" for kernel in trace.kernels)


def test_each_hook_on_a_gradient_takes_the_host_three_functions() -> None:
    job = replace(small_job("bert", 1), clip=None)
    setups = (Recipe.parse(recipe).setup() for recipe in ("sgd + released", "sgd"))
    released, kept = (
        sum(kernel.functions for kernel in rehearse(job, setup, CudaPolicy()).kernels) for setup in setups
    )
    assert kept == 0
    assert released == 3 * updates_of_a_step(job)


def test_a_weight_takes_two_bytes_less_and_a_second_pass_takes_its_time() -> None:
    job = replace(small_job("llama", 2, batch_size=1), clip=1.0)
    kept, released = (predict(job, f"bf16_master{more}", gpu="h200") for more in ("", " + released"))
    kinds = [dict(one.footprint.kinds) for one in (kept, released)]
    assert kinds[0]["weights"] == kinds[1]["weights"]
    assert kinds[1].get("gradients", 0) < kinds[0].get("gradients", 1)
    traces = [
        rehearse(job, Recipe.parse(f"bf16_master{more}").setup(), CudaPolicy())
        for more in ("", " + released")
    ]
    products = [sum(k.flops for k in trace.kernels if k.phase == "forward") for trace in traces]
    assert products[1] == 2 * products[0]
    names = [kernel.operator for kernel in traces[1].kernels]
    assert names.count("triton::adamw_of_weight") == names.count("triton::squares_of_gradient") > 20


@pytest.mark.whole
@pytest.mark.slow
def test_eight_billion_weights_train_on_24_gb() -> None:
    """torchtune's README has 18.9 GiB for its step with PagedAdamW8bit (Llama-3.1-8B, 2 x 2048, RTX 4090)."""
    job = Job(
        model=Model.find("meta-llama/Llama-3.1-8B"), task=Task.CAUSAL_LM, sequence_length=2048, batch_size=2,
        clip=None, dtype="bfloat16",
    )  # fmt: skip
    recipe = "bf16_pure + fused + chunked_loss + every_layer + paged_adamw(8) + released + expandable"
    predicted = predict(job, recipe, gpu="rtx 4090")
    assert predicted.needed_bytes < 22.5 * 2**30
    assert predicted.footprint.reserved_bytes < 1.05 * 18.9 * 2**30


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("released + micro_batches(2)", r"micro_batches\(2\) gradients are sums"),
        ("released + fp16", "looks at all gradients for an overflow"),
        ("released + ddp", "several processes average"),
        ("released + zero2", "several processes average"),
        ("released + muon", "does not update one weight at a time"),
        ("released + compiled", "was not tested with it"),
        ("adamw_fused + released + captured", "reads its learning rate on the host"),
    ],
)
def test_what_it_does_not_go_with_is_named(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job("bert", 2), installed=False)


def test_a_batch_that_is_cut_keeps_its_gradients() -> None:
    smaller = next_recipe(CPU)(bert_job(), Recipe.parse("bf16_master + released"), "cuda")
    assert str(smaller) == "bf16_master + micro_batches(2)"


@pytest.mark.parametrize("loop", ["accelerate", "trainer", "fit", "custom_loop", "script"])
def test_loops_that_keep_gradients_say_so(loop: str) -> None:
    with pytest.raises(UsageError, match="release"):
        refuse_unsupported(loop, Recipe.parse("released").setup())


def test_statistics_that_a_second_pass_would_count_again_are_refused() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(pixels)).square().mean()

    from snugfit.features.engine.updates.passes import ReleasedPasses

    model = Normed()

    class Loop:
        device = torch.device("cpu")

        def needs_norm(self) -> bool:
            return True

        def run_passes(self, built: Any, *more: Any, again: bool = False) -> None:
            model(torch.randn(3, 4)).backward()

    class BuiltHere:
        optimizer = torch.optim.AdamW(model.parameters())

    BuiltHere.model = model  # type: ignore[attr-defined]
    loop = Loop()
    with pytest.raises(UsageError, match=r"buffer norm\.\w+.*'all_gradients'"):
        ReleasedPasses(loop, None).run_passes(BuiltHere(), [], [])  # type: ignore[arg-type]
