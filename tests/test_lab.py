"""Scripts of the lab match the code: each can be imported, and the names that they replace exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

LAB = Path(__file__).parents[1] / "lab"
COMMANDS = sorted(path.stem for path in LAB.glob("*.py") if "def main(" in path.read_text())
"""Scripts with a `main`; the other files are parts of these."""


@pytest.mark.whole
@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_is_importable_and_has_a_main(name: str) -> None:
    module = importlib.import_module(name)
    assert callable(module.main)
    assert f"lab/{name}.py" in (module.__doc__ or ""), "the docstring shows its command"


def test_front_ends_still_take_their_predictor_by_this_name() -> None:
    """`train_overhead.py` replaces this name, because a prediction takes seconds and is no part of a step."""
    from snugfit.frontends.custom_loop import run
    from snugfit.frontends.trainer import step_timer

    assert callable(run.run_predictor)
    assert callable(step_timer.run_predictor)
