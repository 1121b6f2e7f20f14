"""The JSON of each answer is valid against `snugfit schema`, and has all of its keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import snugfit
from json_schema_faults import faults
from kept import REST
from made_up import LARGER, WAYS, measurement, timing
from small_models import small_job
from snugfit.cli.main import run
from snugfit.features.schema.json_schema import DOCUMENTS, schema_of
from snugfit.planning.fleet.prices import Prices, document
from snugfit.report.techniques import TechniqueList
from snugfit.results.measurement import GpuClock, RankMeasured
from snugfit.techniques.roster import techniques
from test_gpus_command import made_up as plans_for_gpus
from test_reference import hold_to_schema

pytestmark = pytest.mark.stored_rehearsals


def test_every_key_has_its_sentence() -> None:
    silent = [
        f"{owner}.{name}"
        for owner, described in schema_of()["$defs"].items()
        for name, value in described["properties"].items()
        if not value.get("description")
    ]
    assert silent == []


def answers() -> Iterator[tuple[str, Any]]:
    """Yield answers about a tiny model, with made-up objects in place of answers that take a process or a
    minute."""
    job = small_job("gpt2", 2, facts={"dtype": "bfloat16"})
    predicted = snugfit.predict(job, "plain", gpu="h200")
    measured = measurement(timing=timing(), startup=predicted.startup, job=job, recipe=predicted.recipe)
    yield "predict --json", replace(predicted, ways_out=replace(WAYS, larger_gpu=LARGER.larger_gpu))
    stages = small_job("llama", 2, batch_size=4)
    yield "predict --json", snugfit.predict(stages, "pipeline(2) + micro_batches(2)", gpu="h200", gpus=2)
    # A feature's phase adds results.
    yield "predict --json", predicted.to_json() | {"phase_results": {"tokens": 1}}
    yield "predict --compare --json", snugfit.compare(job, ["plain"], gpu="h200")
    ranks = (RankMeasured(rank=0, gpu_index=0, uuid=None, footprint=measured.footprint, step_seconds=0.1),)
    clock = GpuClock(mean_mhz=1700.4, lowest_mhz=1590, highest_mhz=1980, readings=40, reasons={"power": 0.9})
    yield "measure --json", replace(measured, ranks=ranks, clock=clock)
    yield "measure --predict --json", snugfit.compare(predicted, measured)
    kept = f"full + sdpa + as_loaded + keep_all + whole_batch + adamw + {REST}"
    how: dict[str, Any] = {"gpu": "h200", "keep": kept, "workers": 1, "fresh": True}
    planned = snugfit.plan(job, free=("loading", "allocator"), start="expandable", ranked=1, **how)
    yield "plan --json", planned
    kept += " + default + inline"
    yield "plan --json", snugfit.plan(job, memory_bytes=1 << 20, **how | {"keep": kept})
    plans, prices = plans_for_gpus(), Prices({"H200-SXM": 2.5})
    kept_slots = tuple(planned.kept)
    plans = replace(plans, kept=kept_slots, counts=(planned.counts,))
    yield "gpus --for MODEL --json", plans.to_json() | {"run": document(plans, prices)}
    yield "gpus --json", {"schema": 1, "what": "gpus", "gpus": [gpu.to_json() for gpu in snugfit.all_gpus()]}
    yield "techniques --json", TechniqueList.of(list(techniques())).to_json()


@pytest.mark.whole
def test_answers_are_valid_against_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hold_to_schema(DOCUMENTS, answers())


def test_a_document_that_differs_from_the_schema_is_found() -> None:
    schema, document = schema_of("gpus"), {"schema": 1, "what": "gpus", "gpus": []}
    assert faults(schema, document, set()) == []
    for change in ({"what": "plan"}, {"gpus": [{}]}, {"gpus": None}, {"schema": "1"}, {"surplus": 1}):
        assert faults(schema, document | change, set())
    assert faults(schema, {"schema": 1, "what": "gpus"}, set())


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "predict"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == schema_of("predict")
    assert [choice["$ref"] for choice in printed["anyOf"]] == [
        "#/$defs/prediction",
        "#/$defs/recipe-comparison",
        "#/$defs/session-prediction",
    ]
    assert printed["$defs"]["prediction"]["properties"]["headroom_bytes"]["x-unit"] == "bytes"
    assert run(["schema", "plans"]) == 2
    assert "Try: snugfit schema plan" in capsys.readouterr().err
