"""A float with an assumed value, which model code receives in place of a number that depends on weights.

Most numbers that a model reads are logged or scale a tensor, and no allocation depends on them. So an assumed
number is a float that reports only comparisons and conversions to an integer. Results of Python's operators
and of `math` are such floats too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# torch receives it as an ordinary float, so only an unusual value identifies it in an operator.
ASSUMED_VALUE = 1.0 + 2.0**-40
"""Assumed value of unknown numbers: 1, plus a small fraction by which it and values computed from it are
recognized.
"""


class AssumedFloat(float):
    """A float whose value is assumed in a simulation. It calls `decides` if code compares it or converts it
    to an integer. The value is added to the set `known` of assumed numbers.
    """

    __slots__ = ("_decides", "_known")
    _decides: Callable[[], None]
    _known: set[float]

    def __new__(cls, value: float, decides: Callable[[], None], known: set[float]) -> AssumedFloat:
        """Return an assumed float with this value."""
        number = super().__new__(cls, value)
        number._decides, number._known = decides, known
        if not (4 * value).is_integer():  # 0 results from many computations, so it identifies none
            known.add(value)
        return number

    __hash__ = float.__hash__

    def after_function(self, result: Any) -> Any:
        """Return the result of a function on this number, as an assumed number if it is a float. Otherwise
        call `decides`, since the result may change the code path.
        """
        if type(result) is float:
            return AssumedFloat(result, self._decides, self._known)
        self._decides()
        return result

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **keywords: Any) -> Any:
        # A numpy float could not report later decisions, so the conversion itself is reported as one.
        self._decides()
        # `float(one)` would call the replaced `__float__` and report a second time.
        plain = [
            float.__add__(operand, 0.0) if isinstance(operand, AssumedFloat) else operand
            for operand in operands
        ]
        return getattr(function, method)(*plain, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain float, so that a copy is a plain float."""
        # Operators on the float return assumed numbers; the unbound method returns a plain one.
        return float, (float.__add__(self, 0.0),)


_INFINITE = (math.inf, -math.inf)


def _deciding(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def decide(self: AssumedFloat, *others: Any) -> Any:
        if not any(other is self or other in _INFINITE for other in others):  # not a check that it is finite
            self._decides()
        return method(self, *others)

    return decide


def _computing(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def compute(self: AssumedFloat, *others: Any) -> Any:
        result = method(self, *others)
        # A power may be complex, and a foreign operand returns NotImplemented.
        return AssumedFloat(result, self._decides, self._known) if type(result) is float else result

    return compute


_DECIDING = (
    "lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "trunc", "floor", "ceil", "round", "divmod",
    "floordiv",
)  # fmt: skip
_COMPUTING = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "pos", "abs",
    "mod",
)  # fmt: skip

for _name in _DECIDING:
    setattr(AssumedFloat, f"__{_name}__", _deciding(f"__{_name}__"))
for _name in _COMPUTING:
    setattr(AssumedFloat, f"__{_name}__", _computing(f"__{_name}__"))
