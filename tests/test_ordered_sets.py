"""A rehearsal is the same in every process, whatever its hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from small_models import small_job
from snugfit.rehearsal.ordered_sets import SortedSet, sets_in_order

TAPE = """
from small_models import small_job
from snugfit.rehearsal.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
tape = rehearse(small_job("modernbert"), Recipe().setup(), CudaPolicy())
print(tape.events, tape.marks)
"""


def told(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "ignore", "-c", TAPE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_tapes_do_not_depend_on_the_hash_seed() -> None:
    """0 and 1 walk ModernBERT's two kinds of layers in different orders."""
    assert told("0") == told("1")


def test_the_models_code_has_its_own_sets_again_afterwards() -> None:
    from transformers.models.modernbert import modeling_modernbert

    with sets_in_order(small_job("modernbert")):
        assert list(modeling_modernbert.set("cab")) == ["a", "b", "c"]
    assert "set" not in vars(modeling_modernbert)


def test_a_sorted_set_is_a_set() -> None:
    assert SortedSet("ab") == {"a", "b"}
    assert SortedSet("ab") - {"a"} == {"b"}
