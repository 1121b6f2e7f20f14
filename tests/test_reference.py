"""Law 6: `docs/techniques.md`, `docs/accuracy.md` and `dev/accuracy.md` equal the generated text.

The answers in README and docs equal the commands' output.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from json_schema_faults import faults
from snugfit.cli.main import run

pytestmark = pytest.mark.stored_rehearsals

ROOT = Path(__file__).parents[1]


@pytest.fixture
def written() -> Any:
    return importlib.import_module("write_docs")


def test_the_pages_are_those_of_the_code(written: Any) -> None:
    how = "run: python lab/write_docs.py"
    assert (ROOT / "docs/techniques.md").read_text() == written.techniques_page(), how
    for path, text in written.accuracy_table.pages().items():
        assert (ROOT / path).read_text() == text, how


def test_every_technique_of_the_roster_is_on_the_page(written: Any) -> None:
    page = written.techniques_page()
    for technique in written.techniques():
        assert len(re.findall(rf"^\| `{technique.name}`( \(default\))?:", page, re.MULTILINE)) == 1


def hold_to_schema(calls: Mapping[str, type], printed: Iterable[tuple[str, Any]]) -> None:
    """Assert that printed answers are valid against the schema, and that together they have all of its keys.
    Without the feature `schema`, skip the test.
    """
    json_schema = pytest.importorskip("snugfit.features.schema.json_schema")
    schema_of = json_schema.schema_of
    seen: set[tuple[str, str]] = set()
    schemas = {call.split()[0]: schema_of(call.split()[0]) for call in calls}
    for call, answer in printed:
        text = json.dumps(answer if isinstance(answer, dict) else answer.to_json(), allow_nan=False)
        found = faults(schemas[call.split()[0]], json.loads(text), seen)
        assert found == [], f"{call}: {found[:5]}"
    known = {
        (json_schema.title(owner), name)
        for owner in json_schema.objects(calls.values())
        for name in json_schema.keys(owner)
    }
    assert known - seen == set(), "in the schema, and in no answer"


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
    [(command, text)] = [one for one in written.shown_answers() if "bert-large" in one[0]]
    assert run(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert written.as_shown(capsys.readouterr().out, text) == text, "run: python lab/write_docs.py answers"


@pytest.mark.slow
def test_the_shown_answers_are_the_commands_own(written: Any) -> None:
    refuse_other_versions()
    assert written.shown_answers()
    for command, text in written.shown_answers():
        assert written.answer(command, text) == text, "run: python lab/write_docs.py answers"
