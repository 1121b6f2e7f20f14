"""Fingerprints of the code of a user's functions, so that a run is not resumed with another loss or collator.

    {"code of loss": "focal (5f0c91aa02be)", "code of loss: gamma": 2.0, ...}

Two versions of a function are compared by their bytecode, without names of files, lines, comments and
docstrings. A function may therefore be moved and documented. The fingerprint covers all functions of the user
that it calls. It also covers plain values: bound arguments, defaults, and variables of a closure. Constants
of its file are included if their names are in capital letters. So are the settings of an `nn.Module` without
parameters, such as torch's losses. Code in installed packages is included by its name only, because their
versions are compared elsewhere. The same holds for Python, whose versions compile differently. Files and
objects that the function reads are not included.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

CODE = "code of "
"""Prefix of the names under which a checkpoint records checksums of the user's functions."""

CONTINUE_ADVICE = " (compare_code=False continues anyway)"
"""Suffix of such a name in the error about resuming a run with changed code."""

_DIGITS = 12
"""Number of hexadecimal digits of a function's checksum (chosen), enough for no two versions to share one."""

_INSTALLED = ("site-packages", "dist-packages", "<frozen")
"""Substrings of the paths of files whose code is not the user's own."""


def code_facts(functions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the code digests and plain values of each function, method or callable object, by its name.

    The value for a missing function is None.
    """
    facts: dict[str, Any] = {}
    for name, function in functions.items():
        code = _Code(function)
        facts[f"{CODE}{name}"] = None if function is None else code.text
        facts |= {f"{CODE}{name}: {key}": value for key, value in code.values.items()}
    return facts


class _Code:
    """Collects the code of one callable and of the user's functions that it calls, to compute its digest."""

    def __init__(self, value: Any) -> None:
        self.values: dict[str, Any] = {}
        self._digest, self._visited, self._is_users = hashlib.sha256(), set[types.CodeType](), False
        self._add(value)
        name = getattr(_function_of(value), "__qualname__", type(value).__qualname__)
        name = name.rpartition("<locals>.")[2]
        self.text = f"{name} ({self._digest.hexdigest()[:_DIGITS]})" if self._is_users else name

    def _add(self, member: Any) -> None:
        """Add the code of a function and its bound arguments, or of the methods of an object's class."""
        if isinstance(member, functools.partial):
            bound = {**{str(index): value for index, value in enumerate(member.args)}, **member.keywords}
            self._add_values(bound)
            self._add(member.func)
        elif isinstance(function := _function_of(member), types.FunctionType):
            self._add_function(function)
        elif not isinstance(member, types.BuiltinFunctionType | types.BuiltinMethodType):
            for kind in type(member).__mro__:
                for method in vars(kind).values():
                    if isinstance(method, types.FunctionType):
                        self._add_function(method)

    def _add_function(self, function: types.FunctionType) -> None:
        if function.__code__ in self._visited or not is_users(function):
            return
        self._visited.add(function.__code__)
        self._is_users, codes = True, list(_with_inner(function.__code__))
        names: set[str] = set()
        written: set[str] = set()
        for code in codes:
            self._digest.update(repr((code.co_varnames[: code.co_argcount], code.co_flags)).encode())
            names |= set(code.co_names)
            for step in dis.get_instructions(code):
                self._digest.update(f"{step.opname} {_text(step.argval)};".encode())
                # A variable that the function itself writes is state, not a setting.
                if step.opname in ("STORE_DEREF", "STORE_GLOBAL"):
                    written.add(step.argval)
        around = {name: function.__globals__[name] for name in names if name in function.__globals__}
        # Global variables of plain types may be counters, so only constants (names in capitals) are compared.
        around = {name: value for name, value in around.items() if name.isupper() or not _is_plain(value)}
        around |= dict(_cells(function))
        self._add_values({name: value for name, value in around.items() if name not in written})
        self._add_values(dict(_defaults(function)))

    def _add_values(self, values: Mapping[str, Any]) -> None:
        import torch

        for key, value in values.items():
            if _is_plain(value):
                self.values[key] = value
            elif isinstance(value, types.FunctionType | functools.partial):
                self._add(value)
            # A module with parameters belongs to the model, whose weights change during training.
            elif isinstance(value, torch.nn.Module) and not list(value.parameters()):
                self._add(value)
                settings = {name: inner for name, inner in vars(value).items() if name != "training"}
                self.values |= {
                    f"{key}.{name}": inner
                    for name, inner in settings.items()
                    if _is_plain(inner) and not name.startswith("_")
                }


def _function_of(value: Any) -> Any:
    """Return the function that a bound method or `functools.partial` wraps, and any other value unchanged."""
    if isinstance(value, functools.partial):
        return _function_of(value.func)
    return getattr(value, "__func__", value)


def is_users(function: types.FunctionType) -> bool:
    """Return True unless the function belongs to an installed package, Python or snugfit."""
    file, module = function.__code__.co_filename, function.__module__ or ""
    is_pythons = file.startswith(inspect.__file__.rpartition("/")[0]) and "-packages" not in file
    return not (is_pythons or module.startswith("snugfit.") or any(part in file for part in _INSTALLED))


def _is_plain(value: Any) -> bool:
    """Return True for values that a fingerprint may contain: finite numbers, flags, text and None."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value is None or (isinstance(value, bool | int | float | str) and is_finite)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code object, and those of the functions and classes defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def _text(value: Any) -> str:
    """Return the argument of a Python bytecode instruction as text.

    A set is sorted, because its order is random. A nested code object becomes its name, because its code is
    added separately.
    """
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value)))
    return value.co_name if isinstance(value, types.CodeType) else repr(value)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function's closure, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable without a value yet
            yield name, cell.cell_contents


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the default values of arguments, by name."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(reversed(names), reversed(function.__defaults__ or ()), strict=False)
    yield from (function.__kwdefaults__ or {}).items()
