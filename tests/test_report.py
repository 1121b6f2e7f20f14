"""Reports: their required statements, and foreign words as plain text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from made_up import EVIL, footprint, job, measurement, prediction, timed, timing
from snugfit.comparison.compare import compare as foreseen_beside_seen
from snugfit.comparison.compare import error_lines
from snugfit.comparison.recipes import RecipeComparison
from snugfit.errors import MeasurementError, UsageError
from snugfit.job.gpu import all_gpus, find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.plan import Counts
from snugfit.report import compare, gpus, techniques
from snugfit.report import measurement as measurement_report
from snugfit.report import prediction as long_report
from snugfit.report import prediction as prediction_report
from snugfit.report.plan import gpu_plans
from snugfit.report.text import files, grid
from snugfit.report.text.job import job_line
from snugfit.report.text.terminal import as_html, as_text
from snugfit.results.footprint import Startup
from snugfit.results.measurement import Measurement
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import techniques as roster
from snugfit.units import GIB


def test_a_prediction_tells_bytes_verdict_peak_and_reasons() -> None:
    text = as_text(prediction_report.render(prediction()))
    assert "bert-large-uncased" in text
    assert "7,768" in text, "NVML MiB: 7 GiB reserved and 600 MiB of context"
    assert "all weights, 4 × 512, Tesla V100-SXM2-16GB: fits, 8.2 GiB free" in text
    assert "The peak is in step 3: backward in bert.encoder.layer.23 (aten::mm)." in text
    assert "335 million parameters of 4 bytes" in text
    assert "Uncertain: the context" in text
    assert "└forward" in text
    assert "Kernels" not in text
    assert "Kernels" in as_text(prediction_report.render(prediction(), operators=True))


def test_a_prediction_that_does_not_fit_says_by_how_much() -> None:
    text = as_text(prediction_report.render(prediction(20 * GIB)), width=120)
    assert "does not fit: needs 20.6 GiB, the card has 15.8 GiB" in text


def test_without_memory_the_verdict_says_what_to_name() -> None:
    text = as_text(prediction_report.render(prediction(gpu=None, memory_bytes=None)))
    assert "--gpu" in text
    assert "fits," not in text


@pytest.mark.parametrize("render", [as_text, as_html])
def test_foreign_words_stay_words(render: object) -> None:
    """The model's name contains markup, HTML and control characters."""
    assert callable(render)
    shown = render(prediction_report.render(prediction(name=EVIL), operators=True))
    assert "[a/path]" in shown
    assert "\x1b" not in shown
    if render is as_html:
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown


def test_recipes_side_by_side_tell_differences_in_bytes_and_per_cent() -> None:
    pair = [prediction(8 * GIB), prediction(6 * GIB, recipe=Recipe.parse("bf16"))]
    text = as_text(compare.render(pair))
    assert "-2,048" in text
    assert "-23.3 %" in text, "NVML: 6.586 GiB beside 8.586 GiB"
    assert RecipeComparison(tuple(pair)).to_json()["difference_bytes"] == [0, -2 * GIB]


def test_predicted_beside_measured_tells_the_error() -> None:
    both = foreseen_beside_seen(prediction(7 * GIB), measurement(8 * GIB))
    assert both.error("reserved_bytes") == -0.125
    assert "-12.5 %" in as_text(compare.beside(both))
    assert json.loads(json.dumps(both.to_json()))["errors"]["reserved_bytes"] == -0.125


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="recipe is bf16 predicted and plain measured"):
        foreseen_beside_seen(prediction(recipe=Recipe.parse("bf16")), measurement())
    longer = prediction(job=replace(job(), sequence_length=128, dtype="bfloat16"))
    told = (
        r"sequence_length is 128 predicted and 512 measured; dtype is bfloat16 predicted and float32 measured"
    )
    with pytest.raises(UsageError, match=f"{told}.*predict\\(measurement.job, measurement.recipe"):
        foreseen_beside_seen(longer, measurement())
    with pytest.raises(MeasurementError, match="oom:torch"):
        foreseen_beside_seen(prediction(), measurement(footprint=None, timing=None, outcome="oom:torch"))


def test_a_measurement_from_before_models_had_a_dtype_is_compared() -> None:
    """The measurement used float32 weights, and its document has no dtype of the checkpoint."""
    document = measurement(job=replace(job(), dtype="float32")).to_json()
    del document["job"]["dtype"]
    document["job"]["model"].pop("dtype", None)
    earlier = Measurement.from_json(document)
    for checkpoint in ("float32", "bfloat16"):
        model = replace(job().model, dtype=checkpoint)
        both = foreseen_beside_seen(prediction(job=replace(job(), model=model, dtype="float32")), earlier)
        assert both.error("reserved_bytes") == 0


