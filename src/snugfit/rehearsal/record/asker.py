"""Which line of code asked for a value, found in the frames of the host.

A question passes torch and the rehearsal itself; the first frame beyond them asked. Where that is the loop
(our own, accelerate's, the HF Trainer's) the value is read for a log or a check that ordinary data passes,
and nothing that is allocated depends on it. So it is in functions that only warn.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple, Self

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
