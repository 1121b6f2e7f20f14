"""What the law about awkward modules is asked of: each module with its batch, and what must be said of it.

A module is awkward when what it runs is not in its shapes alone: it asks its batch, its weights, a die or the
device what to do, or it leaves the ordinary path of autograd. Of each the prediction is `EQUAL` to a real run
on the CPU, or it carries a `doubt` about just that, or it is `refused` with a true reason.

The modules stand by what makes them awkward: `awkward_shapes.py` (shapes from the batch),
`awkward_choices.py` (decisions by weights and dice), `awkward_autograd.py`, `awkward_layers.py` and
`awkward_outputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, LENGTH, WIDTH, WORDS = 4, 64, 64, 128
LENGTHS = (41, 17, 29, 23)
"""Tokens of each row that are no padding."""

EQUAL = "equal"


@dataclass(frozen=True)
class Case:
    """One awkward module."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], dict[str, Any]]
    says: str = EQUAL
    """`EQUAL`, or what a doubt or the refusal must say (a regular expression)."""
    refused: bool = False
    recipe: str = "plain"
    xfail: str = field(default="", compare=False)
    """Why the law does not hold for it yet."""
    batch_size: int = ROWS


CASES: list[Case] = []


def awkward(
    example: Callable[[], dict[str, Any]] | None = None,
    *,
    doubt: str = "",
    refused: str = "",
    **more: Any,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A decorator that puts a module's class among the cases."""

    def add(made: type[nn.Module]) -> type[nn.Module]:
        says = refused or doubt or EQUAL
        CASES.append(Case(made.__name__, made, example or words, says, refused=bool(refused), **more))
        return made

    return add


# ---- batches -------------------------------------------------------------------------------------------


def words() -> dict[str, Any]:
    """Token ids (B, T), and as many labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def masked() -> dict[str, Any]:
    """The same with padding, a mask (B, T) of it, and labels of -100 there."""
    batch = words()
    mask = torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]
    return {
        "ids": batch["ids"] * mask,
        "mask": mask.long(),
        "labels": batch["labels"].masked_fill(~mask, -100),
    }


def ragged() -> dict[str, Any]:
    """Token ids, labels, and lengths (B,)."""
    return {**words(), "lengths": torch.tensor(LENGTHS)}


def numbers() -> dict[str, Any]:
    """Floats (B, T, D)."""
    return {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))}


# ---- what most modules are made of ---------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, a feed-forward block, and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def block(self, h: Tensor) -> Tensor:
        return h + self.outer(torch.relu(self.inner(h)))

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h).flatten(0, -2), labels.flatten())


class Numbers(nn.Module):
    """A feed-forward block on floats."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def block(self, h: Tensor) -> Tensor:
        return h + self.outer(torch.relu(self.inner(h)))
