"""Style, colours and file format of all plots.

Each plot has its own `Figure`, without pyplot. So no global state changes and no window system is needed. The
same result gives the same bytes: a file has no date and no random identifiers. Texts are drawn literally; a
`$` in a name is no formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, LIGHT_BLUE, ORANGE = "#0072B2", "#56B4E9", "#E69F00"
"""Colours of the Okabe-Ito palette, which colour-blind readers can distinguish."""

FONT = "DejaVu Sans"
"""Font of plots, which matplotlib includes."""

_STYLE = {
    # Text with two `$` must not be parsed as a formula.
    "text.parse_math": False,
    # With a fixed salt, equal plots get equal element ids.
    "svg.hashsalt": "snugfit",
    "svg.fonttype": "path",
    "font.size": 9,
    "font.family": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Drawing:
    """An empty figure to draw on, and then the bytes of its `png` or `svg` file."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.content = b""


@contextmanager
def drawing(form: str, *, width: float, height: float, text_as_text: bool = False) -> Iterator[Drawing]:
    """Yield a figure of `width` times `height` inches to draw on. After the block `content` has the bytes of
    the file.

    An SVG has its texts as outlines, so that it looks the same everywhere, or for `text_as_text` as text.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.fonttype": "none" if text_as_text else "path"}):
        drawn = Drawing(Figure(figsize=(width, height), layout="constrained"))
        yield drawn
        out = BytesIO()
        # Without date and version, equal plots are equal files.
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        drawn.figure.savefig(out, format=form, dpi=130, metadata=metadata)
        drawn.content = out.getvalue()
