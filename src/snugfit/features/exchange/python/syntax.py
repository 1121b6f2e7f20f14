"""Expressions of a syntax tree, rewritten or as text."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def replace_names(expression: ast.expr, by: Mapping[str, ast.expr]) -> ast.expr:
    """Return a copy of an expression with other expressions in the place of some names."""

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return by.get(node.id, node)

    replaced: ast.expr = Replace().visit(as_read(expression))
    return replaced


def as_read(target: ast.expr) -> ast.expr:
    """Return an assigned expression as one that is read."""
    read: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    return read


def first_line(node: ast.AST) -> str:
    """Return a statement in one line; only the head of a block."""
    return ast.unparse(node).splitlines()[0]
