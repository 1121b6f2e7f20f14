"""Pages, read as HTML and JSON, and laid out by a real Chromium if it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from base64 import b64decode
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from checked_pages import LARGEST_CELL, Balanced, check_page, data_of, words_of
from made_up import EVIL, measurement, prediction, timed, timing
from made_up_plans import choice, planned
from snugfit.cli.main import run
from snugfit.comparison.compare import Comparison, compare
from snugfit.comparison.recipes import RecipeComparison
from snugfit.errors import UsageError
from snugfit.features.page.chart import Chart, MemoryCurve
from snugfit.features.page.colours import KINDS, PHASES, colours_of, ink_on
from snugfit.features.page.headlines import of_plan, of_prediction
from snugfit.features.page.options import write_pictures
from snugfit.features.page.pictures import draw_front, draw_page, draw_prediction, memory_over_step, parts_of
from snugfit.frontends.one_of_several import COMMAND_LINE
from snugfit.job.gpu import find_gpu
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.plan import Plan
from snugfit.report import prediction as prediction_report
from snugfit.report.text.terminal import as_text
from snugfit.results.footprint import Kind
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import picture
from snugfit.units import GIB, show_bytes, show_seconds
from tiers import slow_but

pytestmark = pytest.mark.stored_rehearsals


def page_of(result: object) -> str:
    parts = parts_of(result)
    assert parts
    return draw_page(parts, {}).decode()


def notebook_cell(result: object) -> str:
    return picture(result, "html").decode()


def test_a_prediction_s_page_has_the_verdict_and_four_numbers(tmp_path: Path) -> None:
    one = timed(prediction())
    page = page_of(one)
    check_page(page, charts=3, drawn=2)
    words, speed = words_of(page), one.speed
    assert "<h1>bert-large-uncased fits on the Tesla V100-SXM2-16GB, " in page
    assert speed is not None
    document = one.to_json()
    for number in (
        f"GPU memory {show_bytes(one.needed_bytes)} of {show_bytes(document['memory_bytes'])}, predicted",
        f"Spare {show_bytes(document['spare_bytes'])}",
        f"Time per step {show_seconds(document['timing']['step_seconds'])} estimate",
        f"Speed {document['timing']['samples_per_second']:,.1f} samples/s estimate",
    ):
        assert number in words
    assert "The whole report as text" in words


def test_the_data_of_a_page_are_those_of_the_json(tmp_path: Path) -> None:
    one = timed(prediction(memory_bytes=4 * GIB))
    curve, modules = data_of(page_of(one))["charts"]
    document = one.to_json()
    context = document["footprint"]["context_bytes"]
    layers = {layer["kind"]: layer["bytes"] for layer in curve["layers"]}
    for index, point in enumerate(document["anatomy"]["curve"]):
        assert {kind: sizes[index] for kind, sizes in layers.items()} == {
            "context": context,
            **point["kinds"],
        }
        assert curve["reserved"][index] == context + point["reserved_bytes"]
    assert curve["limit"] == document["memory_bytes"]
    totals = [context + point["live_bytes"] for point in document["anatomy"]["curve"]]
    assert totals[curve["peak"]] == max(totals)
    assert curve["peak_label"] == f"Peak: {show_bytes(max(totals))}, backward, bert.encoder.layer.23"
    assert modules["lines"] == document["anatomy"]["modules"]


@pytest.mark.parametrize(("memory", "words", "tone"), [
    (16 * GIB, "fits on the Tesla V100-SXM2-16GB, 8.4 GiB free", "good"),
    (8 * GIB, "fits on the Tesla V100-SXM2-16GB, but tight: 0.4 GiB free", "tight"),
    (4 * GIB, "does not fit on the Tesla V100-SXM2-16GB: needs 7.6 GiB, the limit is 4.0 GiB", "bad"),
    (None, "needs 7.6 GiB; add --gpu NAME to see whether it fits", ""),
])  # fmt: skip
def test_the_title_is_a_sentence_with_the_verdict(memory: int | None, words: str, tone: str) -> None:
    parts = parts_of(prediction(memory_bytes=memory, headroom_bytes=GIB))
    assert parts.title.startswith(f"bert-large-uncased {words}")
    assert (parts.tone, parts.figures[0].tone) == (tone, tone)


def test_the_title_has_the_number_of_gpus() -> None:
    unnamed = prediction(20 * GIB, gpu=None, memory_bytes=8 * GIB, gpus=2)
    assert of_prediction(unnamed).title == (
        "bert-large-uncased does not fit on each of 2 GPUs: needs 20.6 GiB, the limit is 8.0 GiB"
    )


def test_the_title_of_a_plan_without_a_fitting_recipe_has_the_nearest() -> None:
    assert of_plan(planned(0, memory=4 * GIB)).title == (
        "No recipe fits bert-large-uncased on the H200. The nearest needs 7.6 GiB, the limit is 4.0 GiB"
    )


def test_a_page_shows_its_command_its_date_and_the_versions(tmp_path: Path) -> None:
    mark = COMMAND_LINE.set(("predict", "a model", "--html", "page.html"))
    try:
        write_pictures({"html": tmp_path / "page.html"}, prediction())
    finally:
        COMMAND_LINE.reset(mark)
    words = words_of((tmp_path / "page.html").read_text())
    assert "Made by snugfit predict 'a model' --html page.html" in words
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d \S+ · snugfit \S+ · torch 2.13.0 · transformers", words)


def test_the_page_opens_in_the_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name it is a temporary file. A text browser would take the terminal, so none is started."""

    class Browser:
        name = "firefox"

        def open(self, url: str) -> bool:
            opened.append(url)
            return True

    opened: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.get", Browser)
    write_pictures({"open": True}, prediction())
    (page,) = tmp_path.glob("snugfit-*/page.html")
    assert opened == [page.as_uri()]
    monkeypatch.setattr(Browser, "name", "/usr/bin/w3m")
    write_pictures({"html": tmp_path / "named.html", "open": True}, prediction())
    assert len(opened) == 1
    assert f"Open this file in one: {tmp_path / 'named.html'}" in capsys.readouterr().err


