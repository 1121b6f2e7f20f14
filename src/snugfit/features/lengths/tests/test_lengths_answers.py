"""Arguments, headroom, JSON documents, tables and documented commands of plans for sequence lengths."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_lengths_command import made_up

from in_roster import needs_techniques
from made_up_plans import planned
from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import GpuError, UsageError
from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.feature import LengthsFeature
from snugfit.features.lengths.report import render
from snugfit.features.lengths.search import plan_lengths
from snugfit.job.gpu import find_gpu
from snugfit.planning.plan import Plan
from snugfit.prediction.headroom import headroom_of
from snugfit.report.text.terminal import as_text
from test_docs import answered, commands
from test_reference import hold_to_schema
from test_tables import hold_rows_and_figures

__all__ = ["answered"]

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

LENGTHS = Lengths.of({8: 30, 24: 2}, source="made up")
H200 = find_gpu("h200")


@pytest.mark.parametrize(("asked", "told"), [
    ({"job": "bert"}, "job is 'bert'"),
    ({"gpu": None}, "must be text, such as"),
    ({"lengths": [3, 4]}, r"lengths is list; it must be a snugfit\.Lengths: Lengths\.of"),
    ({"lengths": "lengths.txt"}, r"lengths is str.*Lengths\.read\(path\)"),
    ({"memory_bytes": "3GiB"}, "memory_bytes is '3GiB'"),
    ({"cut": 0}, "0 is not a length"),
    ({"recipe": 3}, "A recipe must be text"),
])  # fmt: skip
def test_each_argument_is_checked(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        plan_lengths(**{"job": small_job("bert", 1), "lengths": LENGTHS, "gpu": "h200", **asked})


@pytest.mark.parametrize("given", [None, 3, "lengths.txt"])
def test_lengths_are_a_list_or_a_histogram(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a list of lengths nor a histogram.*Lengths\.read"):
        Lengths.of(given)
    (tmp_path / "a.txt").write_text("8\n24\n8\n")
    assert Lengths.read(str(tmp_path / "a.txt")).counts == ((8, 2), (24, 1))


def test_a_gpu_that_no_step_runs_on_is_refused() -> None:
    with pytest.raises(GpuError, match="is not a CUDA GPU"):
        plan_lengths(small_job("gpt2", 1), gpu="mi300x", lengths=LENGTHS)


def test_ways_of_padding_are_not_compared_where_all_of_it_is_dropped() -> None:
    needs_techniques("padding_free")
    lengths = Lengths.of([10, 20, 15, 15])
    with pytest.raises(UsageError, match=r"sequence_length 20, padding 0\.250"):
        plan_lengths(small_job("llama"), "bf16 + padding_free", lengths=lengths, gpu="h200")


def test_graphs_of_each_length_are_refused() -> None:
    needs_techniques("compiled")
    recipe, lengths = "compiled(mode=reduce-overhead)", Lengths.of([8, 12])
    with pytest.raises(UsageError, match=r"for each length of a batch.*Pad all batches alike"):
        plan_lengths(small_job("llama"), recipe, lengths=lengths, gpu="h200")


def test_ways_of_padding_leave_the_same_headroom() -> None:
    """The default equals a plan's. If no way of padding leaves it, the best that fits is marked as tight."""
    usual = plan_lengths(small_job("bert", 1), lengths=LENGTHS, gpu="h200")
    assert usual.headroom_bytes == headroom_of(None, H200)
    assert usual.best
    assert "Tight" not in as_text(render(usual))
    assert usual.memory_bytes
    tight = replace(usual, headroom_bytes=usual.memory_bytes)
    assert tight.best == usual.best
    assert "Tight: no way of padding leaves the headroom free" in as_text(render(tight))
    assert "best tight" in as_text(render(tight))
    needed = usual.best.needed_bytes or 0
    larger = replace(usual.best, order="fixed", needed_bytes=needed + 9, samples_per_second=1e9)
    one = replace(usual, ways=(larger, usual.best), memory_bytes=needed + 10, headroom_bytes=5)
    assert one.best == usual.best, "the fastest leaves less than the headroom"


def test_answers_are_valid_against_the_schema() -> None:
    answer = replace(made_up(), job=small_job("gpt2", 2, facts={"dtype": "bfloat16"}))
    hold_to_schema({"lengths --json": LengthsFeature().documents()["lengths --json"]}, [("lengths", answer)])


def test_a_plan_with_lengths_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("snugfit.planning.search.search.plan", lambda job, **how: planned(0))
    monkeypatch.setattr("snugfit.features.lengths.search.plan_lengths", lambda *_, **__: made_up())
    (tmp_path / "lengths.json").write_text('{"128": 60, "500": 4}')
    ask = ["plan", "gpt2", "--task", "causal-lm", "--gpu", "h200", "--lengths", "lengths.json"]
    assert run([*ask, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("lengths") == json.loads(json.dumps(made_up().to_json()))
    assert Plan.from_json(document) == planned(0)
    assert run(ask) == 0
    text = capsys.readouterr().out
    assert text.index("GPU memory") < text.index("Pad each batch")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_every_row_keeps_its_name_and_every_figure_is_whole(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_rows_and_figures(lambda: render(made_up()), width, monkeypatch)


@pytest.mark.parametrize("command", [one for one in commands() if one.startswith("lengths")])
def test_a_command_of_the_docs_is_understood(
    command: str,
    answered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("snugfit.features.lengths.search.plan_lengths", lambda *_, **__: made_up())
    (tmp_path / "lengths.json").write_text('{"128": 60, "500": 4}')
    assert run(shlex.split(command)) == 0, capsys.readouterr().err
