"""Colours of memory categories and lines, the same on every page, plot and notebook cell."""

from __future__ import annotations

from collections.abc import Iterable

from snugfit.results.footprint import Kind

KINDS: dict[str, str] = {
    Kind.CONTEXT: "#9aa4b0",
    Kind.WEIGHTS: "#0072b2",
    Kind.GATHERED: "#bcbd22",
    Kind.OPTIMIZER_STATES: "#009e73",
    Kind.GRADIENTS: "#56b4e9",
    Kind.ACTIVATIONS: "#e69f00",
    Kind.TEMPORARIES: "#d55e00",
    Kind.CACHES: "#cc79a7",
    Kind.COMMUNICATION: "#a58bd3",
    Kind.WORKSPACES: "#8f6b4a",
    Kind.KEY_VALUES: "#6a3d9a",
    Kind.LOGITS: "#b15928",
    Kind.INPUTS: "#f0e442",
}
"""Colours of the kinds of memory, in the order in which they are stacked, the lowest first. Most are Okabe
and Ito's colours, which colour-blind readers can distinguish.
"""

PREDICTED, MEASURED = "predicted", "measured"

GPU_MEMORY = "the GPU's memory"

_FIGURES = {PREDICTED: "#5b5fc7", MEASURED: "#e0457b", GPU_MEMORY: "#5f7480"}

_FURTHER = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f6b4a", "#a58bd3")

LIMIT, RESERVED, BEST = "memory limit", "reserved by the allocator", "the best that fits"

LINES = {LIMIT: "limit", RESERVED: "reserved", BEST: "best"}
"""Names of lines and rings that have other colours in light than in dark mode, by their text in the legend.
"""

PHASES = {
    "build": "#f7f8fa",
    "load": "#f7f8fa",
    "forward": "#eef1f4",
    "backward": "#dde2e8",
    "clip": "#f7f8fa",
    "update": "#c3cad3",
}
"""Grey backgrounds of a step's phases on white paper. `style.css` has those for dark mode."""

PAPER = {"ink": "#1b1f24", "faint": "#5b6470", "rule": "#d9dde2", "bad": "#b3261e", "good": "#0b7a3b"}
"""Colours of text and lines on white paper, as in `style.css`."""


def colours_of(meanings: Iterable[str]) -> dict[str, str]:
    """Return a colour for each entry of a legend. Entries without a fixed colour get the next free one."""
    table: dict[str, str] = {}
    further = iter(_FURTHER)
    for meaning in dict.fromkeys(meanings):
        if meaning not in LINES:
            table[meaning] = KINDS.get(meaning) or _FIGURES.get(meaning) or next(further, "#9aa4b0")
    return table


def ink_on(colour: str) -> str:
    """Return black or white for a text on this colour, the one with the larger contrast (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # At this luminance both contrasts are equal: (L + 0.05)^2 = 1.05 * 0.05.
    return "#000000" if luminance > 0.179 else "#ffffff"
