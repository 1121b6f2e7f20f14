"""Law 1 for loops of other libraries: accelerate's and the HF Trainer's, simulated as they really run.

The checks are those of `test_law_rehearsed_equals_real.py`. The third step, event by event, and the peak of
the whole run equal the CPU allocator's report. Torch selects an optimizer's implementation by device:
one kernel for many parameters on a GPU (`foreach`), one parameter after the other on a CPU. Here the CPU
follows the GPU's choice.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from aligned import Event, compare, peak
from cpu_scratch import compared
from in_roster import needs_techniques
from reported import foreseen, reports
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.step import Step
from snugfit.step.trainer_loop import TrainerStep
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import job
from tiers import crossed, slow_but

CASES = (
    ("bert", "plain"),
    ("bert", "bf16 + every_layer + micro_batches(2) + sgd"),
    ("llama", "eager + adafactor"),
    ("llama", "bf16_pure + sgd"),
    ("llama", "qlora + bf16"),
)


@pytest.fixture(autouse=True)
def foreach_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it under its class
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])


def account_of_trace(this: Job, recipe: str, loop: str, own: type[Any] | None = None) -> list[Event]:
    setup = Recipe.parse(recipe).setup()
    return compared(foreseen(rehearse(this, setup, CpuPolicy(), loop=loop, trainer_class=own)))


def third(account: list[Event]) -> list[Event]:
    return [event for event in account if event.step == 2]


def hold(this: Job, recipe: str, loop: str, own: type[Any] | None = None) -> list[Event]:
    """Check law 1 for one job, recipe and loop on the CPU, and return the allocator's events."""
    real = compared(reports(this, Recipe.parse(recipe).setup(), loop=loop))
    trace = account_of_trace(this, recipe, loop, own)
    assert third(real)
    comparison = compare(third(real), third(trace))
    assert comparison.similarity == 1.0, f"{loop}, {this.model.name}, {recipe}: {comparison}"
    assert peak(real) == peak(trace)
    return real


@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe", "loop"), crossed(CASES, ["accelerate", "trainer"]))
def test_a_real_step_allocates_what_its_trace_says(loop: str, family: str, recipe: str) -> None:
    needs_techniques(recipe)
    hold(job(family), recipe, loop)


@pytest.mark.whole
@pytest.mark.parametrize(("loop", "clip"), slow_but([("accelerate", 0.5), ("trainer", 0.0)], 1))
def test_clipping(loop: str, clip: float) -> None:
    """accelerate does not clip by default, and the Trainer does."""
    hold(replace(job("bert", padding=0.25), clip=clip), "adamw_loop", loop)


class RDrop(transformers.Trainer):  # type: ignore[misc]
    """A user's own loss: the sum of two passes with separate dropout, and of their divergence (Liang et
    al., arXiv 2106.14448)."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        one, other = model(**inputs), model(**inputs)
        near, far = (each.logits.float().log_softmax(-1) for each in (one, other))
        apart = torch.nn.functional.kl_div(near, far, reduction="batchmean", log_target=True)
        return (one.loss + other.loss) / 2 + apart


@pytest.mark.whole
def test_a_user_s_own_trainer_is_rehearsed_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of the plain Trainer differs from this Trainer's real events."""
    monkeypatch.setattr(TrainerStep, "trainer_class", RDrop)
    real = hold(job("llama"), "sgd", "trainer", RDrop)
    plain = account_of_trace(job("llama"), "sgd", "trainer")
    assert compare(third(real), third(plain)).similarity < 1.0
    assert peak(real) > peak(plain)


@pytest.mark.whole
@pytest.mark.parametrize("loop", slow_but(["plain", "accelerate", "trainer"], ["trainer"].__contains__))
def test_gradients_zeroed_in_place_stay_in_every_loop(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.0, gradients stayed allocated by default during the next forward pass."""
    this, setup = job("bert"), Recipe.parse("eager + adamw_loop").setup()
    monkeypatch.setattr(Step, "keep_gradients", True)
    real = compared(reports(this, setup, loop=loop))
    trace = compared(foreseen(rehearse(this, setup, CpuPolicy(), loop=loop, keep_gradients=True)))
    assert compare(third(real), third(trace)).similarity == 1.0
    assert peak(real) == peak(trace)


def test_a_prediction_is_of_the_user_s_own_trainer() -> None:
    plain, own = (
        predict(job("llama"), "sgd", gpu="h200", loop="trainer", trainer_class=each).footprint.requested_bytes
        for each in (None, RDrop)
    )
    assert own > plain


def test_a_batch_is_the_input_of_its_own_step() -> None:
    """The Trainer loads a step's batches before it calls `on_step_begin`."""
    trace = rehearse(job("vit"), Recipe().setup(), CpuPolicy(), loop="trainer")
    pictures = [block for block in trace.blocks if block.phase == "load" and block.nbytes > 4 * 3 * 32 * 32]
    assert [(block.step, block.kind) for block in pictures] == [(step, "inputs") for step in range(3)]
