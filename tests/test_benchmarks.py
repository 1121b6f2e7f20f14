"""Benchmarks follow the code: each is imported, and what it replaces in other modules is still there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMMANDS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "def main(" in path.read_text())
"""The other files are parts of these."""


@pytest.mark.whole
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_is_importable_and_has_a_main(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module(name)
    assert callable(module.main)
    assert f"benchmarks/{name}.py" in (module.__doc__ or ""), "how it is called"


def test_front_ends_still_take_their_predictor_by_this_name() -> None:
    """`train_overhead.py` replaces it, since a prediction takes seconds and is no part of a step."""
    from snugfit.frontends.custom_loop import run
    from snugfit.frontends.trainer import step_timer

    assert callable(run.run_predictor)
    assert callable(step_timer.run_predictor)
