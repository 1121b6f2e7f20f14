"""Law 6: `docs/techniques.md` and `docs/json.md` equal the generated text.

The keys of each answer are exactly those of the reference. The answers in README and docs equal the
commands' output.
"""

from __future__ import annotations

import importlib
import json
import shlex
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import snugfit
from kept import REST
from made_up import measurement, timing
from small_models import small_job
from snugfit.cli.main import run
from snugfit.planning.fleet.cards import document_of_cards
from snugfit.planning.fleet.prices import Prices, document
from snugfit.results.measurement import GpuClock, RankMeasured
from test_cards import cards
from test_gpus_command import made_up as plans_for_gpus
from test_lengths_command import made_up as of_lengths
from test_several_gpus_plan import made_up as several_gpus

pytestmark = pytest.mark.stored_rehearsals

ROOT = Path(__file__).parents[1]


@pytest.fixture
def written() -> Any:
    return importlib.import_module("write_docs")


def test_the_pages_are_those_of_the_code(written: Any) -> None:
    how = "run: python lab/write_docs.py"
    assert (ROOT / "docs/techniques.md").read_text() == written.techniques_page(), how
    assert (ROOT / "docs/json.md").read_text() == written.json_page(), how


def test_every_key_has_its_sentence(written: Any) -> None:
    silent = [
        f"{owner.__name__}.{name}"
        for owner in written.objects(written.documents().values())
        for name, (_, sentence) in written.keys(owner).items()
        if not sentence
    ]
    assert silent == []


def test_every_technique_of_the_roster_is_on_the_page(written: Any) -> None:
    page = written.techniques_page()
    for technique in written.techniques():
        assert page.count(f"| `{technique.name}`") == 1


SOMETIMES = {("Plan", "lengths"), ("Model", "dtype"), ("GpuPlans", "run"), ("Way", "fits")}
"""Keys that some objects lack: those of an option, or of a model with a declared dtype."""


def walk(written: Any, kind: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (object, key) of every object within a value of this type, and fail on a key that the
    reference lacks."""
    inner, owner = written.parts(kind), written.described_class(kind)
    if value is None or owner is None:
        return
    if typing.get_origin(kind) is tuple:
        for one in value:
            yield from walk(written, inner[0], one)
    elif typing.get_origin(kind) is Mapping:
        for one in value.values():
            yield from walk(written, inner[1], one)
    elif inner:
        yield from walk(written, inner[0], value)
    else:
        known = written.keys(owner)
        assert set(value) <= set(known), f"{owner.__name__}: not in docs/json.md: {set(value) - set(known)}"
        absent = {(owner.__name__, name) for name in set(known) - set(value)}
        assert absent <= SOMETIMES, f"in docs/json.md, and not in the answer: {absent}"
        for name, one in value.items():
            yield owner.__name__, name
            yield from walk(written, known[name][0], one)


def answers() -> Iterator[tuple[str, Any]]:
    """Yield answers about a tiny model, with made-up objects in place of answers that take a process or a
    minute."""
    job = small_job("gpt2", 2, facts={"dtype": "bfloat16"})
    predicted = snugfit.predict(job, "plain", gpu="h200")
    measured = measurement(timing=timing(), startup=predicted.startup, job=job, recipe=predicted.recipe)
    yield "predict --json", predicted
    stages = small_job("llama", 2, batch_size=4)
    yield "predict --json", snugfit.predict(stages, "pipeline(2) + micro_batches(2)", gpu="h200", gpus=2)
    yield "predict --compare --json", snugfit.compare(job, ["plain"], gpu="h200")
    ranks = (RankMeasured(rank=0, gpu_index=0, uuid=None, footprint=measured.footprint, step_seconds=0.1),)
    clock = GpuClock(mean_mhz=1700.4, lowest_mhz=1590, highest_mhz=1980, readings=40, reasons={"power": 0.9})
    yield "measure --json", replace(measured, ranks=ranks, clock=clock)
    yield "measure --predict --json", snugfit.compare(predicted, measured)
    kept = f"full + sdpa + as_loaded + keep_all + whole_batch + adamw + {REST}"
    how: dict[str, Any] = {"gpu": "h200", "keep": kept, "workers": 1, "fresh": True}
    planned = snugfit.plan(job, free=("loading", "allocator"), start="expandable", ranked=1, **how)
    yield "plan --json", planned.to_json() | {"lengths": of_lengths().to_json()}
    kept += " + default + inline"
    yield "plan --json", snugfit.plan(job, memory_bytes=1 << 20, **how | {"keep": kept})
    plans, prices = plans_for_gpus(), Prices({"H200-SXM": 2.5})
    kept_slots = tuple(planned.kept)
    plans = replace(plans, kept=kept_slots, counts=(planned.counts,))
    yield "gpus --for MODEL --json", plans.to_json() | {"run": document(plans, prices)}
    yield "gpus --for MODEL --gpus N --json", cards_with_everything(kept_slots, planned.refused)
    several = several_gpus()
    yield (
        "plan --gpus N --json",
        replace(
            several,
            alternatives=several.answers,
            kept_slots=kept_slots,
            refused=planned.refused,
            doubts=("one",),
        ),
    )
    yield "gpus --json", {"schema": 1, "what": "gpus", "gpus": [gpu.to_json() for gpu in snugfit.all_gpus()]}
    yield "lengths --json", of_lengths()


def cards_with_everything(kept_slots: Any, refused: Any) -> dict[str, Any]:
    """Return plans by number of GPUs in which no list is empty."""
    plans = replace(cards(), kept_slots=kept_slots, refused=refused, steps=10)
    return plans.to_json() | {"run": document_of_cards(plans, Prices({"H200-SXM": 2.5}))}


@pytest.mark.whole
def test_answers_have_the_keys_of_the_reference(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hold_to_reference(written, written.DOCUMENTS, answers())


def hold_to_reference(
    written: Any, documents: Mapping[str, type], printed: Iterable[tuple[str, Any]]
) -> None:
    """Assert that printed answers have only the keys of `docs/json.md`, and that together they have all of
    them."""
    seen: set[tuple[str, str]] = set()
    for command, answer in printed:
        text = json.dumps(answer if isinstance(answer, dict) else answer.to_json(), allow_nan=False)
        seen |= set(walk(written, documents[command], json.loads(text)))
    known = {
        (owner.__name__, name)
        for owner in written.objects(documents.values())
        for name in written.keys(owner)
    }
    assert known - seen == set(), "in docs/json.md, and in no answer"


INSTALLED = {name: version(name) for name in ("torch", "transformers")}
TESTED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def refuse_other_versions() -> None:
    """Skip the test under package versions other than those of `constraints.txt`, whose figures the pages
    show."""
    if any(version.partition("+")[0] != TESTED[name] for name, version in INSTALLED.items()):
        pytest.skip(f"the answers in the documentation are those of other versions than {INSTALLED}")


def test_a_shown_answer_is_the_command_s_own(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_other_versions()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [(command, text)] = [one for one in written.shown_answers().items() if "bert-large" in one[0]]
    assert run(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert written.as_shown(capsys.readouterr().out, text) == text, "run: python lab/write_docs.py answers"


@pytest.mark.slow
def test_the_shown_answers_are_the_commands_own(written: Any) -> None:
    refuse_other_versions()
    assert written.shown_answers()
    for command, text in written.shown_answers().items():
        assert written.answer(command, text) == text, "run: python lab/write_docs.py answers"
