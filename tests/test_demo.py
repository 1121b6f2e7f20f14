"""`make demo`: the killed run resumes and ends like the uninterrupted run; one screen and a picture."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from clean_forks import Forks
from snugfit.errors import SnugfitError

EXAMPLES = Path(__file__).parents[1] / "examples"
SCREEN = (40, 100)
"""Lines and columns of one screen."""

NEAR = 0.01
"""Bound on the relative difference of the CPU step's predicted bytes and the profiler's."""


def demo_module() -> Any:
    """Import the demo under a name with which processes can exchange its results."""
    for feature in ("digits", "page"):
        pytest.importorskip(f"snugfit.features.{feature}", reason=f"the feature {feature} is not there")
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("demo")
    finally:
        sys.path.remove(str(EXAMPLES))


def run_demo(folder: str) -> int:
    """Run the demo in this process, with a plan of few recipes, few training steps and an empty cache."""
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    demo = demo_module()
    demo.KEPT += " + fp16 + micro_batches(8)"
    demo.STEPS, demo.KILLED_AFTER, demo.SAVED_EVERY = 20, 13, 10
    demo.main()
    sys.stdout.flush()
    return 0


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_demo_is_killed_resumes_and_ends_alike(tmp_path: Path, forks: Forks) -> None:
    with (tmp_path / "screen").open("w+") as screen:
        child = forks.start(run_demo, str(tmp_path), streams={1: screen.fileno(), 2: screen.fileno()})
        code = forks.ended(child, within=300)
        screen.seek(0)
        shown = screen.read()
    assert code == 0, shown
    lines = shown.splitlines()
    assert len(lines) <= SCREEN[0]
    assert max(map(len, lines[:-1])) <= SCREEN[1]  # the last line ends with a path
    pids = re.findall(r"process (\d+) ", shown)
    assert len({*pids}) == 3
    assert f"process {pids[0]} was killed with SIGKILL after step 13 of 20" in shown
    assert f"process {pids[1]} resumed at the checkpoint of step 10" in shown
    resumed, alone = re.findall(r"^   (?:killed and resumed|left alone) +(.+)$", shown, re.MULTILINE)
    assert resumed == alone
    accuracy = float(resumed.split()[1].rstrip("%"))
    assert accuracy > 30, "a guess gives 10"
    assert "All 20 losses are equal, and so are the weights" in shown
    predicted, measured = (
        int(re.search(rf"{word} +([\d,]+) ", shown)[1].replace(",", ""))  # type: ignore[index]
        for word in ("predicted", "measured")
    )
    assert predicted == pytest.approx(measured, rel=NEAR)
    picture = Path(lines[-1].rpartition(": ")[2])
    assert picture == tmp_path / "snugfit-examples" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("changed", ["losses", "digest", "accuracy"])
def test_a_resumed_run_that_ends_otherwise_is_noticed(
    changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = demo_module()
    finished, losses = demo.Finished(0.96, "0" * 64), {step: 1 / step for step in range(1, 101)}
    runs = demo.Runs((1, 2, 3), 50, 40, finished, finished, losses, dict(losses), 1)
    demo.print_runs(runs)
    assert "losses are equal" in capsys.readouterr().out
    if changed == "losses":
        runs = runs._replace(losses=losses | {41: 1.0})
    else:
        other = {"digest": "1" * 64, "accuracy": 0.95}
        runs = runs._replace(resumed=finished._replace(**{changed: other[changed]}))
    with pytest.raises(SnugfitError, match="ended otherwise"):
        demo.print_runs(runs)
