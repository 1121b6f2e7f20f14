"""Freezing of parameters by `requires_grad`, before the optimizer is created."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import RecipeError, some_of
from snugfit.features.adapters.fields import FREEZE, FreezeWish
from snugfit.step.wishes.handler import Handler, LiveTraining, ScriptContext
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.setting import is_word
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch


class FreezeHandler(Handler):
    """Handler of the field `freeze`: it turns off `requires_grad` of a model's parameters."""

    wish, slot, stage = FREEZE.name, Slot.ADAPTERS, InstallStage.ADAPT
    refused: ClassVar[Mapping[str, str]] = {
        "custom_loop": "the optimizer was created for all parameters. Freeze them first "
        "(parameter.requires_grad = False), create the optimizer from the others, and leave frozen out of "
        "the recipe."
    }

    def replace_model(self, value: FreezeWish, model: Any) -> Any:
        """Freeze parameters of a built model in place, and return the model."""
        freeze(model, value)
        return model

    def change(self, value: FreezeWish, live: LiveTraining) -> Iterator[str]:
        """Freeze parameters of the user's model in place, and yield a line of text about it."""
        self.replace_model(value, live.model)
        return iter(())

    def script(self, value: FreezeWish, context: ScriptContext) -> dict[str, Any]:
        """Return Python lines that freeze the same parameters in an exported script."""
        if value.last:
            raise context.refusal(self.slot, "a script needs the names of layers: frozen(parts=...)")
        words = value.only or value.parts
        prefix = context.job.model_class().base_model_prefix
        test = "|".join(f"(?:{_expression(word)})" for word in words).replace("base_model", prefix)
        negated = "" if value.only else "not "
        if value.only and value.parts:
            raise context.refusal(self.slot, "a script has either parts or only")
        return {
            "adapting": (
                "import re",
                "",
                "for name, parameter in model.named_parameters():",
                f"    parameter.requires_grad = {negated}re.match({test!r}, name) is not None",
            )
        }


def freeze(model: torch.nn.Module, wish: FreezeWish) -> None:
    """Set `requires_grad` of the model's parameters. Raises `RecipeError` for a name that no parameter
    matches.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    names = [name for name, _ in named]
    prefix = getattr(model, "base_model_prefix", "")
    parts, only = (_matching(model, names, words, prefix) for words in (wish.parts, wish.only))
    if wish.last:
        only |= _of_layers(model, names, wish.last)
    selects = bool(wish.only or wish.last)
    for name, parameter in named:
        parameter.requires_grad_(name not in parts and (name in only or not selects))


def _matching(model: torch.nn.Module, names: Sequence[str], words: Sequence[str], prefix: str) -> set[str]:
    """Return the parameter names that match one of the names or patterns of a recipe's `frozen(...)`.
    `base_model` is the part called `prefix`.
    """
    names_of_words: set[str] = set()
    for word in words:
        expression = re.compile(_expression(word).replace("base_model", prefix or "base_model"))
        of_word = {name for name in names if expression.match(name)}
        if not of_word:
            modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
            raise RecipeError(
                f"frozen: no parameter of the model matches {word!r}.{_about_tied(model, expression)} "
                f"Modules: {some_of([*modules])}. Name one of them."
            )
        names_of_words |= of_word
    return names_of_words


def _about_tied(model: torch.nn.Module, expression: re.Pattern[str]) -> str:
    """Return a sentence that names a tied weight whose other name matches; empty if there is none."""
    first_names: dict[int, str] = {}
    # `named_parameters` yields a tied weight only under its first name by default.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name and expression.match(name):
            return f" {name} is tied to {first}. Name that one."
    return ""


def _expression(word: str) -> str:
    """Convert a word of the recipe (a name or quoted pattern) to a regular expression of parameter names."""
    if not is_word(word):
        return word
    inner = ".*".join(map(re.escape, word.split("*")))
    return rf"(?:.*\.)?{inner}(?:\.|$)"


def _of_layers(model: Any, names: Sequence[str], last: int) -> set[str]:
    """Return the names of the parameters in the last layers. For a number below 0, return those in the first
    layers.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int) or not 0 < abs(last) <= layers:
        raise RecipeError(
            f"frozen: last is {last}, and the model has {layers or 'no counted'} layers. Give at most "
            "that number."
        )
    chosen = range(layers - last, layers) if last > 0 else range(-last)
    inside = re.compile(rf".*\.(?:{'|'.join(map(str, chosen))})\.")
    return {name for name in names if inside.match(name)}
