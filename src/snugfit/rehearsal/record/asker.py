"""Find the line of model code that reads a tensor's value, and the lists of numbers in its index
expression."""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from types import FrameType


_LONGEST_LINE = 100

_PASSES_ON = ("torch", "snugfit.rehearsal", "contextlib", "functools")
"""Prefixes of packages whose stack frames are skipped, since they read a value on behalf of other code."""

_LOOPS = ("snugfit", "accelerate", "transformers.trainer", "transformers.optimization", "bitsandbytes")
"""Packages that read values only for a log or a check. Such a read does not change a step."""

_WARNING_FUNCTIONS = ("warn_if_padding_and_no_attention_mask",)
"""Functions of transformers that read a value only to decide on a warning."""


class CodeLine(NamedTuple):
    """A line of the model's code and its stack frame."""

    frame: FrameType
    """Stack frame of the function with this line."""
    line: int
    """Number of the line in its source file."""

    @classmethod
    def of_stack(cls) -> Self | None:
        """Return the line of model code on the current stack that reads a tensor's value; None if a training
        loop reads it.
        """
        frame: FrameType | None = sys._getframe(1)
        # The read passes through frames of torch and of the simulation; the first other frame is its origin.
        while frame is not None and _is_of(module_of(frame), _PASSES_ON):
            frame = frame.f_back
        # A training loop reads a value for a log, or for a check that ordinary data passes. No allocation
        # depends on it.
        if frame is None or _is_of(module_of(frame), _LOOPS) or frame.f_code.co_name in _WARNING_FUNCTIONS:
            return None
        return cls(frame, frame.f_lineno)

    def __str__(self) -> str:
        """Return the line as text: `, in T5ForSequenceClassification.forward (modeling_t5.py, line 1305:
        `eos_mask = ...`)`.
        """
        code = self.frame.f_code
        source = traceback.FrameSummary(code.co_filename, self.line, code.co_name).line or ""
        shown = f": `{source[:_LONGEST_LINE]}`" if source else ""
        return f", in {code.co_qualname} ({PurePath(code.co_filename).name}, line {self.line}{shown})"


def module_of(frame: FrameType) -> str:
    """Return the dotted name of a frame's module."""
    return str(frame.f_globals.get("__name__", ""))


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    """Return True if a module is one of these packages or inside of one; `transformers.trainer_utils` counts
    as part of `trainer`."""
    return any(module == package or module.startswith((f"{package}.", f"{package}_")) for package in packages)


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
    """Return the lists among the indices of the model's current expression, as in `x[:, [-1, 0]]`.

    torch creates a tensor on `meta` from such a list, without its numbers. No dispatch mode receives this
    operation. A replaced `Tensor.__getitem__` would turn tensors into sequences for torch permanently. So the
    source of the index is evaluated a second time if that has no side effect. This is true for a name, an
    attribute, or a list of whole numbers.
    """
    line = CodeLine.of_stack()
    expression = _expression(line.frame) if line is not None else None
    if line is None or not isinstance(expression, ast.Subscript):
        return []
    index = expression.slice
    elements = index.elts if isinstance(index, ast.Tuple) else [index]
    return [numbers for element in elements for numbers in _numbers(element, line.frame)]


def _expression(frame: FrameType) -> ast.expr | None:
    """Return the syntax tree of the expression that a frame evaluates now, or None."""
    # `f_lasti` counts bytes, and an instruction has two.
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    first, last, start, end = position or (None, None, None, None)
    if first is None or last is None:
        return None
    # Columns of `co_positions` count bytes of UTF-8, not characters.
    lines = [line.encode() for line in linecache.getlines(frame.f_code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    # The end is cut first: for an expression on one line, both columns refer to the same string.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        # Parentheses allow line breaks inside the expression.
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _numbers(element: ast.expr, frame: FrameType) -> Iterator[Any]:
    """Yield the value of one part of an index expression if it is a list of integers, as in `x[:, [-1,
    0]]`."""
    if isinstance(element, ast.List):
        names = [part.id for part in ast.walk(element) if isinstance(part, ast.Name)]
        # A second evaluation must have no side effect, so only plain integers and operators on them are
        # allowed.
        known = all(type(frame.f_locals.get(name, frame.f_globals.get(name))) is int for name in names)
        if not known or not all(isinstance(part, _NUMBERS) for part in ast.walk(element)):
            return
    elif not isinstance(element, (ast.Name, ast.Attribute)):
        return
    code = compile(ast.Expression(element), "<index>", "eval")
    value = eval(code, frame.f_globals, frame.f_locals)
    if type(value) in (list, tuple, range) and all(type(number) in (int, bool) for number in value):
        yield list(value)
