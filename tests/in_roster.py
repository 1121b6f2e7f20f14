"""Skip tests and recorded runs that need a technique of a deleted feature."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from snugfit.job.architectures import heads
from snugfit.job.job import Phase
from snugfit.techniques import roster


def missing_techniques(recipe: str) -> list[str]:
    """Return the words of this recipe that are not techniques in the roster."""
    known = {name for one in roster.techniques() for name in (one.name, *one.elsewhere)} | {"plain"}
    words = [text.partition("(")[0].strip() for text in recipe.split("+")]
    return [word for word in words if word not in known]


def are_in_roster(recipe: str) -> bool:
    """Return whether the recipe of a recorded run can still be read."""
    return not missing_techniques(recipe)


def can_be_read(run: Mapping[str, Any]) -> bool:
    """Return whether job and recipe of a recorded run can still be read."""
    job = run["job"]
    is_known = job["task"] in (*heads(), "custom") and job.get("phase", "train") in [*Phase]
    return is_known and are_in_roster(run["recipe"])


def needs_techniques(recipe: str, *, allow_module_level: bool = False) -> None:
    """Skip the running test, or the module, without the feature of a technique of this recipe."""
    if missing := missing_techniques(recipe):
        reason = f"the feature with {', '.join(missing)} is not there"
        pytest.skip(reason, allow_module_level=allow_module_level)


def needs_task(task: str) -> None:
    """Skip the running test, or the module, where the feature with this task is not there."""
    if task not in heads():
        pytest.skip(f"the feature with {task} is not there", allow_module_level=True)


def imports_deleted(error: str) -> str:
    """Return the reason to skip a module that imports a deleted feature, or has a name or a task of it; else
    ""."""
    for word in os.environ.get("SNUGFIT_WITHOUT", "").split():
        task = word.replace("-", "_").upper()
        gone = (f"No module named '{word}", f"cannot import name '{word}' from 'snugfit'")
        if any(one in error for one in gone) or f"AttributeError: {task}\n" in f"{error}\n":
            return f"the feature with {word} is not there"
    return ""


def _with_imported(path: Path) -> str:
    """Return the text of a test's file, and of the files of tests from which it imports."""
    text = path.read_text(encoding="utf-8")
    modules = [sys.modules.get(name) for name in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
    files = [Path(file) for module in modules if (file := getattr(module, "__file__", None))]
    return text + "".join(file.read_text(encoding="utf-8") for file in files if "tests" in file.parts)


def lacks_feature(item: pytest.Item, error: BaseException) -> str:
    """Return the reason to skip a failed test of a technique or task whose feature is deleted; else "".

    The test must name it or need the task. If only the core names it, the test fails. The name may be in
    another file of tests, from which the test's file imports.
    """
    words = os.environ.get("SNUGFIT_WITHOUT", "").split()
    if not words or not isinstance(item, pytest.Function):
        return ""
    file = _with_imported(item.path)
    own = inspect.getsource(item.function) + str(getattr(item, "callspec", None) and item.callspec.params)
    for word in words:
        is_unknown = f"Unknown technique '{word}'" in str(error) and word in file
        is_unknown |= any(f"Unknown {kind} '{word}'" in str(error) for kind in ("task", "phase"))
        if is_unknown or re.search(rf"(?<!\w){re.escape(word)}\b", own):
            return f"the feature with {word} is not there"
    return ""
