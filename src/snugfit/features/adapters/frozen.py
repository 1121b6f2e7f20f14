"""Technique `frozen`: parameters of the named parts get no gradients and no optimizer states.

Activations before the first trained part are not saved either, because no gradient flows there. A frozen part
after a trained one saves the activations that are needed for gradients of its inputs.

Parts are given by the end of the name of a module or parameter (`embeddings`, `encoder.layer.0`).
`base_model` means all but the output head. A quoted pattern is a regular expression for the beginning of
parameter names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.errors import RecipeError
from snugfit.features.adapters.fields import FreezeWish
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import Pattern, between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Frozen(Technique):
    """Freezes parts of the model, and trains the other parts."""

    fidelity: ClassVar = Fidelity.LEARNS
    source: ClassVar = "torch: parameters without requires_grad"
    elsewhere: ClassVar = ("freeze",)
    unplanned: ClassVar = "it depends on the task which parts may stay as they are"
    counterparts: ClassVar = (
        Counterpart(
            arguments={
                "lora.r": None,
                "frozen": True,
                "frozen.parts": Setting("parts"),
                "frozen.only": Setting("only"),
                "frozen.last": Setting("last"),
            },
            used="to read",
        ),
    )

    parts: tuple[Pattern, ...] | None = None
    """Parts that freeze: ends of names of modules or parameters, or quoted patterns."""

    only: tuple[Pattern, ...] | None = None
    """Parts that train, while all others freeze."""

    last: int | None = between(-1000, 1000, default=None)
    """Number of the last layers that train, while all others freeze; below 0, of the first ones."""

    def __post_init__(self) -> None:
        """Raise `RecipeError` if no part is given."""
        super().__post_init__()
        if not self.parts and not self.only and not self.last:
            raise RecipeError("frozen needs parts: frozen(parts=embeddings) or frozen(only=classifier).")

    def install(self, setup: Setup) -> Setup:
        """Return the setup with the field `freeze` set to these parts."""
        wish = FreezeWish(parts=self.parts or (), only=self.only or (), last=self.last or 0)
        return setup.with_fields(freeze=wish)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield no settings, so that plans do not freeze parts on their own."""
        return iter(())