def test_a_measurement_tells_its_start_up() -> None:
    start = Startup(
        imports_seconds=6.0, context_seconds=0.3, build_seconds=0.5, first_step_seconds=1.0,
        settling_seconds=0.6, settling_steps=2,
    )  # fmt: skip
    text = as_text(measurement_report.render(measurement(startup=start)))
    assert "2 more before the steady ones" in text
    assert "start-up" in text
    assert "8.10 s" in text  # 6 + 0.3 + 0.5 + 1 + 0.6, less three steps of 0.1 s
    assert "start-up" not in as_text(measurement_report.render(measurement()))


def test_a_measurement_tells_how_far_it_can_be_trusted() -> None:
    calm = as_text(measurement_report.render(measurement()))
    assert "40.00" in calm
    assert "Unstable" not in calm
    shaky = measurement(
        timing=timing(unstable=True), contaminated="another process", smi_bytes=9, smi_nvml_bytes=9
    )
    text = as_text(measurement_report.render(shaky))
    assert "Unstable" in text
    assert "another process" in text
    assert "nvidia-smi and NVML agree" in text
    dead = as_text(
        measurement_report.render(measurement(outcome="signal:SEGV", footprint=None, message="[a/b] died"))
    )
    assert "signal:SEGV" in dead
    assert "[a/b] died" in dead


def test_gpus_and_techniques_are_all_listed() -> None:
    text = as_text(gpus.render(all_gpus()), width=200)
    assert all(gpu.key in text for gpu in all_gpus())
    assert all(f"{gpu.bandwidth / 1e9:,.0f}" in text for gpu in all_gpus() if gpu.bandwidth)
    one = as_text(gpus.render_one(find_gpu("h200")), width=200)
    assert "NVIDIA H200" in one
    listed = as_text(techniques.render(roster()), width=200)
    assert all(technique.name in listed for technique in roster())
    document = json.loads(json.dumps(techniques.TechniqueList.of(roster()).to_json()))
    assert [entry["name"] for entry in document["techniques"]] == [one.name for one in roster()]


def test_bars_are_as_high_as_they_should_be() -> None:
    assert long_report.bars([0.0, 0.5, 1.0], rows=2) == ["  █", " ██"]
    assert long_report.sample([(0.0, 1.0), (0.4, 3.0), (0.41, 2.0), (0.99, 1.0)], 4) == [1.0, 3.0, 3.0, 1.0]
    assert long_report.legend([("forward", 0, 4), ("update", 4, 5)], 8) == "└for└"


def test_markdown_makes_foreign_words_inert() -> None:
    cell = grid.escape("[a](javascript:x)|<b>`c`")
    assert cell == r"\[a\](javascript:x)\|&lt;b&gt;\`c\`"
    assert grid.escape("a\r\nb\x1b[2J\x07 \u202ec") == "a b\ufffd\\[2J\ufffd \ufffdc"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_narrow_terminal_loses_no_name_and_breaks_no_number(width: int) -> None:
    text = as_text(gpus.render([find_gpu("v100-16gb"), find_gpu("h200")]), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "V100-SXM2-16" in text
    assert "125.0" in text
    assert ("Volta" in text) is (width >= gpus.WIDE)
    recipe = "fp16 + every_nth_layer(n=4) + adamw_fused + expandable + workers"
    made = as_text(
        grid.Grid(title="", heads=("Recipe", "GiB on the GPU>"), rows=((recipe, "1,234.56"),)), width=40
    )
    assert "1,234.56" in made
    assert max(map(len, made.splitlines())) <= 40
    heads, figures = tuple(f"figure {number}>" for number in range(9)), ("1,234.5678",) * 9
    many = as_text(grid.Grid(title="", heads=heads, rows=(figures,)), width=40)
    assert many.count("1,234.5678") == 9, "under the row rather than cut off"
    assert max(map(len, many.splitlines())) <= 40


def test_a_report_s_folder_is_made(tmp_path: Path) -> None:
    """An hour's result must survive a plot path in a missing folder."""
    assert files.write_atomically(tmp_path / "a" / "b" / "plot.svg", b"drawn").read_bytes() == b"drawn"


@pytest.mark.parametrize(("verified", "told"), [
    ((True, True), "Simulated in full, each answer takes the same bytes."),
    ((True, None), "Simulated in full, each answer takes the same bytes."),
    ((True, False), "Simulated in full, L4 needed other bytes than in the search"),
    ((None, None), ""),
])  # fmt: skip
def test_plans_for_gpus_say_whether_full_simulations_agreed(
    verified: tuple[bool | None, ...], told: str
) -> None:
    answers = tuple(
        OnGpu(gpu=find_gpu(name), fits=None, verified=each, why="an example")
        for name, each in zip(("h200", "l4"), verified, strict=True)
    )
    counts = (Counts(recipes=1, tapes=1, footprints=1, passes=1, replayed=1),)
    found = GpuPlans(
        job=prediction().job, fidelity="rounds", objective="speed", answers=answers, counts=counts
    )
    for text in (as_text(gpu_plans.render(found)), gpu_plans.render(found, Prices()).markdown()):
        assert told in " ".join(text.split())
        assert ("Simulated in full" in text) is bool(told)


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = files.write_atomically(tmp_path / "made" / "here", b"content")
    assert list((tmp_path / "made").iterdir()) == [written]
    assert written.read_bytes() == b"content"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match="No space left"):
        files.write_atomically(tmp_path / "late", b"content")
    assert not list(tmp_path.glob(".late*"))
    assert not (tmp_path / "late").exists()


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"inside: /.*/file is a file"):
        files.writable_folder(tmp_path / "file" / "inside")
    with pytest.raises(UsageError, match="file: this is a file"):
        files.writable_folder(tmp_path / "file")
    assert files.writable_folder(tmp_path / "new" / "deeper") == tmp_path / "new" / "deeper"
    assert not (tmp_path / "new").exists()
    assert files.writable_folder(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="Requires: [Linux's /proc]")
