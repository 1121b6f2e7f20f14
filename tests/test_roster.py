"""Law 6 for techniques: each file in a slot's folder follows the roster's rules, and a broken file raises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from snugfit.errors import RecipeError
from snugfit.techniques import roster
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique

PROMISED = """
    full sdpa eager fp32 bf16 fp16 bf16_pure ieee tf32 keep_all every_layer every_nth_layer segments
    whole_batch micro_batches adamw adamw_fused adamw_loop sgd
    default expandable inline workers
"""


def test_every_promised_technique_is_found() -> None:
    assert {technique.name for technique in roster.techniques()} >= set(PROMISED.split())


def test_listing_goes_by_slot_and_plain_comes_first() -> None:
    found = roster.techniques()
    slots = [technique.slot for technique in found]
    assert slots == sorted(slots, key=list(Slot).index)
    assert [technique.name for technique in found if technique.plain] == [
        roster.plain(slot).name for slot in Slot
    ]


@pytest.mark.parametrize("technique", roster.techniques(), ids=lambda technique: technique.name)
def test_technique_keeps_the_rules(technique: type[Technique]) -> None:
    roster.check(technique, slot=technique.slot)
    assert roster.find(technique.name) is technique
    for line in roster.setting_lines(technique):
        assert line.sentence
        assert line.kind


@pytest.mark.parametrize("technique", roster.techniques(), ids=lambda technique: technique.name)
def test_names_elsewhere_lead_here_and_clash_with_nothing(technique: type[Technique]) -> None:
    names = {other.name for other in roster.techniques()}
    for word in technique.elsewhere:
        assert word not in names
        assert roster.find(word) is technique


@pytest.mark.whole
def test_listing_imports_neither_torch_nor_a_technique_s_package() -> None:
    code = (
        "import sys; from snugfit.techniques import roster; roster.techniques();"
        "heavy = {'torch', 'transformers', 'peft', 'bitsandbytes', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("adamw_fuse", "'adamw_fused'"),
        ("BF61", "'bf16'"),
        ("gradient_checkpoint", "'gradient_checkpointing'"),
        ("ligre", "'liger'"),
        ("evaluation_strategy", "eval_strategy"),
        ("no_cuda", "device: cpu"),
        ("lr", "part of the job"),
        ("batch_size", "micro_batches"),
        ("max_seq_length", "sequence_length"),
        ("qqqqq", "snugfit techniques lists all"),
    ],
)
def test_unknown_word_is_answered_with_what_to_write(word: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=hint):
        roster.find(word)


@dataclass(frozen=True, kw_only=True)
class Sound(Technique):
    """A valid technique without effect."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "this file"
    slot: ClassVar = Slot.LOADING
    name: ClassVar = "sound"

    k: int = between(1, 9, default=3)
    """The number of repetitions."""

    def install(self, setup: Setup) -> Setup:
        return setup


def _broken(**changes: object) -> type[Technique]:
    return type("Broken", (Sound,), {"__module__": __name__, "__doc__": Sound.__doc__, **changes})


@dataclass(frozen=True, kw_only=True)
class Silent(Technique):
    """A technique with an undocumented setting."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "this file"
    name: ClassVar = "silent"

    k: int = 3

    def install(self, setup: Setup) -> Setup:
        return setup


@pytest.mark.parametrize(
    ("technique", "complaint"),
    [
        (_broken(__doc__=None), "needs a docstring"),
        (_broken(__doc__="no full stop"), "full stop"),
        (_broken(fidelity="same-ish"), "fidelity"),
        (_broken(source=" "), "source"),
        (_broken(install=Technique.install), "`value`"),
        (_broken(name="So und"), "small letters"),
        (_broken(needs=("nothing>=1",)), "extra"),
        (Silent, "missing: \\['k'\\]"),
    ],
)
def test_broken_technique_is_refused_to_its_author(technique: type[Technique], complaint: str) -> None:
    with pytest.raises(roster.RosterError, match=complaint):
        roster.check(technique, slot=Slot.LOADING)


def test_a_technique_needs_a_slot_that_exists() -> None:
    with pytest.raises(roster.RosterError, match="slots:"):
        roster.check(Sound, slot=None)
