"""Trained parameters that get no gradient from the batch are counted and reported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe


class Towers(nn.Module):
    """A model like a vision-language one: its tower is for pictures, and a batch may contain none."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(not frozen)
        self.text = nn.Linear(4, 4)
        self.query = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, pixels: torch.Tensor | None = None) -> dict[str, Any]:
        seen = self.text(x).mean()
        return {"loss": seen if pixels is None else seen + self.tower(pixels).mean() + self.query.sum()}


def doubts(frozen: bool, recipe: str = "plain", loop: str = "plain", **more: Any) -> tuple[str, ...]:
    model = Model.from_module(Towers(frozen), {"x": torch.ones(2, 4), **more})
    job = Job(model=model, task=Task.CUSTOM, batch_size=2)
    return rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy(), loop=loop).doubts


def test_parameters_that_a_batch_does_not_reach_are_said() -> None:
    """A vision tower was once predicted without gradients and states for a batch of text, and without a
    warning."""
    says = "43 of 63 trainable parameters get no gradient from this batch: tower, query."
    for loop in ("plain", "accelerate", "trainer"):
        (sentence,) = doubts(False, loop=loop)
        assert sentence.startswith(says)
    assert doubts(False, "micro_batches(2) + sgd")[0].startswith(says)
    assert doubts(True)[0].startswith("3 of 23 trainable parameters")
    assert not doubts(False, pixels=torch.ones(2, 4))
