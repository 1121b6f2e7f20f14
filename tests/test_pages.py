"""Pages of pictures: parsed, and laid out by a real Chromium if it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from made_up import EVIL, measurement, prediction, timed, timing
from snugfit.cli.arguments import check_pictures, write_pictures
from snugfit.comparison.compare import Comparison, compare
from snugfit.comparison.recipes import RecipeComparison
from snugfit.errors import UsageError
from snugfit.job.gpu import find_gpu
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.plan import Plan
from snugfit.report import prediction as prediction_report
from snugfit.report.page.memory import colour_of, memory_over_step
from snugfit.report.page.modules import _Box, tile
from snugfit.report.page.picture import document
from snugfit.report.page.svg import tag, ticks
from snugfit.report.pictures import draw_prediction, notebook_cell, parts_of, write_page
from snugfit.report.text.terminal import as_text
from snugfit.results.footprint import Kind
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB, MIB
from test_verify import choice, planned

pytestmark = pytest.mark.stored_rehearsals

SVG = "{http://www.w3.org/2000/svg}"
ALONE = {"meta", "br", "link", "img", "hr", "input"}


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


def drawings(page: str) -> Iterator[ElementTree.Element]:
    for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        yield ElementTree.fromstring(text)


def check_page(page: str, *, pictures: int) -> None:
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert not parser.links, "a page needs no other file"
    assert "url(" not in page
    assert "@import" not in page
    assert set(re.findall(r"https?://[^\s\"<]+", page)) <= {"http://www.w3.org/2000/svg"}
    drawn = list(drawings(page))
    assert len(drawn) == pictures == page.count("<table>"), "a table beside each picture"
    assert page.count("<caption>") == pictures
    for row in re.findall(r"<tr>.*?</tr>", page, flags=re.DOTALL):
        heads = re.findall(r"<th (.*?)>(.*?)</th>", row)
        assert heads, "each row and column has its head"
        assert all("scope=" in attributes and words for attributes, words in heads)
    for svg in drawn:
        assert svg.get("aria-label")
        points = [group for group in svg.iter(f"{SVG}g") if group.get("class") == "point"]
        assert all(group.findtext(f"{SVG}title") for group in points)
        assert [group.get("tabindex") for group in points].count("0") == 1, "one stop of the Tab key"


def test_a_prediction_s_page_is_whole_and_says_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    write_page(path, timed(prediction()))
    page = path.read_text()
    check_page(page, pictures=3)
    assert "fits, 8.2 GiB free" in page
    assert "backward, 29 % of the step: 2.73 GiB (context 600.0 MiB, weights 200.0 MiB" in page
    assert "bert.encoder.layer.*.attention.self: activations 1.86 GiB, 90.5 %" in page
    assert "device, backward: from 100.0 ms to 320.0 ms, at work 220.0 ms of it" in page


def test_recipes_side_by_side_make_one_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, RecipeComparison((prediction(), prediction(6 * GIB, recipe=Recipe.parse("bf16")))))
    page = path.read_text()
    check_page(page, pictures=3)
    assert "bf16: needed 6.59 GiB" in page
    assert "the smallest of 2 recipes that fit, 9.2 GiB free" in page
    assert page.count("Uncertain: the context of this GPU was not measured</p>") == 1
    fast = timed(prediction(recipe=Recipe.parse("bf16")))
    write_page(path, RecipeComparison((timed(prediction()), fast)))
    check_page(path.read_text(), pictures=4)
    assert "bf16: seconds 300.0 ms (282.0 ms to 320.5 ms)" in path.read_text()


def everything() -> dict[str, object]:
    """Return one result of each kind that a page shows."""
    front = [
        replace(
            choice(f"bf16 + micro_batches({2**n})", 0.05 * 1.2**n),
            reserved_bytes=20 * GIB >> n,
            context_bytes=0,
        )
        for n in range(5)
    ]
    plan = replace(planned(1, 16 * GIB), front=tuple(front), best=front[1])
    answers = tuple(
        OnGpu(gpu=find_gpu(name), fits=fits, choice=front[0], measured_rates=fits)
        for name, fits in (("h200", True), ("v100-16gb", False))
    )
    seconds = (0.1, 0.11, 0.1)
    return {
        "prediction": timed(prediction(memory_bytes=5 * GIB)),
        "plan": plan,
        "measurement": measurement(timing=timing(seconds=seconds)),
        "comparison": compare(timed(prediction(7 * GIB)), measurement(8 * GIB)),
        "gpus": GpuPlans(job=plan.job, fidelity="rounds", objective="speed", answers=answers),
    }


def cut(batches: int) -> Prediction:
    """Return a prediction with this number of micro-batches, each with five points of its curve."""
    one = prediction(recipe=Recipe.parse(f"micro_batches({batches})"))
    phases = [*["forward", "forward", "backward", "backward", "backward"] * batches, "update"]
    curve = tuple(
        replace(one.anatomy.curve[0], position=place / len(phases), phase=phase)
        for place, phase in enumerate(phases)
    )
    return replace(one, anatomy=replace(one.anatomy, curve=curve))


def crowded() -> list[object]:
    """Return results with little room for labels.

    They are many micro-batches, made up and rehearsed. A front of 40 recipes has long names and close
    figures, and some names exceed a line.
    """
    from small_models import small_job
    from snugfit.prediction.predict import predict

    recipe = "lora(r=16, targets=all-linear) + bf16_pure + tf32 + every_nth_layer(n={}) + micro_batches(16)"
    front = tuple(
        replace(choice(recipe.format(2 + n), 0.05 * 1.03**n), reserved_bytes=int(20 * GIB / 1.05**n))
        for n in range(40)
    )
    rehearsed = predict(small_job("bert", layers=2), "micro_batches(4)", gpu="rtx 4090")
    long = "the-name-of-a-folder/" * 12
    return [
        *(cut(batches) for batches in (1, 2, 4, 16, 64)),
        rehearsed,
        replace(planned(1, 16 * GIB), front=front, best=front[7]),
        RecipeComparison(
            (prediction(name=long), prediction(recipe=Recipe.parse(recipe.format(2)), name=long))
        ),
        measurement(timing=timing(seconds=(0.1, 0.2) * 60)),
    ]


@pytest.mark.parametrize(("kind", "pictures", "words"), [
    ("plan", 1, "1: bf16 + micro_batches(2): 10.00 GiB, 66.67 samples/s, the best that fits"),
    ("plan", 1, "5: bf16 + micro_batches(1): 20.00 GiB, 80.00 samples/s, does not fit"),
    ("measurement", 2, "step 2: seconds 110.0 ms"),
    ("comparison", 5, "reserved · -12.5 %: predicted 7.00 GiB, measured 8.00 GiB"),
    ("gpus", 2, "does not fit: needed 20.00 GiB"),
])  # fmt: skip
def test_every_result_has_a_page(kind: str, pictures: int, words: str, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", everything()[kind])
    page = (tmp_path / "page.html").read_text()
    check_page(page, pictures=pictures)
    assert words in page


def test_a_notebook_s_cell_has_real_tables_and_no_script() -> None:
    for kind, result in everything().items():
        cell = notebook_cell(result)
        parser = Balanced()
        parser.feed(cell)
        assert not parser.open, kind
        assert not parser.links
        assert "<script" not in cell
        assert "<svg" in cell
        assert cell.count("<details open>") == 1, "the first table is open"
        assert '[data-jp-theme-light="false"] .snugfit, .vscode-dark .snugfit {' in cell
        list(drawings(cell))


def test_results_are_frames_where_pandas_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    pair = RecipeComparison((prediction(), prediction(6 * GIB, recipe=Recipe.parse("bf16"))))
    assert [row["difference_bytes"] for row in pair.to_rows()] == [0, -GIB]
    assert prediction().to_rows()[0]["bytes"] == GIB
    assert measurement().to_rows()[0]["samples_per_second"] == 40.0
    of_plan, of_both = everything()["plan"], everything()["comparison"]
    assert isinstance(of_plan, Plan)
    assert isinstance(of_both, Comparison)
    assert [row["best"] for row in of_plan.to_rows()] == [True, False, False, False, False]
    assert of_both.to_rows()[2]["error"] == -0.125
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        pair.to_frame()
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas", reason="Requires: [pandas]")
    assert isinstance(pair.to_frame(), pandas.DataFrame)
    assert list(pair.to_frame()["recipe"]) == ["plain", "bf16"]


def test_a_job_is_compared_under_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = prediction()

    def foresee(job: object, recipe: str, **question: object) -> object:
        assert question == {"gpu": "h200"}
        return replace(one, recipe=Recipe.parse(recipe))

    monkeypatch.setattr("snugfit.prediction.predict.predict", foresee)
    compared = compare(one.job, ["plain", "bf16"], gpu="h200")
    assert [str(member.recipe) for member in compared.predictions] == ["plain", "bf16"]
    for recipes in ([], "bf16"):
        with pytest.raises(UsageError, match="list of recipes"):
            compare(one.job, recipes)


def test_foreign_words_on_a_page_stay_words(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", timed(prediction(name=EVIL)))
    page = (tmp_path / "page.html").read_text()
    check_page(page, pictures=3)
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert str(tag("g", EVIL, a='"<')).startswith('<g a="&#34;&lt;">[a/path]|=cmd()&lt;script&gt;')


def test_the_layers_of_the_step_are_as_high_as_their_bytes() -> None:
    curve = prediction().anatomy.curve
    (svg,) = drawings(memory_over_step(curve, context_bytes=100 * MIB, memory_bytes=4 * GIB).svg)
    context, weights, activations = svg.iter(f"{SVG}polygon")
    bound = next(line for line in svg.iter(f"{SVG}line") if line.get("class") == "bound")
    scale = (320.0 - float(bound.get("y1") or 0)) / (4 * GIB)

    def thickness(polygon: ElementTree.Element, x: float) -> float:
        places = [tuple(map(float, pair.split(","))) for pair in (polygon.get("points") or "").split()]
        turn = max(range(len(places)), key=lambda index: places[index][0]) + 1
        upper, lower = (
            np.interp(x, *zip(*line, strict=True)) for line in (places[:turn], places[: turn - 1 : -1])
        )
        return float(lower - upper) / scale / MIB

    edges = [58.0 + (792.0 - 58.0) * point.position for point in curve]
    for column in (0, 10, 34):
        assert thickness(context, edges[column]) == pytest.approx(100, abs=3)
        assert thickness(weights, edges[column]) == pytest.approx(200, abs=3)
        assert thickness(activations, edges[column]) == pytest.approx(
            curve[column].kinds["activations"] / MIB, abs=3
        )


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_bytes_has_a_layer_and_a_colour_of_its_own(kind: Kind) -> None:
    one = prediction().anatomy.curve[0]
    shown = memory_over_step([replace(one, position=at, kinds={str(kind): GIB}) for at in (0.0, 0.5)])
    (svg,) = drawings(shown.svg)
    (layer,) = svg.iter(f"{SVG}polygon")
    assert layer.get("class") == colour_of(kind)
    assert len({colour_of(one) for one in Kind}) == len(Kind)
    assert f".{colour_of(kind)} {{" in document("a step", [], [shown], report="")


def test_a_picture_of_a_step_is_no_larger_than_what_it_shows() -> None:
    """Level lines have two points, and kinds too thin to be visible have no shape. Moments too close for
    the mouse share one label, which shows the highest."""
    one = prediction().anatomy.curve[0]
    kinds = {"weights": 900 * MIB, "activations": 0, "inputs": 1}
    curve = [
        replace(one, position=index / 1000, kinds={**kinds, "activations": 100 * MIB * (index == 500)})
        for index in range(1000)
    ]
    (svg,) = drawings(memory_over_step(curve).svg)
    weights, activations = (polygon.get("points") or "" for polygon in svg.iter(f"{SVG}polygon"))
    assert (len(weights.split()), len(activations.split())) == (4, 5)
    strips = [group for group in svg.iter(f"{SVG}g") if group.get("class") == "point"]
    assert len(strips) < 130
    assert [group.findtext(f"{SVG}title", "").count("activations") for group in strips].count(1) == 1


@pytest.mark.parametrize(("batches", "words"), [
    (1, ["forward", "backward"]),
    (2, ["micro-batch 1", "micro-batch 2"]),
    (16, ["1", "16", "update"]),
    (64, ["64 micro-batches", "update"]),
])  # fmt: skip
def test_micro_batches_have_a_level_of_their_own(batches: int, words: list[str]) -> None:
    """Brackets number the micro-batches if the names of passes do not fit."""
    (svg,) = drawings(draw_prediction(cut(batches))[0].svg)
    shown = [text.text for text in svg.iter(f"{SVG}text")]
    assert set(words) <= set(shown)
    assert ("16" in shown) is (batches == 16)
    text = as_text(prediction_report.render(cut(batches)), width=100)
    assert ("└2   └3" in text) is (batches == 16)
    assert ("└64 micro-batches" in text) is (batches == 64)


def test_a_gpu_far_larger_than_the_step_is_said_and_not_drawn() -> None:
    picture = memory_over_step(prediction().anatomy.curve, memory_bytes=141 * GIB)
    assert "bound" not in picture.svg
    assert picture.note == "The memory that may be used, 141.00 GiB, is far above the top of this picture."


def test_a_map_gives_each_size_its_share_of_the_area() -> None:
    sizes = [500, 300, 100, 50, 49, 1]
    boxes = tile(sizes, _Box(0.0, 0.0, 800.0, 380.0))
    assert [box.width * box.height for box in boxes] == pytest.approx(
        [size / 1000 * 800 * 380 for size in sizes]
    )
    assert all(box.x >= 0 and box.x + box.width <= 800.001 and box.y + box.height <= 380.001 for box in boxes)
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart_x = one.x >= other.x + other.width - 1e-6 or other.x >= one.x + one.width - 1e-6
            assert apart_x or one.y >= other.y + other.height - 1e-6 or other.y >= one.y + one.height - 1e-6


def test_ticks_are_round_and_never_above_the_top() -> None:
    assert ticks(2.76) == [0, 1, 2]
    assert ticks(23.5, count=5) == [0, 5, 10, 15, 20]
    assert ticks(0) == [0]


def test_a_page_s_and_a_plot_s_file_are_refused_before_the_work(tmp_path: Path) -> None:
    """Other suffixes, and folders that cannot be created, are refused. A missing folder is created at the
    write."""
    with pytest.raises(UsageError, match=r"a page is a \.html file"):
        check_pictures(tmp_path / "page.pdf", None)
    with pytest.raises(UsageError, match=r"a plot is a \.png or a \.svg file"):
        check_pictures(None, tmp_path / "plot.pdf")
    (tmp_path / "file").touch()
    for html, plot in (("file/page.html", None), (None, "file/new/plot.svg")):
        with pytest.raises(UsageError, match="is a file"):
            check_pictures(html and tmp_path / html, plot and tmp_path / plot)
    check_pictures(None, None)
    check_pictures(tmp_path / "new" / "page.html", tmp_path / "other" / "plot.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_was_written_is_said_also_into_a_new_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, plot = tmp_path / "new" / "page.html", tmp_path / "other" / "plot.svg"
    write_pictures(html, plot, prediction())
    assert capsys.readouterr() == ("", f"Written: {html}\nWritten: {plot}\n")
    assert plot.read_bytes().startswith(b"<?xml")


def test_a_rehearsed_step_s_pictures_add_up() -> None:
    """Kinds add up to the live bytes, modules to the peak, and the timeline ends when the step does."""
    from small_models import small_job
    from snugfit.prediction.predict import predict

    one = predict(small_job("bert", layers=2), "micro_batches(2)", gpu="rtx 4090")
    assert all(sum(point.kinds.values()) == point.live_bytes for point in one.anatomy.curve)
    assert sum(line.bytes for line in one.anatomy.modules) == one.footprint.requested_bytes
    assert [span.phase for span in one.timeline if span.lane == "device"].count("forward") == 2
    assert one.timing is not None
    ends = [
        max(span.end_seconds for span in one.timeline if span.lane == lane) for lane in ("host", "device")
    ]
    begins = [
        min(span.start_seconds for span in one.timeline if span.lane == lane) for lane in ("host", "device")
    ]
    assert max(ends) - max(begins) <= one.timing.step_seconds * 1.0001 <= max(ends) * 1.01
    busy = sum(span.busy_seconds for span in one.timeline if span.lane == "device")
    assert busy == pytest.approx(one.timing.device_seconds)
    assert len(draw_prediction(one)) == 3


# ---- in a real browser ----------------------------------------------------------------------------------

PROBE = r"""<script>
addEventListener("load", () => {
  const lines = [], boxes = [];
  document.querySelectorAll("svg").forEach((svg, picture) => {
    const texts = [...svg.querySelectorAll("text")], frame = svg.getBoundingClientRect();
    const rects = texts.map(text => text.getBoundingClientRect());
    rects.forEach((a, i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1)
        lines.push(`picture ${picture}: ${texts[i].textContent} leaves it`);
      rects.slice(0, i).forEach((b, j) => {
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
          lines.push(`picture ${picture}: ${texts[i].textContent} meets ${texts[j].textContent}`);
      });
    });
    const start = svg.querySelector(".point[tabindex='0']");
    start.focus();
    start.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true }));
    if (document.activeElement !== svg.querySelector(".point")) lines.push(`picture ${picture}: no keyboard`);
    if (!svg.closest("figure").querySelector("output").textContent) lines.push(`picture ${picture}: silent`);
  });
  if (document.documentElement.scrollWidth > innerWidth) lines.push("the page is wider than the window");
  const paper = getComputedStyle(document.body).backgroundColor;
  const light = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const check = (node, ink, under) => {
    const [high, low] = [light(ink), light(under)].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) lines.push(`${node.textContent} is faint: ${ink} on ${under}`);
  };
  document.querySelectorAll("p, li, th, td, caption, summary, h1, figcaption, pre").forEach(node => {
    check(node, getComputedStyle(node).color, paper);
  });
  document.querySelectorAll("svg text").forEach(text => {
    text.scrollIntoView({ block: "center" });
    const box = text.getBoundingClientRect();
    const below = document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    const painted = node => /^(rect|polygon)$/.test(node.tagName) && !/strip|band/.test(node.classList);
    const shape = below.find(painted);
    check(text, getComputedStyle(text).fill, shape && !text.classList.contains("halo")
      ? getComputedStyle(shape).fill : paper);
  });
  document.body.innerHTML = `<pre id="seen">${paper}\n${lines.join("\n")}</pre>`;
});
</script></body>"""


def seen_in_chromium(page: Path, folder: Path, *, width: int, dark: bool) -> list[str]:
    """Return the page's colour and its layout faults in Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Requires: [chromium]")
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--no-first-run", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1400",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", f"file://{probed}",
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert match, done.stderr[-2000:]
    return match[1].strip().splitlines()


@pytest.mark.whole
@pytest.mark.parametrize(("width", "dark"), [(500, True), (1100, False)])
def test_no_labels_meet_in_chromium(tmp_path: Path, width: int, dark: bool) -> None:
    """The keyboard also reaches every picture, in light and dark mode."""
    shown = [*everything().values(), *crowded()]
    pictures = [picture for result in shown for picture in parts_of(result).pictures]
    (tmp_path / "page.html").write_text(document("All pictures", ["A line."], pictures, report="text"))
    colour, *wrong = seen_in_chromium(tmp_path / "page.html", tmp_path, width=width, dark=dark)
    assert colour == ("rgb(22, 25, 29)" if dark else "rgb(255, 255, 255)")
    assert not wrong
