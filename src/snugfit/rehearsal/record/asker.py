"""The line of code that asks for a value, found in the frames of the host, and the lists in its index.

A question passes torch and the rehearsal itself; the first frame beyond them asked. Where that is the loop
(our own, accelerate's, the HF Trainer's) the value is read for a log or a check that ordinary data passes,
and nothing that is allocated depends on it. So it is in functions that only warn.
"""

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
"""Packages that a question only passes."""

_LOOPS = ("snugfit", "accelerate", "transformers.trainer", "transformers.optimization", "bitsandbytes")
"""Packages that ask for a log or a check."""

_WARNS = ("warn_if_padding_and_no_attention_mask",)
"""Functions of transformers that ask and then warn, or do not."""


class CodeLine(NamedTuple):
    """A line of code that runs."""

    frame: FrameType
    """Of the function that it is in."""
    line: int
    """Its number in its file."""

    @classmethod
    def asking(cls) -> Self | None:
        """The line that asks for a value now; None where the loop does."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_of(module_of(frame), _PASSES_ON):
            frame = frame.f_back
        if frame is None or _is_of(module_of(frame), _LOOPS) or frame.f_code.co_name in _WARNS:
            return None
        return cls(frame, frame.f_lineno)

    def __str__(self) -> str:
        """`, in T5ForSequenceClassification.forward (modeling_t5.py, line 1305: `eos_mask = ...`)`."""
        code = self.frame.f_code
        source = traceback.FrameSummary(code.co_filename, self.line, code.co_name).line or ""
        shown = f": `{source[:_LONGEST_LINE]}`" if source else ""
        return f", in {code.co_qualname} ({PurePath(code.co_filename).name}, line {self.line}{shown})"


def module_of(frame: FrameType) -> str:
    """The dotted name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or in one; `transformers.trainer_utils` is of `trainer`."""
    return any(module == one or module.startswith((f"{one}.", f"{one}_")) for one in packages)


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
    """Return the lists among the indices that the model's code gives now, such as `x[:, [-1, 0]]`.

    torch makes a tensor on `meta` of such a list, without its numbers and unseen by any mode. A replaced
    `Tensor.__getitem__` would make tensors sequences for torch ever after. So the source is evaluated a
    second time, where that changes nothing: for a name, an attribute, or a list of whole numbers.
    """
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
