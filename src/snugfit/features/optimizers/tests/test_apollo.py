"""APOLLO: columns are scaled as AdamW scales them, in a space of a few rows, and a simulation matches a
run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from fitted import model_of
from small_models import small_job
from snugfit.features.optimizers.updates.apollo import GROWTH, ApolloWithAdamW
from snugfit.features.optimizers.updates.matrices import MATRICES, leave_to_adamw
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import crossed

NUMBERS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def updates_of(gradients: list[torch.Tensor], rank: int, beta: float = 0.9) -> list[torch.Tensor]:
    """Return the decrease of a zero matrix in each step, in units of the learning rate."""
    weight = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = ApolloWithAdamW([weight], **{**NUMBERS, "betas": (beta, 0.999)}, rank=rank, renew=2)
    taken = []
    for gradient in gradients:
        before, weight.grad = weight.detach().clone(), gradient
        optimizer.step()
        taken.append((before - weight.detach()) / NUMBERS["lr"])
    return taken


@pytest.mark.whole
@pytest.mark.parametrize("shape", [(400, 600), (600, 400)])
def test_an_update_is_the_gradient_with_columns_as_long_as_adamw_s(shape: tuple[int, int]) -> None:
    """Columns are those along the longer side. The tolerance is a tenth, with a projection of 128 rows."""
    long = shape.index(max(shape))
    sizes = torch.logspace(-3, 3, max(shape))
    gradient = torch.randn(shape) * (sizes if long == 1 else sizes[:, None])
    [taken] = updates_of([gradient], 128)
    ratio = taken / gradient
    assert torch.allclose(ratio, ratio.mean(1 - long, keepdim=True).expand(shape), rtol=1e-4)
    assert (ratio > 0).all()
    adamw = torch.sign(gradient)  # its first step
    lengths = [torch.linalg.vector_norm(one, dim=1 - long) for one in (taken, adamw)]
    assert float((lengths[0] / lengths[1]).log().abs().mean()) < 0.1


@pytest.mark.whole
def test_no_update_grows_faster_than_it_may() -> None:
    gradients = [torch.randn(40, 60) * 10.0**step for step in (0, 2, -1, 3)]
    lengths = [float(one.norm()) for one in updates_of(gradients, 4, beta=0.0)]
    assert lengths[1] == pytest.approx(GROWTH * lengths[0], rel=1e-3)
    assert all(after <= before * GROWTH * 1.001 for before, after in pairwise(lengths))


@pytest.mark.whole
def test_projections_are_drawn_anew_in_time() -> None:
    weight = torch.nn.Parameter(torch.zeros(20, 30))
    optimizer = ApolloWithAdamW([weight], **NUMBERS, rank=3, renew=2)
    seen = []
    for _ in range(5):
        weight.grad = torch.ones(20, 30)
        optimizer.step()
        seen.append(optimizer.state[weight]["projection"].clone())
    assert [torch.equal(*pair) for pair in pairwise(seen)] == [True, False, True, False]


def test_matrices_of_hidden_layers_that_are_larger_than_the_rank_are_scaled() -> None:
    model = model_of("bert")
    leave_to_adamw(model)
    names = {weight: name for name, weight in model.named_parameters()}
    for rank in (4, 1000):
        [group] = ApolloWithAdamW(model.parameters(), rank=rank).param_groups
        own = {names[group["params"][at]] for at in group[MATRICES]}
        assert bool(own) == (rank == 4)
        assert not any("embeddings" in name or "classifier" in name or "bias" in name for name in own)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "family"),
    crossed(["bf16_pure + apollo(rank=4, renew=1)", "apollo(rank=4)"], ["llama", "bert"], keep=1),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    job, setup = small_job(family, 2), Recipe.parse(recipe).setup()
    hold_third_step(job, setup)
