"""A signal to a hand-written loop. The loop's work after a step still runs, and evaluations are abandoned and
repeated. Only the last step's weights are ever saved."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import classified, model_of, padded, quiet
from small_runs import assert_same_weights
from snugfit.features.loops.custom_loop.run import Stopped
from test_accelerate import loader_of, loop_of
from tiers import slow_but

pytestmark = pytest.mark.whole


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Loop:
    """A user's loop with an average of the weights and draws of its own after each step. It evaluates every
    fourth step and at each epoch's end (six steps). SIGTERM arrives in step `stop`, or in the forward pass
    `stop_in` of all evaluations."""

    def __init__(self, folder: Path, *, stop: int = 0, stop_in: int = 0, swaps: bool = False) -> None:
        torch.manual_seed(1)
        self.run = loop_of(folder, "micro_batches(2)", model=model_of("bert", layers=1, dropout=0.1).train())
        self.average = copy.deepcopy(self.run.model)
        self.stop, self.stop_in, self.swaps = stop, stop_in, swaps
        self.losses: dict[int, float] = {}
        self.evaluated: dict[str, float] = {}
        self.draws: dict[int, float] = {}
        self.forwards = 0
        self.run.model.register_forward_pre_hook(self.count)

    def count(self, module: Any, arguments: Any) -> None:
        if module.training:
            if self.run.steps + 1 == self.stop:
                self.stop = 0
                terminate()
            return
        self.forwards += 1
        assert not self.stop_in or self.swaps or self.forwards <= self.stop_in, "the evaluation continues"
        if self.forwards == self.stop_in:
            terminate()

    def evaluate(self, name: str) -> None:
        model = self.run.model.eval()
        weights = copy.deepcopy(model.state_dict())
        if self.swaps:
            for weight, average in zip(model.parameters(), self.average.parameters(), strict=True):
                weight.data.copy_(average.data)
        total = 0.0
        with torch.no_grad():
            for start in range(0, 20, 4):
                total += float(model(**padded(classified(20)[start : start + 4])).loss)
        model.load_state_dict(weights)
        self.evaluated[name] = total
        model.train()

    def go(self, epochs: int = 2) -> None:
        with self.run as run:
            for epoch in run.epochs(epochs):
                for batch in run:
                    loss = run.step(batch)
                    self.losses[run.steps] = loss
                    self.draws[run.steps] = float(torch.rand(()))
                    with torch.no_grad():
                        for mean, weight in zip(
                            self.average.parameters(), run.model.parameters(), strict=True
                        ):
                            mean.lerp_(weight, 0.1)
                    if run.steps % 4 == 0:
                        self.evaluate(f"step {run.steps}")
                self.evaluate(f"epoch {epoch}")
                run.save()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    loop = Loop(tmp_path_factory.mktemp("whole"))
    loop.go()
    return loop


@pytest.mark.parametrize("step", slow_but([1, 5, 6, 11], lambda step: step == 6))
def test_what_the_loop_does_after_the_step_is_done(step: int, whole: Loop, tmp_path: Path) -> None:
    """The signals stop the run within an epoch, and after its last step."""
    cut = Loop(tmp_path, stop=step)
    with pytest.raises(Stopped) as stopped:
        cut.go()
    assert (stopped.value.code, cut.run.steps, stopped.value.repeats_step) == (75, step, False)
    assert step in cut.draws
    resumed = Loop(tmp_path)
    assert resumed.run.resume()
    resumed.average = cut.average  # the user's code must save it
    resumed.go()
    assert {**cut.losses, **resumed.losses} == whole.losses
    assert {**cut.draws, **resumed.draws} == whole.draws
    assert {**cut.evaluated, **resumed.evaluated} == whole.evaluated
    assert_same_weights(resumed.average, whole.average)
    assert_same_weights(resumed.run.model, whole.run.model)


@pytest.mark.parametrize(("stop_in", "step"), slow_but([(2, 4), (7, 6), (22, 12)], 1))
def test_an_evaluation_is_abandoned_and_made_again(
    stop_in: int, step: int, whole: Loop, tmp_path: Path
) -> None:
    """The signals stop the run within an epoch, at its end, and at the end of the run."""
    cut = Loop(tmp_path, stop_in=stop_in)
    with pytest.raises(Stopped) as stopped:
        cut.go()
    assert (cut.run.steps, cut.forwards, stopped.value.repeats_step) == (step, stop_in, True)
    resumed = Loop(tmp_path)
    torch.manual_seed(7)
    assert resumed.run.resume()
    resumed.go()
    assert {**cut.losses, **resumed.losses} == whole.losses
    assert {**cut.draws, **resumed.draws} == whole.draws
    assert {**cut.evaluated, **resumed.evaluated} == whole.evaluated
    assert_same_weights(resumed.run.model, whole.run.model)


def test_other_weights_are_never_kept(tmp_path: Path) -> None:
    """The evaluation uses the average in place of the weights: the run ends before its next step."""
    whole = Loop(tmp_path / "whole", swaps=True)
    whole.go()
    cut = Loop(tmp_path / "cut", stop_in=2, swaps=True)
    with pytest.raises(Stopped):
        cut.go()
    assert cut.forwards == 5
    resumed = Loop(tmp_path / "cut", swaps=True)
    assert resumed.run.resume()
    resumed.average = cut.average
    resumed.go()
    assert {**cut.losses, **resumed.losses} == whole.losses
    assert {**cut.evaluated, **resumed.evaluated} == whole.evaluated
    assert_same_weights(resumed.run.model, whole.run.model)


def test_a_loop_that_is_finished_says_so(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    for watch in (quiet, told.append):
        run = loop_of(tmp_path, loader=loader_of(classified(8)), watch=watch)
        run.resume()
        with run:
            for _ in run.epochs(1):
                for batch in run:
                    run.step(batch)
                run.save()
    assert run.steps == 2
    assert any("Nothing is left to train: all 1 epochs are done" in event.get("text", "") for event in told)
