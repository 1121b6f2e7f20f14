"""Count sentences that break the rules of plain English, and compare them with the committed table.

    python lab/prose.py                            # `make lint` runs this; exit code 1 where a count rose
    python lab/prose.py --list src/snugfit/step    # print the sentences of a folder or a file
    python lab/prose.py --update --reason "..."

The rules apply to docstrings, comments, message strings of Python files, and paragraphs of Markdown. A hit is
a place to look at, not a verdict. The table has the number of hits of each folder, which only falls.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from committed_counts import compare

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".json")
FOLDERS = ("src", "tests", "lab", "docs", "dev")
PACKAGE = Path("src/snugfit")

MOST_WORDS = 26
"""Words of a sentence above which it counts as long."""

LEAST_WORDS = 3
"""Words below which a text is no sentence."""

MESSAGE_WORDS = 6
"""Words from which on a string counts as a message."""

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
"""A block of code in Markdown, with its blank lines."""

RULES = {
    "riddle first": re.compile(r"^(What|Whether|Of|Where|Why|How|By|Which|Whose|In which|In them|So that)\b"),
    "code that acts like a person": re.compile(
        r"\b(asks?|asked|tells?|told|hears?|heard|stands?|stood|lies|lay|judged?|says?|is said|goes on"
        r"|gives back|nobody|somebody|whoever)\b",
        re.IGNORECASE,
    ),
    "clause in the place of a noun": re.compile(
        r"\b(what|whatever|that which) "
        r"(it|they|is|was|are|were|has|have|no|nobody|somebody|the|a|an|snugfit)\b",
        re.IGNORECASE,
    ),
}


class Hit(NamedTuple):
    """A sentence that breaks a rule."""

    path: Path
    line: int
    rules: tuple[str, ...]
    sentence: str


def hits_in(path: Path) -> Iterator[Hit]:
    """Yield the sentences of a file that break a rule."""
    texts = python_texts(path) if path.suffix == ".py" else markdown_texts(path)
    for line, text in texts:
        for sentence in sentences(text):
            broken = [name for name, rule in RULES.items() if rule.search(sentence)]
            broken += ["long"] if len(sentence.split()) > MOST_WORDS else []
            if broken:
                yield Hit(path, line, tuple(broken), sentence)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, with CODE in the place of quoted code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", text)
    for part in re.split(r"\n\s*\n|\n\s*[-*|]\s", text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(part.split())):
            if len(sentence.split()) >= LEAST_WORDS:
                yield sentence


def python_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, message and comment."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(id(node.value))
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value
        elif isinstance(node, ast.JoinedStr):
            seen.update(id(value) for value in node.values)
            pieces = (value.value if isinstance(value, ast.Constant) else "CODE" for value in node.values)
            yield from _message(node.lineno, "".join(map(str, pieces)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield from _message(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _message(line: int, text: str) -> Iterator[tuple[int, str]]:
    if len(text.split()) >= MESSAGE_WORDS:
        yield line, text


def markdown_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph, without tables, code and HTML."""
    line = 1
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), path.read_text(encoding="utf-8"))
    for block in re.split(r"(\n\s*\n)", text):
        if block.strip() and not block.lstrip().startswith(("|", "    ", "<")):
            yield line, block
        line += block.count("\n")


def files_under(folder: Path) -> list[Path]:
    """Return the Python and Markdown files of a folder, or the file itself."""
    if folder.is_file():
        return [folder]
    return sorted(path for ending in ("*.py", "*.md") for path in folder.rglob(ending))


def row_of(path: Path) -> str:
    """Return the row of the table for a file: the room of the package, the folder, or the file itself."""
    path = path.relative_to(ROOT)
    if not path.is_relative_to(PACKAGE):
        return path.parts[0]
    inside = path.relative_to(PACKAGE).parts
    depth = 2 if inside[0] == "features" else 1
    return "/".join(inside[:depth]) if len(inside) > depth else "snugfit"


def count() -> dict[str, dict[str, int]]:
    """Return the number of hits by row."""
    files = [path for folder in FOLDERS for path in files_under(ROOT / folder)] + sorted(ROOT.glob("*.md"))
    found = Counter(row_of(hit.path) for path in files for hit in hits_in(path))
    return {row: {"hits": found[row]} for row in sorted({*map(row_of, files)})}


def main() -> int:
    """Compare the counts with the table, update it, or list the hits of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", type=Path, metavar="FOLDER", help="print the sentences of a folder or file")
    parser.add_argument("--update", action="store_true", help="write the counts into the table")
    parser.add_argument("--reason", default="", help="the reason for counts that rise")
    given = parser.parse_args()
    if given.list:
        for hit in (hit for path in files_under(given.list) for hit in hits_in(path)):
            print(f"{hit.path}:{hit.line}: {', '.join(hit.rules)}: {hit.sentence}")
        return 0
    counts = count()
    print(f"{sum(row['hits'] for row in counts.values())} sentences to look at (lab/prose.py --list FOLDER).")
    return compare(TABLE, counts, what="Sentences to look at", update=given.update, reason=given.reason)


if __name__ == "__main__":
    sys.exit(main())
