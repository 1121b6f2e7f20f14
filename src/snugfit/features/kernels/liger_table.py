"""Table of the models that Liger-Kernel supports, with its kernels for each.

They are read from the source of Liger's table and of its functions' parameters, because an import takes
seconds. Without an installed Liger, `liger_models.json` has the table of the version that snugfit is tested
with.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"
_NO_PARTS = {"model", "cross_entropy"}
"""Parameters of Liger's functions that select no kernel of a model: the model itself, and a loss replaced for
the whole process.
"""

PACKAGED = Path(__file__).with_name("liger_models.json")


@functools.cache
def parts_by_model_type() -> Mapping[str, frozenset[str]]:
    """Return the names of Liger's kernels for each `model_type` of transformers.

    Raises `AttributeError` where Liger's source has another form.
    """
    spec = find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        packaged = json.loads(PACKAGED.read_text(encoding="utf-8"))
        return {name: frozenset(parts) for name, parts in packaged.items()}
    folder = Path(next(iter(spec.submodule_search_locations)))
    return _read(folder.joinpath("transformers", "monkey_patch.py").read_text(encoding="utf-8"))


def why_not_covered(model_type: str) -> str:
    """Return the reason why Liger does not support models of this type; empty if it does."""
    known = parts_by_model_type()
    if model_type in known:
        return ""
    families = sorted({name.split("_")[0].rstrip("0123456789.") for name in known})
    return f"Liger has no kernels for {model_type}. It covers {', '.join(families)}."


def _read(source: str) -> Mapping[str, frozenset[str]]:
    parts: dict[str, frozenset[str]] = {}
    table: ast.Dict | None = None
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            parts[node.name] = frozenset(argument.arg for argument in node.args.args) - _NO_PARTS
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            table = node.value if isinstance(node.value, ast.Dict) else None
    # If the source has another form, an empty table would be wrong.
    if table is None:
        raise AttributeError(f"liger_kernel's {_TABLE}")
    pairs = zip(table.keys, table.values, strict=True)
    return {ast.literal_eval(key): parts[ast.unparse(value)] for key, value in pairs if key is not None}
