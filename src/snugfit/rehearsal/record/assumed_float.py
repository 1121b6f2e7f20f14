"""A number that was assumed, in the hands of the model's code.

Most numbers that a model asks for go into a log or scale something, and nothing that is allocated depends on
them. So an assumed number is a float that tells when something is decided by it: a comparison, a count made
of it. What is computed of it by Python's operators and by `math` is such a float too; a plain float made of
it, or one of numpy's, could no longer tell, and so tells at once. In an operator of torch it is a number like
any other, so its value is an odd one, and an operator that is given it gives nothing known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

ABOUT_ONE = 1.0 + 2.0**-40
"""An assumed number: 1, but for a bit by which it, and what is computed of it, is known again."""


class AssumedFloat(float):
    """A float that calls `decides` when something is decided by it. Its value is added to `known`."""

    __slots__ = ("_decides", "_known")
    _decides: Callable[[], None]
    _known: set[float]

    def __new__(cls, value: float, decides: Callable[[], None], known: set[float]) -> AssumedFloat:
        """A number of this value."""
        number = super().__new__(cls, value)
        number._decides, number._known = decides, known
        if not (4 * value).is_integer():  # 0, which is left of many, is no sign
            known.add(value)
        return number

    __hash__ = float.__hash__

    def after_function(self, result: Any) -> Any:
        """What a function has computed of it: an assumed number too, if it is one."""
        if type(result) is float:
            return AssumedFloat(result, self._decides, self._known)
        self._decides()
        return result

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **keywords: Any) -> Any:
        self._decides()
        plain = [float.__add__(one, 0.0) if isinstance(one, AssumedFloat) else one for one in operands]
        return getattr(function, method)(*plain, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a plain number."""
        return float, (float.__add__(self, 0.0),)


_INFINITE = (math.inf, -math.inf)


def _deciding(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def decide(self: AssumedFloat, *others: Any) -> Any:
        if not any(other is self or other in _INFINITE for other in others):  # a check that it is finite
            self._decides()
        return method(self, *others)

    return decide


def _computing(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def compute(self: AssumedFloat, *others: Any) -> Any:
        result = method(self, *others)
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
