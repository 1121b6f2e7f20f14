"""Cases of the law about awkward modules: each module with its batch and the expected outcome.

A module is awkward when its shapes alone do not determine the operators that it runs. Its control flow
depends on its batch, its weights, random numbers or the device. Or it leaves the ordinary path of autograd.
The prediction of a module has one of three outcomes: `EQUAL` to a real run on the CPU, a `doubt`, or
`refused`. A doubt names exactly this difficulty, and a refusal gives a true reason.

The modules are grouped by the source of the difficulty. `awkward_shapes.py` has shapes from the batch, and
`awkward_choices.py` has decisions by weights and random numbers. The rest are in `awkward_autograd.py`,
`awkward_layers.py` and `awkward_outputs.py`.
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
"""Number of tokens in each row that are not padding."""

EQUAL = "equal"


@dataclass(frozen=True)
class Case:
    """One awkward module with its batch."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], dict[str, Any]]
    says: str = EQUAL
    """`EQUAL`, or a regular expression for the expected doubt or refusal."""
    refused: bool = False
    recipe: str = "plain"
    xfail: str = field(default="", compare=False)
    """Reason why the law does not hold for this case yet."""
    batch_size: int = ROWS


CASES: list[Case] = []


def awkward(
    example: Callable[[], dict[str, Any]] | None = None,
    *,
    doubt: str = "",
    refused: str = "",
    **more: Any,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Return a decorator that registers a module's class as a case."""

    def add(made: type[nn.Module]) -> type[nn.Module]:
        says = refused or doubt or EQUAL
        CASES.append(Case(made.__name__, made, example or words, says, refused=bool(refused), **more))
        return made

    return add


# ---- batches -------------------------------------------------------------------------------------------


def words() -> dict[str, Any]:
    """Return token ids (B, T) and as many labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def masked() -> dict[str, Any]:
    """Return the same with padding, its mask (B, T), and labels of -100 at the padding."""
    batch = words()
    mask = torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]
    return {
        "ids": batch["ids"] * mask,
        "mask": mask.long(),
        "labels": batch["labels"].masked_fill(~mask, -100),
    }


def ragged() -> dict[str, Any]:
    """Return token ids, labels, and lengths (B,)."""
    return {**words(), "lengths": torch.tensor(LENGTHS)}


def numbers() -> dict[str, Any]:
    """Return a batch of floats (B, T, D)."""
    return {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))}


# ---- base modules --------------------------------------------------------------------------------------


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
