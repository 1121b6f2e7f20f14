"""Which models Liger-Kernel covers, and with which parts: read from its source, since importing it takes
seconds and wants a GPU's libraries."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"
_ENTIRE = {"model", "cross_entropy"}
"""Parameters that are no part of it: the model itself, and a loss that is replaced for the whole process."""


@functools.cache
def parts_by_model_type() -> Mapping[str, frozenset[str]]:
    """By transformers' `model_type`, the parts that Liger has for it; empty where it is not installed.
    Raises `AttributeError` where its source has another form."""
    spec = find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        return {}
    file = Path(next(iter(spec.submodule_search_locations))) / "transformers" / "monkey_patch.py"
    parts: dict[str, frozenset[str]] = {}
    table: ast.Dict | None = None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
            parts[node.name] = frozenset(names) - _ENTIRE
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            table = node.value if isinstance(node.value, ast.Dict) else None
    if table is None:
        raise AttributeError(f"liger_kernel's {_TABLE}")
    pairs = zip(table.keys, table.values, strict=True)
    return {ast.literal_eval(key): parts[ast.unparse(value)] for key, value in pairs if key is not None}


def says_not_covered(model_type: str) -> str:
    """That Liger does nothing for such a model, and for which it does."""
    families = sorted({name.rstrip("0123456789").split("_")[0] for name in parts_by_model_type()})
    return f"Liger has no kernels for {model_type}. It covers {', '.join(families)}."
