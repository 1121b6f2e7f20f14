"""Read a training script or a notebook without executing it."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.exchange.python.evaluate import evaluate
from snugfit.features.exchange.python.meaning import Script, read_meaning
from snugfit.features.exchange.python.objects import NO_PLAIN_LOOP

_FOREIGN = re.compile(r"\s*%%(?!capture|time|timeit|prun)")
"""Regular expression of a notebook cell in another language, such as `%%bash`. The excluded magics run their
cell as Python.
"""


def read_script(text: str, where: str, *, bfloat16: bool | None = None) -> Script:
    """Read a training script without executing it. Return its job settings and training arguments.

    `bfloat16` is True if the named GPU supports it; None if no GPU is named. Raises `UsageError` for a script
    that does not train a model of transformers, or whose training step snugfit cannot predict.
    """
    try:
        tree = ast.parse(text)
        done = evaluate(tree, bfloat16=bfloat16)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, why = "", str(error)
        if isinstance(error, SyntaxError):
            line, why = f", line {error.lineno}" if error.lineno else "", error.msg
        raise UsageError(f"{where}{line}: this is not valid Python ({why}). Correct the script.") from None
    try:
        return read_meaning(done, where, bfloat16=bfloat16)
    except RecursionError:
        raise UsageError(f"{where}: its objects depend on each other too deeply. {NO_PLAIN_LOOP}") from None


def code_of_notebook(text: str, where: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the code cells of a notebook as one script, without IPython magics and shell commands.

    Cells that are not valid Python are left out, and the second value has the line and the text of each.
    Raises `UsageError` for a file that is no notebook.
    """
    try:
        document = json.loads(text)
        cells: list[dict[str, Any]] = document["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{where}: this is not a notebook of Jupyter: it has no list of cells. Give an .ipynb file "
            "that Jupyter has saved."
        ) from None
    lines: list[str] = []
    broken: list[tuple[int, str]] = []
    for code in codes:
        cell = [] if _FOREIGN.match(code) else _SHELL.sub(r"\1pass", code).splitlines()
        try:
            ast.parse("\n".join(cell))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            broken.append((len(lines) + 1, f"a cell that is not valid Python ({cell[0].strip()} ...)"))
            continue
        lines += cell
    return "\n".join(lines), broken


_SHELL = re.compile(r"^([ \t]*)[!%?](?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
"""Regular expression of a shell or IPython command, with the lines that a backslash continues."""
