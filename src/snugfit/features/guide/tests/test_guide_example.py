"""`examples/hf_guide.sh` runs for a small model, and for BERT on a V100."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up_guide import guide_result

from snugfit.features.guide.suite import suite
from test_examples import answer, folder, small_answer, tiny_model

__all__ = ["folder"]


def check_guide(folder: Path, said: str) -> None:
    """Check that tables, plots and page are written, with the published figures."""
    results = folder / "snugfit-examples"
    assert "As published, and predicted" in said
    guide = json.loads((results / "guide" / "guide.json").read_text())
    assert guide
    assert {"guide.svg", "guide.png", "guide.md"} <= {file.name for file in (results / "guide").iterdir()}
    page = (results / "guide.html").read_text()
    assert page.count('class="bar"') > len(suite()), "not every experiment has a bar"


@pytest.mark.slow
def test_the_guide_s_techniques_on_a_small_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite is of BERT-large: its figures are made up here. Each time `test_cli.py` writes a guide."""
    monkeypatch.setattr("snugfit.features.guide.run.run", lambda *_, **__: guide_result())
    monkeypatch.setattr("snugfit.features.guide.command.picture", lambda *_: b"a picture")
    check_guide(folder, small_answer("hf_guide.sh", MODEL=tiny_model(folder)))


@pytest.mark.slow
def test_the_guide_on_a_v100(folder: Path) -> None:
    check_guide(folder, answer("hf_guide.sh"))
