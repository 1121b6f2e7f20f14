"""ZeRO-3 by DeepSpeed: partitioned weights during construction, and the host time of hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sharding import group_that_sends_nothing, job_with_large_layers

from deepspeed_here import with_deepspeed
from small_models import small_job
from snugfit.features.distributed.simulate import engine
from snugfit.features.distributed.simulate.engine import HOOKS
from snugfit.job.build import instantiate
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from tiers import slow_but


def most_while_built(trace: Trace) -> int:
    """Return the maximum of live bytes on the GPU before the first step."""
    live = most = 0
    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if block.step >= 0:
            return most
        live += block.nbytes if event > 0 else -block.nbytes
        most = max(most, live)
    return most


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "loop", "holds_all"),
    slow_but(
        [
            ("zero3 + bf16 + every_layer", "trainer", False),
            ("zero3 + bf16", "plain", True),
            ("zero3 + bf16", "accelerate", False),
            ("zero2 + bf16", "accelerate", True),
        ],
        1,
    ),
)
def test_weights_wait_elsewhere_as_they_are_built(recipe: str, loop: str, holds_all: bool) -> None:
    """The GPU never has all weights at once if transformers builds the model under ZeRO-3
    (`deepspeed.zero.Init`).
    """
    this = small_job("bert", 2)
    model = instantiate(this, dtype="bfloat16", attention="sdpa")
    weights = sum(weight.nbytes for weight in model.parameters())
    most = most_while_built(rehearse(this, Recipe.parse(recipe).setup(), CudaPolicy(), loop=loop))
    assert (most >= weights) == holds_all
    assert most > 0


def at_rest(recipe: str) -> int:
    """Return the live bytes on the GPU after the last step."""
    trace = rehearse(job_with_large_layers(), Recipe.parse(recipe).setup(), CudaPolicy(), loop="accelerate")
    signs = ((1 if event > 0 else -1, trace.blocks[abs(event) - 1]) for event in trace.events)
    return sum(sign * block.nbytes for sign, block in signs)


@with_deepspeed
@pytest.mark.whole
def test_weights_stay_on_the_gpu_without_their_states() -> None:
    """With both on the host, the GPU keeps only weights of up to ten times the model's width
    (`stage3_param_persistence_threshold`)."""
    model = instantiate(job_with_large_layers(), dtype="bfloat16", attention="sdpa")
    small = 10 * model.config.hidden_size
    weights = sum(weight.nbytes for weight in model.parameters() if weight.numel() > small)
    rests = [at_rest(f"bf16 + zero3(offload={where})") for where in ("cpu", "optimizer", "none")]
    assert rests[1] - rests[0] == pytest.approx(weights, rel=1e-3)
    assert rests[2] - rests[1] > 12 / 2 * weights, "fp32 weights and two moments"


@with_deepspeed
@pytest.mark.whole
@pytest.mark.slow
def test_no_second_copy_of_the_weights_is_on_the_host() -> None:
    """Otherwise the Trainer would build a whole model on the host."""
    this = job_with_large_layers()
    accelerate, trainer = (
        predict(this, "zero3 + bf16", gpu="h200", loop=loop).footprint.host_bytes
        for loop in ("accelerate", "trainer")
    )
    assert accelerate is not None
    assert trainer == pytest.approx(accelerate, rel=1e-3)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.slow
def test_a_head_of_its_own_is_built_so_too() -> None:
    this = small_job("t5", 2, {"tie_word_embeddings": False})
    trace = rehearse(this, Recipe.parse("zero3(offload=none)").setup(), CpuPolicy(), loop="accelerate")
    with group_that_sends_nothing():
        step = open_step(this, Recipe.parse("zero3(offload=none)").setup(), "accelerate", torch.device("cpu"))
        step.run(1, Observer())
    assert step.model is not None
    assert step.model.lm_head.weight.ds_shape == step.model.shared.weight.ds_shape
    assert trace.kernels


class HookCounter(Observer):
    """An observer of a real run that counts calls of DeepSpeed's hooks in the last of three steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

        self.calls = 0
        for kind in (DeepSpeedZeRoOffload, DeepSpeedZeroOptimizer_Stage3):
            for name in HOOKS[kind.__name__]:
                monkeypatch.setattr(kind, name, self.counted(getattr(kind, name)))

    def counted(self, hook: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            return hook(*arguments, **keywords)

        return call

    def step_begins(self, index: int) -> None:
        self.calls = 0


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(["zero3(offload=none)", "zero3(offload=none) + micro_batches(2)"], 1)
)
def test_the_host_pays_for_each_hook_that_a_real_step_calls(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, setup = small_job("bert", 2), Recipe.parse(recipe).setup()
    paid = sum(kernel.functions for kernel in rehearse(this, setup, CpuPolicy()).kernels)
    with monkeypatch.context() as without:
        without.setattr(engine, "HOOKS", dict.fromkeys(HOOKS, ()))
        paid -= sum(kernel.functions for kernel in rehearse(this, setup, CpuPolicy()).kernels)
    counter = HookCounter(monkeypatch)
    with group_that_sends_nothing():
        open_step(this, setup, "plain", torch.device("cpu")).run(3, counter)
    after_the_last_kernel = 2
    assert counter.calls - after_the_last_kernel <= paid <= counter.calls
    assert paid > 4 * 2 * 18  # four hooks around each module of both layers
