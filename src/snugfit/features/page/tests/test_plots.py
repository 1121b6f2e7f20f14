"""Plots: the pages' pictures as files, without overlapping words or words outside the figure."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_pages import crowded, everything

from made_up import EVIL, prediction, timed
from snugfit.cli.main import run
from snugfit.report.text.figure import Drawing
from snugfit.techniques.registry import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytestmark = pytest.mark.stored_rehearsals


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures drawn during the test."""
    noted: list[Figure] = []
    init = Drawing.__init__

    def noting(self: Drawing, figure: Figure) -> None:
        noted.append(figure)
        init(self, figure)

    monkeypatch.setattr(Drawing, "__init__", noting)
    return noted


def words_that_meet(figure: Figure) -> list[str]:
    """Return pairs of texts whose boxes overlap by more than a pixel, and texts that exceed the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    beyond = {
        id(tick.label1)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and id(text) not in beyond]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    boxes = [(text, box) for text, box in boxes if box.width]
    wrong = [
        f"{one} meets {other}"
        for (one, a), (other, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
    width, height = canvas.get_width_height()
    outside = [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    return wrong + [f"{text} leaves the figure" for text in outside]


@pytest.mark.slow
@pytest.mark.whole
def test_no_words_meet_in_a_plot(figures: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    results = [*everything().values(), *crowded()]
    for result in results:
        picture(result, "svg")
    assert len(figures) == len(results)
    assert [words for figure in figures for words in words_that_meet(figure)] == []


@pytest.mark.parametrize("command", ["predict", "plan", "gpus", "measure"])
def test_what_has_a_page_has_a_plot(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "--html" in told
    assert "--open" in told
    assert "--plot" in told


def test_words_that_meet_are_found(figures: list[Any], tmp_path: Path) -> None:
    picture(prediction(), "svg")
    axes = figures[0].axes[0]
    for text in ("one", "other"):
        axes.text(0.3, 0.3, text)
    axes.text(-5, 0.3, "far")
    assert words_that_meet(figures[0])[-2:] == ["one meets other", "far leaves the figure"]


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_plot_is_drawn_the_same_twice_and_reads_any_name(form: str, tmp_path: Path) -> None:
    """The file is deterministic. A control character in the name, which has no glyph, raises no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (picture(timed(prediction(name=EVIL)), form) for _ in range(2))
    assert first == second
    assert first[:4] == (b"\x89PNG" if form == "png" else b"<?xm")
    assert b"<script>" not in first


def test_another_ending_of_a_plot_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "bert-large-uncased", "--gpu", "h200", "--plot", "front.pdf"]) == 2
    assert ".svg" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
