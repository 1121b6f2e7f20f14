"""Architectures of the installed transformers and their heads, without importing it.

A job whose architecture has no such head is refused before a large package is imported. transformers has
tables of these names, but importing them imports torch, which takes two seconds. The tables are literals, so
the source files are parsed and not run. `tests/test_model.py` compares the parsed tables with the imported
ones.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import filterfalse
from pathlib import Path
from typing import Any

from snugfit.errors import ModelError
from snugfit.hub_kernels import only_errors
from snugfit.job.inputs import added_task, added_tasks, objectives

HEADS: Mapping[str, tuple[str, str]] = {
    "sequence-classification": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "token-classification": (
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
}
"""transformers' auto class and table of model types, for each task of the core."""


@cache
def heads() -> Mapping[str, tuple[str, str]]:
    """Return the table of model heads `HEADS`, with the tasks that features add."""
    return {**HEADS, **{task.name: task.head for task in added_tasks()}}


@cache
def model_types() -> frozenset[str]:
    """Return every `model_type` that the installed transformers can configure."""
    files = ("auto_mappings.py", "configuration_auto.py")
    return frozenset().union(*(_table(file, "CONFIG_MAPPING_NAMES") for file in files))


def tasks_of(model_type: str) -> tuple[str, ...]:
    """Return the tasks for which transformers has a head on this architecture."""
    return tuple(task for task in heads() if class_names(task, model_type))


def task_of(model_type: str, architectures: Sequence[str]) -> str | None:
    """Return the task whose head is named in `architectures`, or the only task that the architecture has.

    None if several tasks remain. If tasks share a class, it is the first one in `heads`, but not a
    pretraining objective (BART's).
    """
    possible = tuple(filterfalse(objectives().__contains__, tasks_of(model_type)))
    named = [task for task in possible if class_names(task, model_type).intersection(architectures)]
    # BART's class is for masked and seq2seq language models, and Gemma 3's for text with and without images.
    named.sort(key=lambda task: task == "masked-lm")
    chosen = named[:1] or possible
    return chosen[0] if len(chosen) == 1 else None


def class_of(task: str, config: Any) -> Any:
    """Return the class that transformers builds for a task and a config, without building it."""
    import transformers

    if name := added_task(task).classes.get(config.model_type):
        return getattr(transformers, name)
    # The private table maps a config's class to the model's class without building either.
    with only_errors(once=(task, type(config))):  # the class's module may import torchao
        classes = getattr(transformers, heads()[task][0])._model_mapping[type(config)]
    # Some architectures have several classes for a task; transformers takes the first by default.
    return classes[0] if isinstance(classes, tuple) else classes


def transformers_version() -> str:
    """Return the installed version of transformers, for messages."""
    return version("transformers")


def class_names(task: str, model_type: str) -> frozenset[str]:
    """Return the names of the classes that transformers has for a task on an architecture."""
    named = added_task(task).classes.get(model_type)
    listed = _table("modeling_auto.py", heads()[task][1]).get(model_type, frozenset())
    return listed | {named} if named else listed


@cache
def _table(file: str, name: str) -> Mapping[str, frozenset[str]]:
    """Return transformers' table `name` of auto classes: the names of model classes by model type. The source
    text is parsed.
    """
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    for statement in _syntax_tree(file).body:
        # A table may be assigned and updated by later statements; both are read.
        if name not in _names_in(statement):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.List):
                # Tables are lists of pairs, or dicts in `update` calls.
                pairs += [(pair.elts[0], pair.elts[1]) for pair in node.elts if isinstance(pair, ast.Tuple)]
            elif isinstance(node, ast.Dict):
                pairs += zip(node.keys, node.values, strict=True)
    table = {key: names for node, value in pairs for key in _texts(node) if (names := _texts(value))}
    if not table:
        raise ModelError(
            f"transformers {transformers_version()} has no table {name} in {file}. Try another version "
            "of transformers."
        )
    return table


def _texts(node: ast.expr | None) -> frozenset[str]:
    """Return the strings in a literal of Python source: one string, or a tuple of strings."""
    constants = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)] if node else []
    return frozenset(text for text in constants if isinstance(text, str))


def _names_in(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement of Python source assigns, or whose methods it calls."""
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return {function.value.id}
    return set()


@cache
def _syntax_tree(file: str) -> ast.Module:
    return ast.parse(source(f"models/auto/{file}"))


def source(file: str) -> str:
    """Return the text of a source file of the installed transformers, without an import. Raises `ModelError`
    if it is not installed.
    """
    spec = find_spec("transformers")
    # The package's file is found without importing the package.
    if spec is None or spec.origin is None:
        raise ModelError("transformers is not installed. Try: pip install snugfit")
    return (Path(spec.origin).parent / file).read_text(encoding="utf-8")
