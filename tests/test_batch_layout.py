"""Batch tensors that hold samples are identified, never guessed. Predictions repeat them and loops cut
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from snugfit.errors import JobError
from snugfit.job.batch import label_items, synthetic
from snugfit.job.batch_layout import BatchLayout
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe


def graph(nodes: int = 8, edges: int = 50) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(nodes, 4),
        "edges": torch.arange(edges).repeat(2, 1) % nodes,
        "labels": torch.arange(nodes),
    }


def pictures(samples: int = 2, patches: int = 16) -> dict[str, Any]:
    """Return input of vision-language models: the patches of all pictures in one row, and the end of each."""
    return {
        "input_ids": torch.arange(samples * 6).reshape(samples, 6),
        "pixel_values": torch.arange(float(samples * patches * 3)).reshape(-1, 3),
        "grid_thw": torch.tensor([[1, 4, 4]] * samples),
        "labels": torch.arange(samples),
    }


class Table(nn.Module):
    """Looks rows up in a table of constants, and records the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, **batch: Any) -> torch.Tensor:
        tensors = [value for _, value in sorted(batch.items()) if torch.is_tensor(value)]
        self.shapes[:] = [tuple(value.shape) for value in tensors]
        return (self.weight * sum(value.float().mean() for value in tensors)).mean()


def job_of(example: dict[str, Any], batch_size: int, batch_dims: Any = None) -> Job:
    model = Model.from_module(Table(), example, batch_dims=batch_dims)
    return Job(model=model, task=Task.CUSTOM, batch_size=batch_size)


def shapes(batch: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items()}


def test_edges_and_tables_are_neither_cut_nor_repeated() -> None:
    """An earlier version did so silently: two rows of edges became eight, and a table of 10,000 rows became
    four."""
    batch = synthetic(job_of(graph(), 8), 8)
    assert shapes(batch) == {"x": (8, 4), "edges": (2, 50), "labels": (8,)}
    table = {"x": torch.ones(4, 2), "table": torch.ones(10_000, 2)}
    assert shapes(synthetic(job_of(table, 4), 4)) == {"x": (4, 2), "table": (10_000, 2)}
    rehearsed = rehearse(job_of(table, 4), Recipe().setup(), CudaPolicy())
    inputs = [block.nbytes for block in rehearsed.blocks if block.kind == Kind.INPUTS and block.step == 0]
    assert sorted(inputs) == [4 * 2 * 4, 10_000 * 2 * 4]


@pytest.mark.parametrize(("batch_size", "recipe"), [(16, "plain"), (8, "micro_batches(2)")])
def test_what_is_unclear_is_refused_where_it_must_be_cut_or_repeated(batch_size: int, recipe: str) -> None:
    setup = Recipe.parse(recipe).setup()
    with pytest.raises(JobError, match=r"lengths are .*edges 2.*batch_dims=\{'edges': None\}"):
        rehearse(job_of(graph(), batch_size), setup, CudaPolicy())
    named = job_of(graph(), batch_size, {"edges": None})
    assert rehearse(named, setup, CudaPolicy()).peak()[0]
    micro_batch = synthetic(named, batch_size // setup.micro_batches)
    assert shapes(micro_batch) == {
        "x": (len(micro_batch["x"]), 4),
        "edges": (2, 50),
        "labels": (len(micro_batch["x"]),),
    }


def test_a_named_dimension_may_hold_several_rows_of_a_sample() -> None:
    job = job_of(pictures(), 4, {"pixel_values": 0, "input_ids": 0})
    batch = synthetic(job, 4)
    assert shapes(batch) == {"input_ids": (4, 6), "pixel_values": (64, 3), "grid_thw": (4, 3), "labels": (4,)}
    assert torch.equal(batch["pixel_values"][:32], batch["pixel_values"][32:])
    assert label_items(job, batch) == 4
    times_first = {"x": torch.arange(10).reshape(5, 2), "labels": torch.arange(2)}
    turned = synthetic(job_of(times_first, 3, {"x": 1, "labels": 0}), 3)["x"]
    assert turned.T.tolist() == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9], [0, 2, 4, 6, 8]]


def test_nested_batches_are_placed_and_cut() -> None:
    example = {"vision": {"pixels": torch.ones(2, 3), "name": "as it is"}, "labels": torch.arange(2)}
    layout = BatchLayout.of(example)
    assert shapes(layout.part(example, 0, 1)["vision"] | {"name": torch.ones(0)})["pixels"] == (1, 3)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, vision: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
            assert vision["name"] == "as it is"
            assert len(vision["pixels"]) == len(labels)
            return self.linear(vision["pixels"]).mean()

    job = Job(model=Model.from_module(Nested(), example), task=Task.CUSTOM, batch_size=4)
    for recipe in ("plain", "micro_batches(2)"):
        assert rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy()).peak()[0]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"edge": None, "x": 2}, "gives 2 for 'x'; allowed are a dimension from 0 to 1"),
        ({"nodes": 0}, "names 'nodes'.*It has: x, edges, labels"),
        ({"edges": 1, "x": 0}, "50 rows there, which is not a multiple of the 8 samples"),
    ],
)
def test_wrong_names_are_refused(named: dict[str, int | None], says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_of(graph(), 8, named)
