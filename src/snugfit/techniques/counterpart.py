"""What a technique is called in transformers: one statement, read in both directions.

A `Counterpart` lists the arguments that switch a technique on, as they would be set elsewhere. Exporting a
recipe writes them; reading somebody's arguments looks for the technique whose list they match. Names are
dotted and say where they are set:

    bf16                        a field of `TrainingArguments`
    optim_args.momentum         a part of such a field
    model.dtype                 an argument of `from_pretrained`
    lora.r                      an argument of peft's `LoraConfig`
    environment.PYTORCH_...     a variable of the process

A value is what it must be, or `Setting("n")`: whatever it is there becomes the technique's setting `n`.
Of several techniques that match, the one with more values of its own is meant: an accumulation of 1 is the
whole batch, and not micro-batches of which there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError

if TYPE_CHECKING:
    from snugfit.techniques.technique import Technique


@dataclass(frozen=True)
class Setting:
    """Stands for the value of a technique's setting."""

    name: str
    """Of the technique's field."""


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The arguments that mean the same elsewhere."""

    arguments: Mapping[str, Any]
    """By dotted name: a value, or the `Setting` that has it."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the technique that these arguments imply, where they are not among the values."""

    note: str = ""
    """What is not quite the same, for whoever reads a translation; such a counterpart is never written."""

    def written(self, technique: Technique) -> dict[str, Any] | None:
        """The arguments for this technique with its settings; None when they cannot say these."""
        named = {value.name for value in self.arguments.values() if isinstance(value, Setting)}
        for declared in fields(technique):
            value = getattr(technique, declared.name)
            implied = self.settings.get(declared.name, declared.default)
            if declared.name not in named and value != implied:
                return None
        return {
            key: getattr(technique, value.name) if isinstance(value, Setting) else value
            for key, value in self.arguments.items()
        }

    def read(self, kind: type[Technique], arguments: Mapping[str, Any]) -> Technique | None:
        """The technique that these arguments ask for; None when they are not this counterpart's."""
        settings = dict(self.settings)
        for key, value in self.arguments.items():
            given = arguments.get(key)
            if isinstance(value, Setting):
                settings[value.name] = given
            elif given != value or isinstance(given, bool) != isinstance(value, bool):
                return None
        lacking = [one.name for one in fields(kind) if one.default is MISSING and one.name not in settings]
        try:
            return None if lacking else kind(**settings)
        except RecipeError:
            return None

    @property
    def literals(self) -> int:
        """How many values are its own: of two counterparts that match, the one with more is meant."""
        return sum(not isinstance(value, Setting) for value in self.arguments.values())
