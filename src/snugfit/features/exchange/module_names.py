"""Conversion of other libraries' names of modules and parameters to settings of snugfit's adapters.

peft reads a list as suffixes of module names, and a text as one regular expression. axolotl's patterns of
trained parameters contain unescaped dots. They may end in a range of rows, but the whole parameter gets
gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from snugfit.techniques.setting import is_word
from snugfit.techniques.technique import ALL_LINEAR

NAMES = (
    "lora.target_modules", "lora.modules_to_save", "lora.exclude_modules", "lora.target_parameters",
    "frozen.parts", "frozen.only",
)  # fmt: skip
"""Arguments whose values are names of modules or parameters."""

LAYERS, OPTIMIZED = "lora.layers_to_transform", "optim_target_modules"
PATTERNS = ("lora.rank_pattern", "lora.alpha_pattern")
"""Arguments that map patterns of module names to numbers."""

TRAINED = "frozen.patterns_of_axolotl"

_SPECIAL = re.compile(r"[\\^$*+?()|\[\]{}]")
_ROWS = re.compile(r"\[\d*:?\d*\]$")


def read_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return another library's arguments, with names of modules converted to the form of
    snugfit's settings.
    """
    whole = dict(arguments)
    for key in NAMES:
        if key in whole:
            whole[key] = _names(whole[key])
    if OPTIMIZED in whole:
        whole[OPTIMIZED] = _optimizer_targets(whole[OPTIMIZED])
    if isinstance(layers := whole.get(LAYERS), int | list):
        whole[LAYERS] = tuple(layers) if isinstance(layers, list) else (layers,)
    for pattern in PATTERNS:
        of_names = {key: whole.pop(key) for key in [*whole] if key.startswith(f"{pattern}.")}
        if of_names:
            whole[pattern] = tuple(f"{key[len(pattern) + 1 :]}:{number}" for key, number in of_names.items())
    if isinstance(patterns := whole.pop(TRAINED, None), list) and patterns:
        whole |= {"frozen": True, "frozen.only": tuple(map(_of_axolotl, map(str, patterns)))}
    return {key: None if value in ((), {}) else value for key, value in whole.items()}


def _names(value: Any) -> Any:
    if isinstance(value, str) and _SPECIAL.search(value):
        # The regex group distinguishes a pattern from a name.
        return (f"(?:{value})" if is_word(value) else value,)
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(map(str, value)) if isinstance(value, list) else value


def _optimizer_targets(value: Any) -> Any:
    """Convert the names of the modules to which an optimizer applies (such as GaLore's) to snugfit's
    settings. A text is a pattern, except for the word for all linear layers.
    """
    if isinstance(value, str):
        word = value.replace("_", "-")
        return (word,) if word == ALL_LINEAR else value
    return tuple(map(str, value)) if isinstance(value, list) else value


def _of_axolotl(pattern: str) -> str:
    expression = _ROWS.sub("", pattern).replace(".", r"\.") if ":" in pattern else pattern.replace(".", r"\.")
    return f"(?:{expression})" if is_word(expression) else expression
