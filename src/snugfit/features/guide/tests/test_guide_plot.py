"""The guide's figures as bars, on a page and in a file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_guide import guide_result
from test_guide_modern import plan_of

from checked_pages import check_page, words_of
from made_up import EVIL
from snugfit.features.guide.modern import with_modern
from snugfit.techniques.registry import picture

plot = pytest.importorskip("snugfit.features.guide.plot", reason="the feature page is not there")


def test_the_plot_reads_any_name() -> None:
    """The name `$\\bad{$` is not read as a formula."""

    result = guide_result(measured=True)
    result = replace(result, gpu=EVIL.replace("\x1b", ""))
    assert b"<script>" not in picture(result, "svg")


def test_the_plot_draws_each_known_figure() -> None:
    series = {one.label.split(",")[0] for one in plot.memory_series(guide_result(measured=True))}
    assert series == {"predicted", "measured", "published"}
    speeds = plot.speed_series(guide_result())
    assert [one.label.split(",")[0] for one in speeds] == ["predicted", "predicted", *["published"] * 4]
    assert [one.label for one in speeds if "not named" in one.label] == [
        f"published, unnamed_{letter}, GPU not named" for letter in "abc"
    ]
    assert speeds[0].values[0] == pytest.approx(10.0)
    assert speeds[0].ranges[0] == pytest.approx((6.5, 13.5))


def test_the_page_has_memory_and_speed() -> None:
    from snugfit.features.page.pictures import draw_page, parts_of

    page = draw_page(parts_of(guide_result(measured=True)), {}).decode()
    check_page(page, charts=2, drawn=0)
    assert "vanilla predicted, Tesla V100-SXM2-16GB 14.59 measured, NVIDIA H200" in words_of(page)


def test_today_s_recipes_have_bars_of_their_own() -> None:
    result = with_modern(guide_result(), plan_of)
    labels = [series.label for series in plot.memory_series(result)]
    assert "today's best recipe, Tesla V100-SXM2-16GB" in labels
    assert labels != [series.label for series in plot.memory_series(guide_result())]
    assert picture(result, "svg")
