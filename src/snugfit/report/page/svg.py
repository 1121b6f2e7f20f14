"""Elements, scales and texts of a picture, as plain SVG.

A picture is `WIDTH` units wide, and the page scales it. Colours are classes. The page's style defines them
for light and for dark. Foreign words are escaped here, once.
"""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup, escape

from snugfit.report.text.terminal import harmless
from snugfit.units import GIB, MIB

WIDTH = 800
"""Width of a picture in units."""

LETTER = 8.4
"""Width of a letter in the pictures' 13-unit font, in units, a little above its mean."""


def tag(name: str, *content: str, **attributes: Any) -> Markup:
    """Return one element. Contents that are no `Markup` are escaped; `_` in an attribute becomes `-`."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_figure(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(part if isinstance(part, Markup) else escape(harmless(part)) for part in content)
    return Markup(f"<{name}{shown}>{inner}</{name}>")


def _figure(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else harmless(str(value))


def text(words: str, x: float, y: float, *, anchor: str | None = None, class_: str | None = None) -> Markup:
    """Return words at a position; `anchor` is SVG's `text-anchor`."""
    return tag("text", words, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def point(about: str, *shapes: str, start: bool = False) -> Markup:
    """Return shapes that a pointer or the keyboard can reach, with their description. One of a picture is its
    `start`: the Tab key goes there, and the arrow keys move to the rest."""
    title = tag("title", about)
    return tag("g", title, *shapes, class_="point", role="img", tabindex="0" if start else "-1")


def picture(about: str, height: float, *content: str) -> Markup:
    """Return the whole picture, with its description for a screen reader."""
    return tag(
        "svg",
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="group",
        aria_label=about,
    )


def shorten(words: str, room: float) -> str:
    """Return as much of `words` as fits `room` units; empty where fewer than five letters fit."""
    letters = int(room / LETTER)
    if len(words) <= letters:
        return words
    return f"{words[: letters - 2]}…" if letters >= 5 else ""


def unit_of(top: float) -> tuple[int, str]:
    """Return the unit for bytes up to `top`: its size and its name."""
    return (GIB, "GiB") if top >= GIB else (MIB, "MiB")


def ticks(top: float, *, count: int = 5) -> list[float]:
    """Return round numbers from 0 to at most `top`, about `count` of them."""
    if top <= 0:
        return [0.0]
    rough = top / count
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [step * number for number in range(int(top / step + 1e-9) + 1)]


def byte_axis(top: float, left: float, right: float, base: float, high: float) -> list[Markup]:
    """Return lines across and figures at the left for bytes from 0, at the height `base`, to `top`, at
    `high`."""
    unit, name = unit_of(top)
    parts = [text(name, left - 8, high - 10, anchor="end")]
    for tick in ticks(top / unit):
        y = base - (base - high) * tick * unit / top
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="rule"))
        parts.append(text(f"{tick:g}", left - 8, y + 4, anchor="end"))
    return parts
