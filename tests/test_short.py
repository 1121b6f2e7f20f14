"""Short answers: one screen, an honest first line, everyday names, and one recommendation that fits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import snugfit
from made_up import job, measurement, prediction, timed
from small_models import small_job
from snugfit.cli.main import run
from snugfit.comparison.recipes import RecipeComparison
from snugfit.job.job import Phase
from snugfit.planning.plan import Change, Reason, Start
from snugfit.prediction.predict import predict
from snugfit.report import compare, short
from snugfit.report import measurement as measured
from snugfit.report import prediction as whole
from snugfit.report.items import item_name, items_at_peak
from snugfit.report.plan import short as short_plan
from snugfit.report.text.answer import SCALED_RATES, show_fit
from snugfit.report.text.terminal import as_text
from snugfit.results.prediction import Prediction, TensorLine
from snugfit.results.ways_out import WayOut, WaysOut
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB, MIB
from test_plan_command import choice, made_up

LONG = "lora(r=16, targets=all-linear) + bf16_pure + tf32 + every_layer + micro_batches(16) + expandable"


def line(module: str, operator: str = "mm", kind: str = "activations", **more: Any) -> TensorLine:
    given = {"phase": "forward", "bytes": GIB, "count": 1, "dtype": "bfloat16"} | more
    return TensorLine(module=module, operator=operator, kind=kind, **given)


NAMES = {
    "": ("log_softmax", "activations", "logits and their gradients"),
    "base_model.model.lm_head": ("mm", "temporaries", "logits and their gradients"),
    "model.layers.*.mlp.gate_proj": ("mm", "activations", "MLP activations"),
    "bert.encoder.layer.*.output.dense": ("addmm", "activations", "MLP activations"),
    "encoder.block.*.layer.*.DenseReluDense.act": ("relu", "activations", "MLP activations"),
    "bert.encoder.layer.*.attention.output.dense": ("addmm", "activations", "attention activations"),
    "model.layers.*.post_attention_layernorm": ("to_copy", "activations", "normalization activations"),
    "model.layers.*.mlp.experts": ("empty", "weights", "weights of the experts"),
    "model.layers.*": ("add", "activations", "hidden states between layers"),
    "vit.layers.*.mlp.fc1": ("zeros_like", "optimizer states", "AdamW's moments"),
    "transformer.wte": ("empty", "weights", "weights"),
    "base_model.model": ("to_copy", "activations", "logits and their gradients"),
    "transformer.drop": ("native_dropout", "activations", "dropout activations"),
}


@pytest.mark.parametrize("module", NAMES)
def test_an_item_has_an_everyday_name(module: str) -> None:
    operator, kind, name = NAMES[module]
    phase = "update" if kind == "optimizer states" else "forward"
    assert item_name(line(module, operator, kind, phase=phase), "AdamW", trains=True) == name


@pytest.mark.parametrize(
    ("operator", "name"), [("full_like", "Adagrad's states"), ("empty_like", "master weights")]
)
def test_states_of_a_constructor_are_no_master_weights(operator: str, name: str) -> None:
    states = line("lm_head", operator, "optimizer states", phase="build")
    assert item_name(states, "Adagrad", trains=True) == name


def large(one: Prediction, *lines: TensorLine) -> Prediction:
    return replace(one, anatomy=replace(one.anatomy, largest=lines))


def test_items_add_up_and_name_the_dtypes_of_their_tensors() -> None:
    parts = [
        line(f"model.layers.*.mlp.{name}_proj", bytes=size) for name, size in (("up", GIB), ("down", MIB))
    ]
    half = line("model.layers.*.mlp.act", dtype="float32", bytes=GIB // 2)
    (item,) = items_at_peak(large(prediction(), *parts, half))
    assert (item.bytes, str(item)) == (GIB + MIB + GIB // 2, "MLP activations (bfloat16, float32)")


@pytest.mark.parametrize("layers", [2, 12])
def test_items_of_a_rehearsed_step_have_the_dtypes_of_its_tensors(layers: int) -> None:
    """They are those of a trace of all layers, and of a trace that was grown from few layers."""
    one = predict(small_job("gpt2", layers, batch_size=4), "bf16_master", gpu="h200")
    items = {item.name: item for item in items_at_peak(one)}
    assert sum(item.bytes for item in items.values()) == one.footprint.requested_bytes
    assert items["weights"].dtypes == ("bfloat16",)
    assert items["master weights"].dtypes == ("int16",)
    assert items["MasterAdamW's moments"].dtypes == ("float32",)


@pytest.mark.parametrize("size", [7 * GIB, 200 * GIB])
def test_a_prediction_is_one_screen_of_15_lines(size: int) -> None:
    doubts = ("the first of several doubts, which is as long as such sentences are wont to be, and more",) * 9
    one = timed(prediction(size, recipe=Recipe.parse(LONG), doubts=doubts, read_in_full=False))
    page = short.render(large(one, *(line(f"a.*.part{n}.x{n}") for n in range(9))))
    lines = as_text(page, width=100).splitlines()
    assert len(lines) <= 15
    assert f"recipe       {one.recipe}" in lines, "the recipe is never broken"
    assert "(8 more: --details)" in lines[-1]
    assert len(as_text(whole.render(one), width=100).splitlines()) > 30


def test_a_step_that_does_not_fit_is_16_lines_of_80_columns() -> None:
    name = "lora(r=16, targets=q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    changes = ("expandable", "liger(fused_linear_cross_entropy=false) + chunked_loss", "first_layers(10)")
    ways = tuple(
        WayOut(changes=(change,), recipe=f"{name} + bf16 + {change}", needed_bytes=9 * GIB,
               spare_bytes=GIB, step_seconds=9.4, slowdown=0.1, fidelity="rounds")
        for change in changes
    )  # fmt: skip
    doubts = (SCALED_RATES, "another one")
    one = replace(timed(prediction(20 * GIB, doubts=doubts)), ways_out=WaysOut(ways=ways))
    page = short.render(large(one, *(line(f"a.*.part{n}.x{n}") for n in range(9))))
    lines = as_text(page, width=80).splitlines()
    assert len(lines) <= 16
    assert f"             --recipe '{ways[0].recipe}'" in lines, "the option is never broken"


def test_a_model_that_each_gpu_builds_first_is_named() -> None:
    whole_model = line("", "empty", "temporaries", phase="build")
    assert item_name(whole_model, "AdamW", trains=True) == "whole model while it is built"


def test_the_first_line_has_its_conditions() -> None:
    unread = short.verdict(prediction(read_in_full=False)).text
    assert "fits if the unread parts change nothing: 8.2 GiB free" in unread
    over = short.verdict(prediction(20 * GIB, read_in_full=False)).text
    assert "does not fit if the unread parts change nothing: needs 20.6 GiB" in over
    several = short.verdict(prediction(20 * GIB, gpus=2)).text
    assert "2 x Tesla V100-SXM2-16GB: does not fit: needs 20.6 GiB, each card has 15.8 GiB" in several
    limited = as_text(short.render(prediction(memory_bytes=4 * GIB)), width=200)
    assert "Plan one that fits: snugfit plan bert-large-uncased" in limited
    assert "--gpu v100-sxm2-16 --memory 4096MiB" in limited
    assert "add --gpu NAME" in short.verdict(prediction(gpu=None, memory_bytes=None)).text
    unnamed = prediction(20 * GIB, gpu=None, memory_bytes=8 * GIB, gpus=2)
    assert "4 × 512, 2 GPUs: does not fit" in short.verdict(unnamed).text
    assert "2 GPUs without a name" in as_text(whole.render(unnamed))
    more = short.verdict(prediction(memory_bytes=80 * GIB)).text
    assert "Tesla V100-SXM2-16GB with 80.0 GiB: fits, 72.4 GiB free" in more
    assert "16GB: fits" in short.verdict(prediction(memory_bytes=16 * GIB)).text, "the marketed size"
    lora = short.verdict(prediction(recipe=Recipe.parse("lora(r=8)"))).text
    assert lora.startswith("bert-large-uncased, LoRA r=8, 4 × 512, ")


def test_the_command_of_a_plan_has_the_whole_job() -> None:
    unusual = replace(
        job(), model=job().model.with_vocabulary(99), padding=0.5, decay_groups=True, routing="worst"
    )
    one = prediction(20 * GIB, job=unusual, gpus=2)
    for page in (short.render(one), whole.render(replace(one, ways_out=WaysOut()))):
        text = " ".join(as_text(page, width=300).split())
        assert "--padding 0.5 --vocab-size 99 --set decay_groups=True --routing worst --gpu v100-sx" in text
        assert "--gpus 2" in text
    evaluation = replace(one, job=replace(job(), phase=Phase.EVALUATE))
    assert "--phase evaluate" in as_text(short.render(evaluation), width=300)


def test_sizes_that_differ_never_look_alike() -> None:
    assert show_fit(24 * GIB + MIB, 24 * GIB) == "does not fit: needs 24.001 GiB, the card has 24.000 GiB"
    assert show_fit(241 * GIB, 24 * GIB) == "does not fit: needs 241 GiB, the card has 24.0 GiB"


@pytest.mark.parametrize("render", [short.render, whole.render])
def test_an_evaluation_names_its_loss(render: Any) -> None:
    text = as_text(render(prediction(job=replace(job(), phase=Phase.EVALUATE))))
    assert "loss over all logits" in text
    assert ", evaluation, " in text


def test_the_widest_uncertainty_is_shown() -> None:
    one = timed(prediction(doubts=("one.", "two.")))
    assert "Uncertain: one (1 more: --details)" in as_text(short.render(one))
    assert one.timing is not None
    scaled = replace(one, timing=replace(one.timing, measured_rates=False))
    assert "Uncertain: step time, as" in as_text(short.render(scaled))
    assert "Uncertain: two (1 more" in as_text(short.render(replace(scaled, read_in_full=False)))


def test_the_best_of_several_recipes_fits() -> None:
    """The fastest and the smallest recipe do not count if they do not fit or leave too little."""
    fast, slow, slower = (timed(prediction(size)) for size in (20 * GIB, 7 * GIB, 6 * GIB))
    assert slower.timing is not None
    slower = replace(
        slower, timing=replace(slower.timing, step_seconds=1.0), recipe=Recipe.parse("every_layer")
    )
    compared = RecipeComparison((fast, slower, slow))
    assert compared.best is slow
    text = as_text(compare.render(compared.predictions), width=160)
    assert "the fastest of 2 recipes that fit, 8.2 GiB free" in text.splitlines()[0]
    assert "no, short by 4.80 GiB" in text
    assert RecipeComparison((fast,)).best is None
    assert "no recipe fits. The smallest is short by 4.80 GiB" in as_text(compare.render([fast]))
    tight = replace(slow, headroom_bytes=9 * GIB)
    assert RecipeComparison((tight, slower)).best is slower


def test_a_plan_shows_its_gains_and_at_most_six_rows() -> None:
    rows = tuple(choice(f"bf16 + micro_batches({n})", (30 - n) * GIB, 0.05 * 1.1**n) for n in range(1, 20))
    gain = Reason(slot="precision", chosen="bf16", against="fp32", needed_bytes=40 * GIB, step_seconds=0.11)
    loss = Reason(
        slot="batching", chosen="micro_batches(1)", against="whole_batch", needed_bytes=GIB, step_seconds=0.01
    )
    plan = replace(made_up(), front=rows, best=rows[0], reasons=(loss, gain))
    text = as_text(short_plan.render(plan), width=100)
    first, recipe, *rest = text.splitlines()
    assert "all weights, 4 × 512, H200: fits, 10.0 GiB free, about 55 ms a step" in first
    assert recipe == rows[0].recipe
    assert "gains        bf16 in place of fp32: 10.0 GiB less memory, 55 ms a step faster" in rest
    assert sum("micro_batches(" in line for line in rest) - 1 <= 6
    assert any(line.startswith("Train it: snugfit train") for line in rest)
    assert "Not considered" not in text
    change = Change(slot="kernels", theirs="liger", ours="fused", needed_bytes=20 * GIB, step_seconds=0.09)
    start = Start(recipe="bf16", needed_bytes=30 * GIB, step_seconds=0.1, changes=(change,))
    text = as_text(short_plan.render(replace(plan, start=start)), width=100)
    assert "gains        fused in place of your liger: 10.0 GiB less memory, 10 ms a step faster" in text


def test_a_measurement_has_a_short_answer() -> None:
    text = as_text(measured.short(measurement()), width=100)
    assert text.splitlines()[0].endswith("H200: measured 7.6 GiB, 100.0 ms a step")
    assert len(text.splitlines()) <= 15
    dead = as_text(measured.short(measurement(outcome="oom:torch", footprint=None, timing=None)), width=100)
    assert dead.count("the run ended with oom:torch") == 1


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("snugfit.prediction.predict.predict", lambda *_, **__: prediction())
    monkeypatch.setattr("snugfit.planning.search.search.plan", lambda *_, **__: made_up())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("command", ["predict", "plan"])
def test_three_lengths_of_one_answer(
    command: str, answered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-q` prints the first line of the short answer, `-v` the whole report."""
    shown = []
    for more in (["-q"], [], ["-v"]):
        assert (
            run([command, "bert-large-uncased", "--task", "sequence-classification", "--gpu", "h200", *more])
            == 0
        )
        shown.append(capsys.readouterr().out.splitlines())
    quiet, usual, details = shown
    assert quiet == usual[:1] == details[:1]
    assert 1 < len(usual) < len(details)
    assert run([command, "-V"]) == 0
    assert capsys.readouterr().out == f"snugfit {snugfit.__version__}\n"
    assert run([command, "bert-large-uncased", "-q", "--details"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err


def test_predict_shows_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of the cell is replaced, and empty at the end."""
    lines: list[str] = []

    class Line:
        def update(self, data: dict[str, str], raw: bool) -> None:
            lines.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Line:
        Line().update(data, raw)
        return Line()

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("snugfit.planning.search.auto.predict_recipe", lambda *_, **__: prediction())
    snugfit.predict(job(), "bf16", gpu="h200")
    assert lines == ["starting", "predicting bert-large-uncased", ""]
