"""`snugfit guide --inference`: backends as they are today, and the six kinds of memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import engine_speed
import pytest

from in_roster import are_in_roster
from made_up import prediction
from snugfit.cli.main import run
from snugfit.features.guide import inference
from snugfit.features.guide.inference import KINDS, run_inference
from snugfit.features.guide.inference_tables import render
from snugfit.job.gpu import find_gpu
from snugfit.report.text.terminal import as_text
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB


@pytest.fixture(autouse=True)
def made_up_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict 12 GiB for every request but a compiled one."""

    def predict_all(requests: Any, **_: Any) -> Any:
        return [
            "compiled: it is refused here"
            if "compiled" in one.recipe
            else prediction(12 * GIB, job=one.job, recipe=Recipe.parse(one.recipe))
            for one in requests
        ]

    monkeypatch.setattr(inference, "predict_all", predict_all)


def test_each_backend_has_its_state_in_the_installed_torch() -> None:
    result = run_inference(find_gpu("h200"))
    states = {row.name: row.state for row in result.backends}
    assert states["inductor"] == states["aot_cudagraphs"] == "registered"
    assert {states[name] for name in ("ofi", "ipex", "nvfuser, aot_nvfuser")} == {"gone"}
    eager = next(row for row in result.backends if row.name == "eager")
    assert eager.needed_bytes
    assert eager.guide
    inductor = next(row for row in result.backends if row.name == "inductor")
    assert inductor.needed_bytes is None
    text = " ".join(as_text(render(result), width=120).split())
    # Without the technique of its recipe, the row has a state alone.
    assert ("Not predicted: inductor" in text) == are_in_roster("compiled")
    assert re.search(r"ipex gone .* not measured .* openvino \(not in the guide\) .* 1.37 to 1.66", text)
    assert "functionality-specific memory" in text
    assert type(result).from_json(json.loads(json.dumps(result.to_json()))) == result


def test_the_packaged_engines_are_those_of_the_committed_file() -> None:
    packaged = json.loads(engine_speed.GUIDE.read_text(encoding="utf-8"))
    measured = engine_speed.GUIDE.parents[4] / packaged["source"]
    assert packaged == engine_speed.guide_table(measured)
    assert f"on {packaged['date']}, with torch 2.13.0+cpu" in as_text(
        render(run_inference(find_gpu("h200"))), width=400
    )


def test_each_kind_of_a_prediction_belongs_to_one_kind_of_the_guide() -> None:
    named = [kind for kinds in KINDS.values() for kind in kinds]
    assert sorted(named) == sorted({*Kind} - {Kind.CONTEXT})


def test_the_command_writes_its_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["guide", "--inference", "--gpu", "h200", "--output", str(tmp_path)]) == 0
    assert {"guide-inference.md", "guide-inference.json"} <= {path.name for path in tmp_path.iterdir()}
    assert "nvfuser" in (tmp_path / "guide-inference.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert run(["guide", "--inference", "--modern", "--gpu", "h200", "--output", str(tmp_path)]) == 2
    assert "--inference has its own tables" in capsys.readouterr().err
