"""Count tokens and branch points of each room, and fail where they rise without a reason.

    python lab/code_size.py
    python lab/code_size.py --update --reason "TEXT"

`make lint` runs it. `lab/code_size.json` holds the counts and the reasons for each rise. Docstrings, comments
and line breaks are not counted, so that nothing is gained by squeezing lines.

Rows: each folder of `src/snugfit`, its single files together, each feature, and `lab`. Tests are not counted.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

from committed_counts import compare, read_arguments

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "snugfit"

LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)
"""Kinds of tokens that are not counted."""

BRANCHES = (
    ast.AsyncFor, ast.BoolOp, ast.ExceptHandler, ast.For, ast.If, ast.IfExp, ast.While, ast.comprehension,
    ast.match_case,
)  # fmt: skip
"""Nodes at which a program takes one of several ways."""


def tokens(text: str, docstrings: set[tuple[int, int]]) -> int:
    """Return the number of tokens of a source text, without docstrings that begin at these positions."""
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start not in docstrings for token in read)


def branch_points(tree: ast.AST) -> int:
    """Return the number of branch points of a syntax tree."""
    return sum(isinstance(node, BRANCHES) for node in ast.walk(tree))


def docstrings(tree: ast.AST) -> set[tuple[int, int]]:
    """Return the positions (line, column) of strings that are statements."""
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def row_of(path: Path) -> str:
    """Return the row of a file: its room, its feature, or `lab`."""
    if not path.is_relative_to(SOURCE):
        return "lab"
    folders = path.relative_to(SOURCE).parts[:-1]
    return "/".join(folders[: 1 + (folders[:1] == ("features",))]) or "snugfit"


def count() -> dict[str, dict[str, int]]:
    """Return tokens and branch points by row."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: {"tokens": 0, "branch points": 0})
    for path in sorted([*SOURCE.rglob("*.py"), *(ROOT / "lab").rglob("*.py")]):
        if "tests" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        row = rows[row_of(path)]
        row["tokens"] += tokens(text, docstrings(tree))
        row["branch points"] += branch_points(tree)
    return {name: rows[name] for name in sorted(rows)}


def main() -> int:
    """Compare the counts with the table. Return 1 if one rose."""
    asked = read_arguments(__doc__.splitlines()[0])
    counts = count()
    total = {name: sum(row[name] for row in counts.values()) for name in ("tokens", "branch points")}
    print(f"{total['tokens']:,} tokens and {total['branch points']:,} branch points.")
    table = Path(__file__).with_suffix(".json")
    return compare(table, counts, what="Code size", update=asked.update, reason=asked.reason)


if __name__ == "__main__":
    sys.exit(main())
