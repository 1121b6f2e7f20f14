"""Scripts of the lab match the code: each can be imported, and the names that they replace exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from in_roster import imports_deleted

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
    from snugfit.features.loops.custom_loop import run
    from snugfit.features.loops.trainer import step_timer

    assert callable(run.run_predictor)
    assert callable(step_timer.run_predictor)


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("Whether the model has layers.", "riddle first"),
        ("The recorder asks the device for a block.", "code that acts like a person"),
        ("Return the bytes of what is left.", "clause in the place of a noun"),
        (" ".join(["word"] * 27) + ".", "long"),
        ("Return the bytes of the blocks that remain.", ""),
        ("Return `what it asks` as code.", ""),
    ],
)
def test_the_prose_check_finds_sentences_in_each_kind_of_text(
    sentence: str, rule: str, tmp_path: Path
) -> None:
    prose = importlib.import_module("prose")
    texts = {
        "docstring.py": f'"""{sentence}"""\n',
        "comment.py": f"x = 1  # {sentence}\n",
        "message.py": f'x = f"{sentence} The size is {{1}}."\n',
        "page.md": f"# Title\n\n{sentence}\n\n| {sentence} |\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        hits = list(prose.hits_in(tmp_path / name))
        assert [hit.rules for hit in hits] == ([(rule,)] if rule else []), name


def test_a_deleted_feature_is_known_by_its_public_names() -> None:
    """A word that the feature does not define would skip tests of other code."""
    from without_feature import technique_words

    words = technique_words("lengths").split()
    assert {"Lengths", "LengthPlan", "plan_lengths"} < set(words)
    assert not {"dataset", "length_plan", "search"} & set(words)


def test_a_module_with_a_task_of_a_deleted_feature_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNUGFIT_WITHOUT", "image-classification")
    assert imports_deleted("E   AttributeError: IMAGE_CLASSIFICATION")
    assert not imports_deleted("E   AttributeError: CAUSAL_LM")