def test_recipes_side_by_side_make_one_page(tmp_path: Path) -> None:
    two = RecipeComparison((prediction(), prediction(6 * GIB, recipe=Recipe.parse("bf16"))))
    page = page_of(two)
    check_page(page, charts=3, drawn=2)
    words = words_of(page)
    assert "bf16 predicted 6.59 GiB" in words
    assert "the smallest of 2 recipes that fit, 9.2 GiB free" in words
    assert words.count("Uncertain: the context of this GPU was not measured") == 2, "once, and in the report"
    fast = timed(prediction(recipe=Recipe.parse("bf16")))
    page = page_of(RecipeComparison((timed(prediction()), fast)))
    check_page(page, charts=4, drawn=2)
    assert "bf16 predicted 300.0 ms (279.0 ms to 327.0 ms)" in words_of(page)


def test_the_fastest_recipe_of_a_comparison_fits() -> None:
    fast, slow = timed(prediction(memory_bytes=4 * GIB)), prediction(recipe=Recipe.parse("bf16"))
    assert (fast.fits, slow.fits) == (False, True)
    figures = parts_of(RecipeComparison((fast, timed(slow)))).figures
    assert [one.remark for one in figures if one.name == "Fastest step"] == ["estimate, bf16"]


def everything() -> dict[str, object]:
    """Return one result of each type that has a page."""
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
    """Return results with little room for labels in their charts.

    They have many micro-batches, invented and simulated. A Pareto front of 40 recipes has long names and
    close numbers, and some names exceed a line.
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


@pytest.mark.parametrize(("kind", "charts", "drawn", "words"), [
    ("plan", 1, 1, "2 bf16 + micro_batches(4) 5,120 55.56 72.0 ms"),
    ("plan", 1, 1, "does not fit"),
    ("measurement", 2, 0, "step 2 measured 110.0 ms"),
    ("comparison", 5, 2, "reserved -12.5 % predicted 7.00 GiB measured 8.00 GiB"),
    ("gpus", 2, 0, "does not fit predicted 20.00 GiB"),
])  # fmt: skip
def test_every_result_has_a_page(kind: str, charts: int, drawn: int, words: str, tmp_path: Path) -> None:
    page = page_of(everything()[kind])
    check_page(page, charts=charts, drawn=drawn)
    assert words in words_of(page)


def test_a_plan_s_front_marks_the_best_and_the_misses(tmp_path: Path) -> None:
    plan = everything()["plan"]
    assert isinstance(plan, Plan)
    (front,) = data_of(page_of(plan))["charts"]
    rows = plan.to_rows()
    assert [point["bytes"] for point in front["points"]] == [row["needed_bytes"] for row in rows]
    assert [point["fits"] for point in front["points"]] == [row["fits"] for row in rows]
    assert [point["best"] for point in front["points"]] == [row["best"] for row in rows]
    assert front["limit"] == plan.memory_bytes
    assert [row[1] for row in draw_front(plan).rows] == [row["recipe"] for row in rows], (
        "the order of the JSON"
    )


def test_a_notebook_s_cell_is_small_and_has_real_tables_and_no_script() -> None:
    for kind, result in everything().items():
        cell = notebook_cell(result)
        parser = Balanced()
        parser.feed(cell)
        assert not parser.open, kind
        assert [link[:26] for link in parser.links] == ["data:image/svg+xml;base64,"]
        assert len(cell.encode()) < LARGEST_CELL
        assert cell.startswith('<div class="snugfit')
        assert "<script" not in cell
        assert 'alt="' in cell
        assert cell.count("<details open>") == (kind in ("prediction", "plan")), "the first table is open"
        assert '[data-jp-theme-light="false"] .snugfit, .vscode-dark .snugfit {' in cell
        assert b"<text" in b64decode(parser.links[0][26:])


def test_a_cell_without_matplotlib_has_tables_and_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.features.page.document.find_spec", lambda name: None)
    cell = notebook_cell(everything()["prediction"])
    assert "<table" in cell
    assert "<img" not in cell


def test_a_rehearsed_step_s_cell_is_small() -> None:
    one = prediction().anatomy.curve[0]
    kinds = {str(kind): GIB for kind in Kind}
    curve = tuple(
        replace(one, position=index / 1000, kinds={kind: size + 999 * index for kind, size in kinds.items()})
        for index in range(1000)
    )
    large = timed(prediction())
    large = replace(large, anatomy=replace(large.anatomy, curve=curve))
    for result in (large, RecipeComparison((large, large))):
        assert len(notebook_cell(result).encode()) < LARGEST_CELL


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
    with pytest.raises(UsageError, match=r"to_frame.*snugfit\[data\]"):
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


@pytest.mark.parametrize("name", [EVIL, "</script><script>alert(1)</script>", "<!--<script>"])
def test_foreign_words_on_a_page_stay_words(name: str, tmp_path: Path) -> None:
    one = timed(prediction(name=name))
    lines = tuple(replace(line, module=name) for line in one.anatomy.modules)
    page = page_of(replace(one, anatomy=replace(one.anatomy, modules=lines)))
    check_page(page, charts=3, drawn=2)
    assert page.count("<script") == 3, "data, library and drawing"
    assert "\x1b" not in page
    assert data_of(page)["charts"][1]["lines"][0]["module"] == name.replace(
        "\x1b", "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_bytes_has_a_layer_and_a_colour_of_its_own(kind: Kind) -> None:
    one = prediction().anatomy.curve[0]
    shown = memory_over_step([replace(one, position=at, kinds={str(kind): GIB}) for at in (0.0, 0.5)])
    assert [layer.kind for layer in curve_of(shown).layers] == [kind]
    assert [other for other in Kind if KINDS[other] == KINDS[kind]] == [kind]
    assert KINDS[kind] not in PHASES.values()


def test_a_meaning_has_one_colour_in_the_legend_the_charts_and_the_bars(tmp_path: Path) -> None:
    result = everything()["comparison"]
    page = page_of(result)
    legend = dict(re.findall(r'<li><span class="swatch" style="background: (#\w+)"></span>(.*?)</li>', page))
    assert {meaning: colour for colour, meaning in legend.items()} == data_of(page)["colours"]
    assert page.count('<ul class="legend"') == 1
    bars = re.findall(r'class="bar" style="[^"]*background: (#\w+)"', page)
    assert {legend[colour] for colour in bars} == {"predicted", "measured"}
    assert set(colours_of(parts_of(result).meanings).items()) == {(b, a) for a, b in legend.items()}
    assert [ink_on(KINDS[kind]) for kind in ("weights", "inputs")] == ["#ffffff", "#000000"]


def test_the_chart_library_is_small_and_comes_with_its_licence() -> None:
    folder = files("snugfit.features.page").joinpath("echarts")
    library = folder.joinpath("echarts.min.js").read_text()
    assert len(library.encode()) < 700_000
    assert re.match(r"/\* Apache ECharts \d+\.\d+\.\d+,.*Apache License 2\.0", library)
    licence = folder.joinpath("LICENSE").read_text()
    assert all(words in licence for words in ("Apache License", "BSD 3-Clause", "Baidu", "Mike Bostock"))


def curve_of(chart: Chart) -> MemoryCurve:
    assert isinstance(chart.drawing, MemoryCurve)
    return chart.drawing


@pytest.mark.parametrize(("batches", "words"), [
    (1, []),
    (2, ["1", "2"]),
    (16, [str(number) for number in range(1, 17)]),
    (64, ["64 micro-batches"]),
])  # fmt: skip
def test_micro_batches_have_a_level_of_their_own(batches: int, words: list[str]) -> None:
    curve = curve_of(draw_prediction(cut(batches))[0])
    assert [one.name for one in curve.micro_batches] == words
    assert [one.name for one in curve.phases][-1] == "update"
    text = as_text(prediction_report.render(cut(batches)), width=100)
    assert ("└2   └3" in text) is (batches == 16)
    assert ("└64 micro-batches" in text) is (batches == 64)


def test_a_gpu_far_larger_than_the_step_is_said_and_not_drawn() -> None:
    chart = memory_over_step(prediction().anatomy.curve, memory_bytes=141 * GIB)
    assert curve_of(chart).limit is None
    assert chart.note == "The memory limit, 141.00 GiB, is far above the top of this picture."


def test_a_page_s_and_a_plot_s_file_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other suffixes, and folders that cannot be created, are refused. A missing folder is created at the
    write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for words, error in (
        (["--html", "page.pdf"], "a page is a .html file"),
        (["--plot", "plot.pdf"], "a plot is a .png or a .svg file"),
        (["--html", "file/page.html"], "is a file"),
        (["--plot", "file/new/plot.svg"], "is a file"),
        (["--html", "new/page.html", "--plot", "other/plot.png"], "no-model"),
    ):
        assert run(["predict", "no-model", *words]) == 2
        assert error in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", [["plan"], ["gpus", "h200", "--for"]])
def test_a_plan_for_several_gpus_has_no_page(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["bert-large-uncased", "--task", "sequence-classification", "--gpus", "2", "--html", "x.html"]
    assert run([*words, *model]) == 2
    assert f"`{words[0]}` with --gpus does not take --html" in capsys.readouterr().err


def test_what_was_written_is_said_also_into_a_new_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, plot = tmp_path / "new" / "page.html", tmp_path / "other" / "plot.svg"
    write_pictures({"html": html, "plot": plot}, prediction())
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
const lines = [];
addEventListener("error", event => lines.push(`error: ${event.message}`));
addEventListener("load", () => {
  document.querySelectorAll(".chart").forEach((chart, number) => {
    if (!chart.querySelector("svg text")) lines.push(`chart ${number}: not drawn`);
    chart.focus();
    for (const key of ["Home", "ArrowRight"])
      document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    if (!chart.nextElementSibling.textContent) lines.push(`chart ${number}: no keyboard`);
  });
  if (document.documentElement.scrollWidth > innerWidth) lines.push("the page is wider than the window");
  const paper = getComputedStyle(document.body).backgroundColor;
  const light = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  document.querySelectorAll("p, li, th, td, dt, dd, caption, summary, h1, h2, pre, button").forEach(node => {
    let under = node;
    const clear = one => /, 0\)$/.test(getComputedStyle(one).backgroundColor);
    while (under.parentElement && clear(under)) under = under.parentElement;
    const [ink, ground] = [getComputedStyle(node).color, getComputedStyle(under).backgroundColor];
    const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) lines.push(`${node.textContent} is faint: ${ink} on ${ground}`);
  });
  document.body.innerHTML = `<pre id="seen">${paper}\n${lines.join("\n")}</pre>`;
});
</script><main>"""


