"""Pages read as HTML and JSON."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

ALONE = {"meta", "br", "link", "img", "hr", "input"}
LARGEST_PAGE, LARGEST_CELL = 1_000_000, 100_000
"""Bytes of a page and of a notebook's cell that tests allow."""


class Balanced(HTMLParser):
    """A parser that checks that every open element is closed, and that the page fetches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "data", "xlink:href")]
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(page: str) -> dict[str, Any]:
    """Return the charts' data in a page, as its script reads them."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert match
    return dict(json.loads(match[1]))


def words_of(page: str) -> str:
    """Return the page's texts without its scripts, its styles and its elements."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", bare)).split())


def check_page(page: str, *, charts: int, drawn: int) -> None:
    """Check a page with this number of charts, of which its script draws some."""
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert not parser.links, "a page needs no other file"
    assert set(re.findall(r"https?://[^\s\"'<`]+", page)) <= {
        f"http://www.w3.org/{name}"
        for name in ("1999/xlink", "2000/svg", "2000/xmlns/", "XML/1998/namespace")
    }
    assert len(page.encode()) < LARGEST_PAGE
    assert page.count("<h1>") == 1
    assert page.count("<h2>") == charts
    assert page.count('data-chart="') == drawn == (len(data_of(page)["charts"]) if drawn else 0)
    assert page.count("<caption>") >= drawn, "a table for each drawing of the script"
    assert page.count("<noscript>") == (2 if charts else 1)
    for row in re.findall(r"<tr>.*?</tr>", page, flags=re.DOTALL):
        heads = re.findall(r"<th (.*?)>(.*?)</th>", row)
        assert heads, "each row and column has its head"
        assert all("scope=" in attributes and words for attributes, words in heads)
    assert all(re.findall(r'<div class="chart [^>]*aria-label="([^"]*)"', page)), "a text for each drawing"
