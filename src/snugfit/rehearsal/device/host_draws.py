"""Replace random numbers that a forward pass draws on the host to skip layers (LayerDrop, stochastic depth).
A real run draws new numbers in each step, so its peak memory is that of the worst draw.

The replacement is the largest possible number, with which no layer is dropped. So the prediction is an upper
bound, and a few measured steps may need less. Steps of wav2vec2-bert with 24 layers measured 790 MB less than
predicted (`results/h200-2026-11-30/tasks.json`). Each of its layers keeps 789 MB of activations, so every
measured step dropped at least one layer.

Other draws (a loader's order, the initialisation of weights) are unchanged.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any

import numpy
import torch

Doubt = Callable[[str], None]

LARGEST = 1 - 2**-24
"""The largest fp32 number that `torch.rand` can return."""

_DRAWN_IN = ("forward", "backward")
"""Phases of a step in which the model's code runs. In backward, activation checkpointing runs it again."""


def replaced_draws(doubt: Doubt, phase: Callable[[], str]) -> dict[Any, Any]:
    """Return replacements for the functions that draw random numbers on the host, by function."""

    def scalar(draw: Any) -> Any:
        def largest(*arguments: Any, **keywords: Any) -> Any:
            if arguments or keywords or phase() not in _DRAWN_IN:
                return draw(*arguments, **keywords)
            return _Draw(doubt, sys._getframe(1))

        return largest

    def uniform(draw: Any) -> Any:
        def largest(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
            if (low, high, size) != (0, 1, None) or phase() not in _DRAWN_IN:
                note(sys._getframe(1))
                return draw(low, high) if size is None else draw(low, high, size)
            return _Draw(doubt, sys._getframe(1))

        return largest

    def rand(*size: Any, **keywords: Any) -> Any:
        on_the_host = torch.get_default_device().type == "cpu" and not keywords
        if not on_the_host or size not in _ONE or phase() not in _DRAWN_IN:
            return draw_tensor(*size, **keywords)
        shape = size[0] if isinstance(size[0], (tuple, list)) else size
        return _DrawnTensor.of(_Draw(doubt, sys._getframe(1)), shape)

    def other(draw: Any) -> Any:
        def draw_and_note(*arguments: Any, **keywords: Any) -> Any:
            note(sys._getframe(1))
            return draw(*arguments, **keywords)

        return draw_and_note

    def note(frame: FrameType) -> None:
        if phase() in _DRAWN_IN:
            doubt(_sentence(frame))

    draw_tensor = torch.rand
    numpy_random: Any = numpy.random
    return {
        draw_tensor: rand,
        **{draw: scalar(draw) for draw in (random.random, numpy_random.random, numpy_random.rand)},
        **{draw: uniform(draw) for draw in (random.uniform, numpy_random.uniform)},
        **{draw: other(draw) for draw in (random.randint, random.randrange, random.choice, random.gauss)},
        **{draw: other(draw) for draw in (numpy_random.randint, numpy_random.choice, numpy_random.randn)},
    }


def replaced_functions() -> dict[Any, Any]:
    """Return replacements for the functions of `math`, whose results are marked as assumed if their argument
    is a random or assumed number."""

    def watch(function: Any) -> Any:
        def compute(*numbers: Any, **keywords: Any) -> Any:
            result = function(*numbers, **keywords)
            for number in numbers:
                if type(number) is not float and (after := getattr(number, "after_function", None)):
                    return after(result)
            return result

        return compute

    return {getattr(math, name): watch(getattr(math, name)) for name in _FUNCTIONS if hasattr(math, name)}


_FUNCTIONS = (
    "acos", "asin", "atan", "atan2", "cbrt", "copysign", "cos", "cosh", "degrees", "dist", "erf", "erfc",
    "exp", "exp2", "expm1", "fabs", "fmod", "frexp", "gamma", "hypot", "isclose", "ldexp", "lgamma", "log",
    "log10", "log1p", "log2", "modf", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Names of the functions of `math` that take floats, except rounding and tests for finiteness."""

_ONE: tuple[Any, ...] = ((1,), ([],), ((),), ([1],), ((1,),))
"""Arguments of `torch.rand` with which it returns a single number."""


def _sentence(frame: FrameType) -> str:
    code = frame.f_code
    line = f"{code.co_qualname} ({PurePath(code.co_filename).name}, line {frame.f_lineno})"
    return (
        f"{line} draws random numbers on the host, which may decide the code that runs. The prediction "
        "takes the largest number each time, so LayerDrop drops no layer. Steps that drop layers need less."
    )


class _Draw(float):
    """A float that replaces a random number drawn on the host, such as LayerDrop's, with the largest possible
    value. Each use of it adds a warning, except a comparison with the same result for every number in [0, 1).
    """

    tell: Callable[[], None]

    def __new__(cls, doubt: Doubt, frame: FrameType) -> _Draw:
        draw = super().__new__(cls, LARGEST)
        sentence = _sentence(frame)
        draw.tell = lambda: doubt(sentence)
        return draw

    def after_function(self, result: Any) -> Any:
        """Add a warning that a function of the random number is used, and return the function's result
        unchanged.
        """
        self.tell()
        return result

    def compare(self, other: Any) -> None:
        """Compare the random number with another one, and add a warning if the result depends on the draw."""
        # A probability of 0 or 1, as in BART's layers, has the same result for every draw.
        if not isinstance(other, (int, float)) or 0 < other < 1:
            self.tell()


def _doubtful(name: str, *, compares: bool) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: _Draw, *others: Any) -> Any:
        if compares:
            self.compare(others[0])
        else:
            self.tell()
        return plain(self, *others)

    return method


_COMPARING = ("lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "pow", "neg")
_CONVERTING = ("int", "float", "round", "floor", "ceil", "trunc", "bool")
for _name in _COMPARING:
    setattr(_Draw, f"__{_name}__", _doubtful(f"__{_name}__", compares=True))
for _name in (*_ARITHMETIC, *_CONVERTING):
    setattr(_Draw, f"__{_name}__", _doubtful(f"__{_name}__", compares=False))


class _DrawnTensor(torch.Tensor):
    """A one-element tensor that contains a random number drawn in a simulation."""

    draw: _Draw

    @classmethod
    def of(cls, draw: _Draw, shape: Sequence[int]) -> _DrawnTensor:
        """Return a tensor of this shape that contains the drawn random number."""
        tensor = torch.full(tuple(shape), LARGEST).as_subclass(cls)
        tensor.draw = draw
        return tensor

    def item(self) -> Any:
        """Return the random number that this tensor contains, still marked as drawn."""
        return self.draw

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw: _Draw = args[0].draw if isinstance(args[0], cls) else args[1].draw
        # Otherwise the comparison would be dispatched to this method again.
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__.strip("_") in _COMPARING and isinstance(args[0], cls):
                draw.compare(args[1])
            else:
                draw.tell()
            return func(
                *(
                    argument.as_subclass(torch.Tensor) if isinstance(argument, cls) else argument
                    for argument in args
                )
            )
