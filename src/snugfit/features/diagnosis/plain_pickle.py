"""A pickle of plain data, read without running any of its code.

A snapshot has dicts, lists, tuples, text, bytes, numbers, booleans and None. The reader has only the
instructions for these. A pickle that names a class or a function is refused at that name. Instructions with
an index into the memo table are refused too. In the interpreter's C reader, such an instruction of nine bytes
can allocate gigabytes. `pickle.dump` writes none of them since Python 3.8.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

from snugfit.errors import UsageError

PLAIN = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
    pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.DICT, pickle.LIST, pickle.TUPLE,
    pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS,
    pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
"""Pickle instructions that the reader executes."""

_PYTHON_READER: Any = vars(pickle)["_Unpickler"]
"""The standard library's reader in Python. Its table of instructions can be replaced, unlike that in C."""


class _PlainReader(_PYTHON_READER):  # type: ignore[misc]
    """Subclass of the standard library's unpickler that executes only the instructions for plain data."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: _PYTHON_READER.dispatch[code[0]] for code in PLAIN}


def read_plain_pickle(content: bytes, where: str) -> Any:
    """Return the object in a pickle of plain data. Raises `UsageError`, with `where` as the file's name, for
    any other pickle.
    """
    try:
        return _PlainReader(io.BytesIO(content)).load()
    # The reader looks up each instruction in `dispatch`.
    except KeyError as unknown:
        code = unknown.args[0] if unknown.args else None
        if type(code) is int and code in _PYTHON_READER.dispatch and code not in _PlainReader.dispatch:
            raise UsageError(
                f"{where}: this pickle has the instruction {chr(code)!r}, which no snapshot has, so it "
                "was not read. Write a snapshot with torch.cuda.memory._dump_snapshot."
            ) from None
        raise _damage(where) from None
    except (EOFError, MemoryError, RecursionError, OverflowError):
        raise _damage(where) from None
    except (pickle.UnpicklingError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
        raise _damage(where) from None


def _damage(where: str) -> UsageError:
    return UsageError(f"{where}: this pickle is damaged or cut off. Copy the whole snapshot again.")
