"""`fit` and `accelerate` accept `batch_dims`. A tensor whose first dimension is not the batch is never cut,
even if it is as long as the batch. The batch may be another dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fitted import quiet, trainer_of
from snugfit import accelerate, fit
from snugfit.errors import JobError
from snugfit.techniques.recipe import Recipe

pytestmark = pytest.mark.whole

DIMS = {"table": None, "x": 1}


class Lookup(torch.nn.Module):
    """A table of four rows beside four samples, which are the second dimension of x, (3, B)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x.T) * table.cumsum(0)[-1]).square().mean()}


def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack(samples, dim=1), "table": torch.arange(12.0).reshape(4, 3)}


def points() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(8, 3))


def by_hand(recipe: str, **more: Any) -> list[float]:
    model = Lookup()
    loader: Any = DataLoader(points(), batch_size=4, collate_fn=collated)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with accelerate(model, optimizer, loader, recipe, watch=quiet, **more) as run:
        return [run.step(batch) for _ in run.epochs(1) for batch in run]


def test_accelerate_cuts_along_the_named_dimension() -> None:
    whole = by_hand("plain", batch_dims=DIMS)
    assert by_hand("micro_batches(2)", batch_dims=DIMS) == pytest.approx(whole, rel=1e-6)
    with pytest.raises(JobError, match=r"batch_dims=\{"):
        by_hand("micro_batches(2)")
    with pytest.raises(JobError, match="batch_dims names 'y'"):
        by_hand("plain", batch_dims={"y": 0})


def test_fit_cuts_finer_along_the_named_dimension(tmp_path: Path) -> None:
    def trained(pieces: int) -> Any:
        trainer = trainer_of(tmp_path, Lookup(), points(), max_steps=2, learning_rate=1e-3)
        trainer.data_collator = collated
        fit(trainer, "plain", batch_dims=DIMS, watch=quiet)
        if pieces > 1:  # as after exhausted memory
            trainer.snugfit = trainer.snugfit.cut_finer(Recipe.parse(f"micro_batches({pieces})"))
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    assert trained(2) == pytest.approx(trained(1), rel=1e-6)