@pytest.mark.parametrize("folder", ["/proc", "/proc/new"])
def test_a_folder_that_takes_no_file_is_found_out_by_trying(folder: str) -> None:
    with pytest.raises(UsageError, match="/proc: nothing can be written into this folder"):
        files.writable_folder(Path(folder))


def test_the_head_of_a_report_names_the_sizes_that_a_batch_has() -> None:
    def line(name: str, task: Task) -> str:
        return job_line(Job(model=Model.find(name), task=task))

    assert "· batch 4 × 512 ·" in line("bert-base-uncased", Task.MASKED_LM)
    assert "· batch 4 ·" in line("google/vit-large-patch16-224", "image-classification")
    assert "· batch 4 × 512 → 128 ·" in line("google-t5/t5-3b", Task.SEQ2SEQ_LM)
    assert "· batch 4 → 128 ·" in line("openai/whisper-medium", "speech-to-text")
    assert "routing" not in line("bert-base-uncased", Task.MASKED_LM)
    assert job_line(replace(job(), routing="worst")).endswith(" · worst routing")


def test_results_print_themselves_once_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    from snugfit.report import show

    for kind in show._RENDERERS:
        monkeypatch.setattr(kind, "__str__", kind.__str__)
        monkeypatch.setattr(kind, "_repr_html_", None, raising=False)
    show.attach()
    assert "fits, 8.2 GiB free" in str(prediction())
    assert "samples/s" in str(measurement())
    assert "bert-large-uncased" in prediction()._repr_html_()


def test_in_a_notebook_results_are_text_and_nothing_is_shown_beside_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notebooks set FORCE_COLOR, and rich then also displays output that is printed to a file."""
    from snugfit.report import show

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    show.attach()
    plain: list[str] = []
    prediction()._repr_pretty_(SimpleNamespace(text=plain.append), False)
    assert plain == [str(prediction())]
    assert "fits, 8.2 GiB free" in plain[0]
    assert "\x1b" not in plain[0]
    assert capsys.readouterr() == ("", "")


def test_managed_memory_and_buffers_count_as_context() -> None:
    plain = footprint()
    lines = {
        line.figure: line
        for line in error_lines(replace(plain, managed_bytes=500, communication_bytes=30), plain)
    }
    context = lines["context_bytes"]
    assert (context.predicted, context.measured) == (plain.context_bytes + 530, plain.context_bytes)
    assert lines["reserved_bytes"].predicted == plain.reserved_bytes


def test_only_a_step_with_collectives_has_a_scaling_efficiency() -> None:
    alone = timed(prediction()).timing
    assert alone is not None
    assert (alone.communication_seconds, alone.scaling_efficiency) == (0, None)
    step = alone.step_seconds
    several = replace(alone, communication_seconds=step / 2, exposed_communication_seconds=step / 4)
    assert several.scaling_efficiency == pytest.approx(0.75)


def test_a_comparison_has_the_seconds_of_both() -> None:
    both = foreseen_beside_seen(timed(prediction()), measurement(timing=timing()))
    assert both.pace is not None
    assert (both.pace.predicted, both.pace.measured) == (0.3, pytest.approx(0.1))
