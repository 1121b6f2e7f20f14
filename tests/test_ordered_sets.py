"""A rehearsal is the same in every process, under every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.rehearsal import rehearse as rehearsing
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import SortedSet, rehearse, sets_in_order
from snugfit.techniques.recipe import Recipe

KINDS = {"full_attention", "sliding_attention"}
"""Attention kinds of ModernBERT's layers. Hash seed 0 iterates them in this order, seed 1 in the other."""


def account() -> str:
    trace = rehearse(small_job("modernbert"), Recipe().setup(), CudaPolicy())
    return f"{trace.events} {trace.marks}"


class BackwardsSet(SortedSet):
    """A set that iterates from its last item to its first."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), reverse=True))


def test_a_trace_follows_the_order_of_its_own_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace therefore does not depend on the order of a hash seed."""
    in_order = account()
    monkeypatch.setattr(rehearsing, "SortedSet", BackwardsSet)
    assert account() != in_order


@pytest.mark.slow
def test_traces_do_not_depend_on_the_hash_seed() -> None:
    """Compare this process with one that iterates the kinds in the other order."""
    first, *_ = KINDS
    other = "1" if first == "full_attention" else "0"
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": folders}
    code = "import test_ordered_sets as there; print(*there.KINDS); print(there.account())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kinds, trace = ran.stdout.splitlines()
    assert kinds.split()[1] == first, "this seed walks them in the same order"
    assert trace == account()


def test_the_models_code_has_its_own_sets_again_afterwards() -> None:
    from transformers.models.modernbert import modeling_modernbert

    with sets_in_order(small_job("modernbert")):
        assert list(modeling_modernbert.set("cab")) == ["a", "b", "c"]
    assert "set" not in vars(modeling_modernbert)


def test_a_sorted_set_is_a_set() -> None:
    assert SortedSet("ab") == {"a", "b"}
    assert SortedSet("ab") - {"a"} == {"b"}
