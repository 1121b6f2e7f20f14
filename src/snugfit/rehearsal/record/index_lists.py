"""Indices that are written as lists, `x[:, [-1, 0]]`, read from the line of code that runs.

torch makes a tensor on `meta` of such a list, without its numbers and unseen by any mode, and
`Tensor.__getitem__` cannot be replaced: that makes tensors sequences for torch ever after. So the list is
worked out a second time from the source, where that changes nothing: it is a name, an attribute, or made of
whole numbers.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.record.asker import CodeLine

if TYPE_CHECKING:
    from types import FrameType

_NUMBERS = (
    ast.List,
    ast.Tuple,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.UnaryOp,
    ast.USub,
    ast.BinOp,
    ast.operator,
)


def lists_in_index() -> list[Any]:
    """The lists among the indices that the model's code gives now, in order; none where that is not known."""
    line = CodeLine.asking()
    expression = _expression(line.frame) if line is not None else None
    if line is None or not isinstance(expression, ast.Subscript):
        return []
    index = expression.slice
    elements = index.elts if isinstance(index, ast.Tuple) else [index]
    return [numbers for element in elements for numbers in _numbers(element, line.frame)]


def _expression(frame: FrameType) -> ast.expr | None:
    """The expression that a frame evaluates."""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    first, last, start, end = position or (None, None, None, None)
    if first is None or last is None:
        return None
    lines = [line.encode() for line in linecache.getlines(frame.f_code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _numbers(element: ast.expr, frame: FrameType) -> Iterator[Any]:
    """The list that an index stands for, if it is one."""
    if isinstance(element, ast.List):
        names = [part.id for part in ast.walk(element) if isinstance(part, ast.Name)]
        known = all(type(frame.f_locals.get(name, frame.f_globals.get(name))) is int for name in names)
        if not known or not all(isinstance(part, _NUMBERS) for part in ast.walk(element)):
            return
    elif not isinstance(element, (ast.Name, ast.Attribute)):
        return
    code = compile(ast.Expression(element), "<index>", "eval")
    value = eval(code, frame.f_globals, frame.f_locals)
    if type(value) in (list, tuple, range) and all(type(number) in (int, bool) for number in value):
        yield list(value)
