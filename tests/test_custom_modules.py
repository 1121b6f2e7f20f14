"""The user's own modules: the forms of their loss, and the contents of an example batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from awkward_shapes import RecognisesFlatTargets, spoken
from snugfit.errors import RehearsalError
from snugfit.job.build import instantiate
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement.stopwatch import Stopwatch
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.footprint import Kind
from snugfit.step.plain_loop import PlainStep
from snugfit.techniques.recipe import Recipe

WAYS = {
    "tensor": lambda loss: loss,
    "attribute": lambda loss: SimpleNamespace(loss=loss, logits=None),
    "dict": lambda loss: {"logits": loss.detach(), "loss": loss},
    "tuple": lambda loss: (loss, None),
}


class Net(nn.Module):
    """Returns its loss in one of several forms, and takes more arguments than tensors."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, power: int = 2, doubled: bool = False, name: str | None = "x") -> Any:
        assert (type(power), type(doubled), name) == (int, bool, None)
        loss = self.linear(x).pow(power).mean()
        return WAYS[self.way](loss * 2 if doubled else loss)


def job_of(way: str) -> Job:
    example = {"x": torch.ones(2, 4), "power": 3, "doubled": True, "name": None}
    return Job(model=Model.from_module(Net(way), example), task=Task.CUSTOM, batch_size=4)


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["plain", "micro_batches(2)"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_is_found_and_what_is_no_tensor_is_passed_on(way: str, recipe: str) -> None:
    setup = Recipe.parse(recipe).setup()
    assert rehearse(job_of(way), setup, CudaPolicy()).peak()[0]
    assert rehearse(job_of(way), setup, CudaPolicy(), loop="accelerate").peak()[0]
    step = PlainStep(job_of(way), setup, torch.device("cpu"), keep_losses=True)
    assert len(step.run(2, Stopwatch(torch.device("cpu"), 0))) == 2


def test_an_output_without_a_loss_says_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "dict", lambda loss: {"logits": loss})
    with pytest.raises(RehearsalError, match=r'output has no loss.*"loss" in a dict'):
        rehearse(job_of("dict"), Recipe().setup(), CudaPolicy())


@pytest.mark.parametrize("build_on", ["device", "host"])
def test_a_model_that_leaves_weights_on_the_host_is_moved(build_on: str) -> None:
    """XLNet creates its projections by `torch.FloatTensor`, which no device context reaches."""
    facts = {
        "model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64, "vocab_size": 96,
    }  # fmt: skip
    model = Model.from_config(check_facts(facts, where="xlnet"), name="xlnet")
    asked: dict[str, Any] = {"model": model, "task": "sequence-classification", "sequence_length": 8}
    trace = rehearse(Job(**asked, build_on=build_on), Recipe().setup(), CudaPolicy())
    built = instantiate(Job(**asked), dtype="float32", attention="sdpa")
    of_weights = sum(block.nbytes for block in trace.blocks if block.kind == Kind.WEIGHTS)
    assert of_weights == sum(parameter.nbytes for parameter in built.parameters())


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_model_that_reads_torchs_older_switches_trains_in_any_precision(precision: str) -> None:
    """CTC heads of transformers use `cudnn.flags`, which reads `allow_tf32`."""
    example = spoken()
    job = Job(model=Model.from_module(RecognisesFlatTargets(), example), task=Task.CUSTOM)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    step = PlainStep(job, Recipe.parse(precision).setup(), torch.device("cpu"), keep_losses=True)
    assert len(step.run(1, Stopwatch(torch.device("cpu"), 0))) == 1
    assert before == (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
