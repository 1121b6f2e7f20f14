"""Which modules LoRA adapts when nobody names them: peft's choice for the architecture, else all linear ones.

peft's table (`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`) is read here and its names are given to
peft, because peft itself looks an architecture up by its own name only (Gemma 3 stands there by that of its
text part), and not at all where it renames what transformers stores in another shape (Mixtral's experts).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.job.model import Model

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the head."""

_PEFTS_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def default_targets(model: Any) -> str | list[str]:
    """The ends of the names of the modules to adapt, a regular expression, or `ALL_LINEAR`, for a module that
    is built or a `Model`."""
    return _pefts_choice(model) or ALL_LINEAR


def has_default_targets(model: Model) -> bool:
    """Whether peft's table has the model's architecture, or that of its text part."""
    return _pefts_choice(model) is not None


def chosen_by_peft(model: Model) -> bool:
    """Whether peft itself finds its table's modules for this architecture when it is told none."""
    return model.architecture in pefts_table() and not any("expert" in key for key in model.config)


def _pefts_choice(model: Any) -> str | list[str] | None:
    """What peft's table has for a module that is built, or for a `Model`."""
    if hasattr(model, "facts") and model.module is None:
        config = model.config
        names = _names(config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
    else:
        config = getattr(model.module if hasattr(model, "facts") else model, "config", None)
        part = getattr(config, "text_config", None)
        names = _names(getattr(config, "model_type", None), getattr(part, "model_type", None))
    table = pefts_table()
    return next((table[name] for name in names if name in table), None)


def _names(architecture: str | None, part: str | None) -> Iterator[str]:
    yield from filter(None, (architecture, f"{architecture}_text", part))


@cache
def pefts_table() -> Mapping[str, str | list[str]]:
    """peft's default targets by architecture, read from its source, for importing it imports torch. Empty
    where it is not to be read."""
    spec = find_spec("peft")
    if spec is None or spec.origin is None:
        return {}
    try:
        source = Path(spec.origin).with_name("utils").joinpath("constants.py").read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _PEFTS_TABLE:
                return dict(ast.literal_eval(statement.value))
    except (OSError, ValueError):  # another peft, which computes its table
        pass
    return {}
