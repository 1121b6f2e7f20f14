"""Documents between processes and on disk: JSON files that are complete or absent.

A document is written to a temporary file in the same folder, flushed to the disk, then renamed. A reader gets
the old document or the new one, never an incomplete one. Reading accepts only a plain file of at most a few
MiB. Its content must be strict JSON (no NaN, no Infinity, no number beyond a double) with an object at the
top. Nothing is ever unpickled.

A command's answer may be a document too. Libraries print to stdout when they are imported (DeepSpeed), so
`only_documents_on_stdout` redirects all other output to stderr.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, TextIO, TypeVar, get_args, get_origin, get_type_hints

from snugfit.errors import UsageError

T = TypeVar("T")

LARGEST_DOCUMENT = 8 << 20
"""Largest size of a JSON document, in bytes. Most have a few kilobytes, one with a thousand timed steps
fifty."""

_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags to open a file without waiting on a pipe. Windows has neither of the two."""


_STDOUT: ContextVar[TextIO | None] = ContextVar("_STDOUT", default=None)
"""Text stream to which a command prints its JSON document while other output goes to stderr; None otherwise.
"""


class BadDocument(Exception):
    """Error for a file that is no valid JSON document of snugfit. The message names the fault."""


@contextmanager
def only_documents_on_stdout() -> Iterator[None]:
    """Context in which stdout receives only documents, and stderr all other output."""
    stdout = sys.stdout
    token = _STDOUT.set(stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
        stdout.flush()
    finally:
        _STDOUT.reset(token)


def stdout_of_documents() -> TextIO:
    """Return the stream to which a command prints its JSON document: the real stdout."""
    return _STDOUT.get() or sys.stdout


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document to a file completely or not at all. Raises `OSError` if the disk refuses."""
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write content to a file completely or not at all, through a temporary file in the same folder."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_document(path: Path, *, limit: int = LARGEST_DOCUMENT) -> dict[str, Any]:
    """Return the JSON object in the file.

    Raises `FileNotFoundError`, or `BadDocument` for any other content.
    """
    try:
        document = parse_json(read_limited(path, limit))
    except FileNotFoundError:
        raise
    except OSError as refusal:
        raise BadDocument(f"{path.name} cannot be read: {refusal.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise BadDocument(f"{path.name} is not strict JSON: {fault}") from None
    if not isinstance(document, dict):
        raise BadDocument(f"{path.name} contains a {type(document).__name__}, not an object")
    return document


def read_limited(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; never wait for a pipe or a device.

    Raises `OSError`, or `BadDocument` for another kind of file or a larger one.
    """
    descriptor = os.open(path, _READ)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadDocument(f"{path.name} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise BadDocument(f"{path.name} is larger than {limit:,} bytes")
    return content


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """Parse strict JSON. Raises `ValueError` for a repeated key, NaN, Infinity or a number beyond a double.

    With `constants`, NaN and infinite numbers are accepted, in the notation of Python's `json`.
    """
    if constants:
        return json.loads(text, object_pairs_hook=_without_repeats)
    return json.loads(
        text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant, parse_float=_finite
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return document


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is infinite")
    return number


class JsonFields:
    """Base class of dataclasses whose JSON objects have their fields as keys."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads."""
        return encode_fields(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the object that `to_json` wrote. Raises `KeyError` for a missing key and `TypeError` for a
        value that is no object."""
        return decode_fields(cls, document)


class JsonDocument(JsonFields):
    """Base class of results that commands print as JSON."""

    what: ClassVar[str]
    """Kind of the document, such as `plan`: the value of its JSON key `what`."""

    schema: ClassVar[int] = 1
    """Version of the document's keys. It rises when a key is removed or changes its meaning."""

    def derived_keys(self) -> dict[str, Any]:
        """Return the computed keys of the document with their values, which are added to the fields or
        replace them.
        """
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return the document that the command prints; `from_json` reads it."""
        head = {"schema": self.schema, "what": self.what}
        return head | encode_fields(self, **self.derived_keys())

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the result from the document that `to_json` wrote. Raises `UsageError` for any other
        document.
        """
        if (document.get("what"), document.get("schema")) != (cls.what, cls.schema):
            raise UsageError(
                f"This is not a document {cls.what!r} of this version of snugfit. Compute it again."
            )
        try:
            return decode_fields(cls, document)
        except (KeyError, TypeError, ValueError) as damaged:
            raise UsageError(f"This {cls.what!r} is damaged: {damaged}. Compute it again.") from None


def encode_fields(value: Any, **derived: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object of its fields. `derived` values add or replace fields."""
    names = (entry.name for entry in dataclasses.fields(value))
    return {name: encode(getattr(value, name)) for name in names if name not in derived} | derived


def encode(value: Any) -> Any:
    """Convert a value for JSON: by its own `to_json` where it has one, a dataclass by its fields."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return encode_fields(value)
    if isinstance(value, Mapping):
        return {name: encode(entry) for name, entry in value.items()}
    return [encode(entry) for entry in value] if isinstance(value, tuple | list) else value


def decode_fields(kind: type[T], document: Mapping[str, Any]) -> T:
    """Return an instance of the dataclass `kind` from the JSON object that `encode_fields` wrote.

    Keys that are no fields of it are ignored. Raises `KeyError` where a field without a default is missing,
    and `TypeError` for a value that is no object.
    """
    hints = _hints_of(kind)  # type: ignore[arg-type]
    given = dict(document)
    entries = dataclasses.fields(kind)  # type: ignore[arg-type]
    for entry in entries:
        if entry.default is entry.default_factory is dataclasses.MISSING and entry.name not in given:
            raise KeyError(entry.name)
    names = (entry.name for entry in entries if entry.name in given)
    return kind(**{name: _decode(hints[name], given[name]) for name in names})


_hints_of = functools.cache(
    get_type_hints
)  # the function compiles each annotation, and a plan has thousands of objects


def _decode(kind: Any, value: Any) -> Any:
    """Convert a JSON value to a value of this type.

    Types are `X | None`, tuples, mappings, dataclasses, and types with `from_json`.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin is UnionType:
        return _decode(inner[0], value)
    if origin is tuple:
        kinds = repeat(inner[0]) if inner[-1] is Ellipsis else inner
        return tuple(_decode(of, entry) for of, entry in zip(kinds, value, strict=False))
    if origin is Mapping:
        return {name: _decode(inner[1], entry) for name, entry in dict(value).items()}
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    is_class = dataclasses.is_dataclass(kind) and isinstance(kind, type)
    return decode_fields(kind, value) if is_class else value


def finite_or_null(numbers: Sequence[float]) -> list[float | None]:
    """Return the numbers with None (null in JSON) in the place of NaN and infinity."""
    return [number if math.isfinite(number) else None for number in numbers]


def null_to_nan(numbers: Sequence[float | None]) -> tuple[float, ...]:
    """Return the numbers that `finite_or_null` wrote, with NaN for every null."""
    return tuple(math.nan if number is None else float(number) for number in numbers)