def seen_in_chromium(page: Path, folder: Path, *, width: int, dark: bool) -> list[str]:
    """Return the page's colour and its layout faults in Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Requires: [chromium]")
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("<main>", PROBE, 1))
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
@pytest.mark.parametrize(("width", "dark"), slow_but([(500, True), (1100, False)], 1))
def test_a_page_is_drawn_and_legible_in_chromium(tmp_path: Path, width: int, dark: bool) -> None:
    """The keyboard also reaches every chart, in light and dark mode."""
    parts = [parts_of(result) for result in (*everything().values(), *crowded())]
    charts = [chart for one in parts for chart in one.charts]
    (tmp_path / "page.html").write_bytes(draw_page(parts[0]._replace(charts=charts), {}))
    colour, *wrong = seen_in_chromium(tmp_path / "page.html", tmp_path, width=width, dark=dark)
    assert colour == ("rgb(22, 25, 29)" if dark else "rgb(255, 255, 255)")
    assert not wrong


def test_a_page_folds_all_but_two_doubts() -> None:
    doubts = tuple(f"assumption {number}" for number in range(4))
    page = page_of(replace(prediction(), doubts=doubts))
    assert all(doubt in page for doubt in doubts)
    shown, folded = page.split('<details class="doubt"><summary>2 more</summary>')
    assert shown.count("Uncertain: ") == 2
    assert folded.partition("</details>")[0].count("Uncertain: ") == 2
