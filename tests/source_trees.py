"""The source of the package, parsed once for all tests of a process that read it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "snugfit"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "tests" not in path.parts[len(SOURCE.parts) :])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return every node of a tree; a dozen tests read all of them."""
    return tuple(ast.walk(tree))
