"""Read files that a user wrote, within limits of size and depth. Their text or YAML cannot name code."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import yaml

from snugfit.documents import parse_json
from snugfit.errors import UsageError, did_you_mean, one_line

LARGEST_FILE = 1 << 20


def read_text(path: Path, *, noun: str = "file", largest: int = LARGEST_FILE) -> str:
    """Return the text of a regular file of at most `largest` bytes. Raises `UsageError` for any other file;
    its message calls the file a `noun`.
    """
    with refuse_unreadable(path):
        refuse_no_file(path, noun, largest)
        try:
            return path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{path}: this is not UTF-8 text. Save it as UTF-8.") from None


def user_path(given: str | os.PathLike[str]) -> Path:
    """Return a user's path with the home folder in place of `~`. Raises `UsageError` if that is not known."""
    path = Path(os.path.expanduser(given))
    if path.parts[:1] and path.parts[0].startswith("~") and not path.exists():
        raise UsageError(
            f"{path}: the home folder {path.parts[0]} is not known. Write the whole path, or set HOME."
        )
    return path


@contextmanager
def refuse_unreadable(path: Path) -> Iterator[None]:
    """Raise `UsageError` in place of an error of the system that occurs while the context reads this path."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror or error}). Check its permissions."
        ) from None


def refuse_no_file(path: Path, noun: str, largest: int = LARGEST_FILE, hint: str = "") -> None:
    """Raise `UsageError` for a path that is no regular file of at most `largest` bytes; `noun` is the noun
    for the file in the message.

    `hint` is the remedy for a larger file.
    """
    if not path.exists():
        # A missing folder has no names to suggest.
        near = did_you_mean(path.name, map(attrgetter("name"), path.parent.glob("*")))
        raise UsageError(f"{path}: no such {noun}.{near} Give the path of an existing file.")
    if not path.is_file():
        raise UsageError(
            f"{path}: this is not a regular file, so it cannot be read as a {noun}. Give a regular file."
        )
    if (size := path.stat().st_size) > largest:
        raise UsageError(f"{path}: {size:,} bytes; a {noun} may have at most {largest:,}.{hint}")


def writable_folder(folder: Path) -> Path:
    """Return `folder` if files can be written into it; a check before long work, which leaves no file behind.

    It writes a test file, because permission bits do not suffice. A superuser may write everywhere, and /proc
    takes no file at all. Raises `UsageError` if that fails.
    """
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        which = "this" if nearest == folder else str(nearest)
        raise UsageError(f"{folder}: {which} is a file. Name a folder.")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(
            f"{nearest}: nothing can be written into this folder ({error.strerror}). Name another."
        ) from None
    return folder


class LimitedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits: no tags, anchors or aliases, no repeated key, and at most `deepest`
    levels.
    """

    deepest: ClassVar[int] = 16
    """Largest number of nesting levels that is read."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Build a YAML node. Raises `yaml.MarkedYAMLError` for tags, anchors, aliases and deep nesting."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if tag := getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(
                problem=f"the tag {tag!r} is not allowed, only plain words and numbers are",
                problem_mark=event.start_mark,
            )
        if self.depth >= self.deepest:
            problem = f"nested too deep. Allowed are {self.deepest} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping from a YAML node. Raises `yaml.MarkedYAMLError` for a repeated key."""
        keys: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str, location: str, loader: type[LimitedLoader] = LimitedLoader) -> Any:
    """Return the one YAML document in `text`. Raises `UsageError` whose message begins with `location` and
    names the line.
    """
    try:
        return loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{location}{line}: {_in_words(error)}.") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{location}: not valid YAML ({one_line(error)}). Correct the file.") from None
    except ValueError as error:  # a scalar in the form of a date or a number that is invalid
        raise UsageError(f"{location}: {error}.") from None


def load_json(text: str, location: str, *, constants: bool = False) -> Any:
    """Parse the JSON in `text`. Raises `UsageError` whose message begins with `location`.

    With `constants`, NaN and Infinity are numbers, in the notation of Python's `json`.
    """
    try:
        return parse_json(text, constants=constants)
    except RecursionError:
        raise UsageError(f"{location}: nested too deep. Give a file with fewer levels.") from None
    except json.JSONDecodeError as error:
        line = "" if ", line " in location else f", line {error.lineno}"
        raise UsageError(f"{location}{line}: not JSON: {error.msg}. Correct the file.") from None
    except ValueError as error:  # a key twice, a constant, or a number of thousands of digits
        raise UsageError(f"{location}: {error}.") from None


def _in_words(error: yaml.MarkedYAMLError) -> str:
    if "'\\t'" in str(error.problem):
        return "the line begins with a tab. YAML must be indented with spaces"
    return " ".join(f"{error.context or ''} {error.problem or ''}".split())
