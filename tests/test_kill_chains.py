"""Run a few chains of kills from the lab: each front-end with data that is hard to resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

SCRIPT = Path(__file__).parents[1] / "lab" / "kill_chains.py"


@pytest.mark.parametrize("front_end", ["train", "fit", "accelerate"])
def test_what_is_killed_again_and_again_comes_to_the_same(front_end: str, tmp_path: Path) -> None:
    """Each chain runs in its own processes, with randomly drawn configurations."""
    out = tmp_path / "chains.json"
    command = [sys.executable, str(SCRIPT), str(out), "--kills", "8", "--seeds", "7", "--only", front_end]
    subprocess.run(command, check=True, timeout=600)
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["kills"] >= 8
    wrong = [chain for chain in document["chains"] if chain["outcome"] not in ("same", "refused")]
    assert not wrong
