"""A report, independent of the output format: a list of sentences and tables for a terminal or a file.

The contents and their order are defined once. `rich` prints a `Page` as it is, and `markdown` returns the
same for a file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from snugfit.report.text.facts import Facts
from snugfit.report.text.grid import Grid, escape
from snugfit.report.text.terminal import harmless, show, show_json, words


@dataclass(frozen=True)
class Sentence:
    """A sentence of a report with its role.

    The role of an answer is `good`, `tight` or `bad`. A `command` has a title and a shell's command. A
    `recipe` is never broken. The rest are `heading`, `bullet`, `uncertain`, `fault`, and empty for a plain
    sentence.
    """

    text: str
    role: str = ""


STYLES = {
    "heading": "bold", "good": "bold green", "tight": "bold yellow", "bad": "bold red",
    "uncertain": "yellow", "fault": "red",
}  # fmt: skip
"""rich's terminal styles by the role of a sentence."""

_MARKDOWN = {"heading": "## {}", "good": "**{}**", "tight": "**{}**", "bad": "**{}**", "bullet": "- {}"}


class Page:
    """A report as lines and tables in order; a plain string becomes a plain sentence."""

    def __init__(self, *parts: Iterable[Sentence | Grid | Facts | str]) -> None:
        self._parts = [Sentence(part) if isinstance(part, str) else part for part in chain(*parts)]

    def __rich__(self) -> RenderableType:
        return Group(*self._terminal())

    def _terminal(self) -> Iterator[RenderableType]:
        before: Sentence | Grid | Facts | None = None
        for part in self._parts:
            if isinstance(part, Grid):
                yield from [Text()] if part.title and isinstance(before, Sentence | Facts) else []
                yield part
            elif isinstance(part, Facts):
                yield part
            elif part.role == "recipe":
                yield Text(harmless(part.text), no_wrap=True, overflow="ignore")
            else:
                answered = isinstance(before, Sentence) and before.role in ("good", "bad")
                yield from [Text()] if answered and part.role == "bullet" else []
                text = words(part.text, STYLES.get(part.role, ""))
                yield ShellCommand(text.plain) if part.role == "command" else text
            before = part

    @property
    def first_line(self) -> str:
        """The text of the first part, for `--quiet`."""
        return next(harmless(part.text) for part in self._parts if isinstance(part, Sentence))

    def markdown(self) -> str:
        """Return the page in GitHub's Markdown: a paragraph each, bullets one below the other."""
        text = "\n\n".join(_as_markdown(part) for part in self._parts)
        return re.sub(r"^(- .*)\n\n(?=- )", r"\1\n", text, flags=re.MULTILINE) + "\n"


@dataclass(frozen=True)
class ShellCommand:
    """A shell command, printed so that it can be copied from a terminal of any width.

    Each line but the last ends in a backslash, or within single quotes, where a recipe ignores whitespace.
    """

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, is_quoted = "", False
        for word in re.findall(r"--\S+ [^-'\s]\S*|\S+", self.text):  # keeps an option and its value together
            if line.strip() and len(line) + len(word) + len("  \\") > options.max_width:
                yield Text(line if is_quoted else f"{line} \\", no_wrap=True, overflow="ignore")
                line = f"    {word}"
            else:
                line = f"{line} {word}" if line else word
            # An odd number of quotes in a word opens or closes a quotation.
            is_quoted ^= bool(word.count("'") % 2)
        yield Text(line, no_wrap=True, overflow="ignore")


def with_commands(lines: Iterable[str]) -> Iterator[Sentence]:
    """Yield each line as a `Sentence`. A line that ends in a snugfit command gets the style of commands."""
    for line in lines:
        yield Sentence(line, "command" if re.search(r": (snugfit|--recipe) ", line) else "")


def print_as(form: str, document: Mapping[str, Any], page: Page, *, quiet: bool = False) -> None:
    """Print a result on stdout: its document for `json`, its page for `markdown` and `terminal`.

    With `quiet`, only the first line of the page is printed.
    """
    if form == "json":
        show_json(document)
    elif quiet:
        print(page.first_line)
    elif form == "markdown":
        sys.stdout.write(page.markdown())
    else:
        show(page)


def _as_markdown(part: Sentence | Grid | Facts) -> str:
    if not isinstance(part, Sentence):
        return part.markdown().rstrip()
    if part.role == "recipe":
        return f"`{harmless(part.text)}`"
    return _MARKDOWN.get(part.role, "{}").format(escape(part.text))
