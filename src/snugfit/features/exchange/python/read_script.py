"""Read a training script or a notebook without executing it."""

from __future__ import annotations

import ast
import json
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.exchange.python.evaluate import evaluate
from snugfit.features.exchange.python.meaning import NO_PLAIN_LOOP, Script, read_meaning


def read_script(text: str, where: str, *, bfloat16: bool | None = None) -> Script:
    """Return the job, the model and the arguments of a script.

    `bfloat16` is the named GPU's support for it; None if no GPU is named. Raises `UsageError` for a script
    that does not train a model of transformers, or trains it in a way that is not predicted.
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
        return read_meaning(done, where)
    except RecursionError:
        raise UsageError(f"{where}: its objects depend on each other too deeply. {NO_PLAIN_LOOP}") from None


def code_of_notebook(text: str, where: str) -> str:
    """Return the code cells of a notebook as one script, without the lines of IPython and the shell.

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
    # A magic such as `%%bash` makes its whole cell another language.
    return "\n".join("\n".join(map(_plain, code.splitlines())) for code in codes if not code.startswith("%%"))


def _plain(line: str) -> str:
    """Return the line as Python. A line of the shell or of IPython becomes `pass`."""
    stripped = line.lstrip()
    indent = line[: len(line) - len(stripped)]
    return f"{indent}pass" if stripped.startswith(("!", "%", "?")) else line
