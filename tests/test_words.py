"""Texts for users, and names in the code, are in plain English, without private or hard words.

The check of texts covers each literal with a space in it that is no docstring: errors, help, reports, notes.
Docstrings, comments, JSON keys, flags and recipes are not checked. The check of names covers functions,
parameters and local variables. Fields of classes may be keys of JSON, so it leaves them out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from source_trees import FILES, SOURCE, nodes_of, tree_of

PLAINER = {
    r"fores(ee\w*|aw)": "predict",
    r"lawful": "valid",
    r"lack(s|ed|ing)?": "is missing, does not have, is short by",
    r"rehears\w*": "simulate, predict",
    r"beside": "next to, and",
    r"st(ands?|anding|ood)": "is, is in, stays",
    r"told": "said",
    r"anew": "again, from the start",
    r"passed (by|over)": "ignored",
    r"paid once": "start-up",
    r"(go|goes|going|went) on": "continue",
    r"begun": "started",
    r"wish(es|ed)?": "setting",
    r"asked of": "asked from",
    r"one's own": "your own",
    r"hands? on": "pass on",
    r"holds?|held": "has, contains, uses",
    r"doubt(s|ful)?": "uncertain",
    r"(?<!here )is no(?! longer)": "is not a",
    r"is none of": "is not one of",
    r"; it is an?": "; it must be a",
    r"put aside": "renamed",
    r"hears?": "takes",
    r"for want of": "because there is no",
    r"were asked for": "were requested",
    r"asks for a change": "calls for a change",
    r"said nothing": "without a message",
    r"[Ww]hether the GPU": "if the GPU",
    r"[Ww]hat (it waits|was measured|a user|the training loop|the GPUs?)": "a noun",
}

VAGUE_NAMES = {
    "asked": "the object, such as request, arguments or recipe",
    "asks": "depends_on, or the object",
    "said": "message, or settings",
    "says": "message, or note",
    "heard": "the object",
    "told": "the object",
    "what": "message, noun, setting",
    "whats": "the objects",
    "why": "reason",
    "how": "options",
    "dear": "slow, or the quantity",
    "truth": "value",
    "lies_at": "position",
    "unsaid": "unset",
}
"""Names of parameters and local variables that do not describe their values, with better ones."""

SPEECH = re.compile(r"_?(ask|asking|hear|hears|say|judge|know|believe|want|foresee)(_.*)?")
"""Names of functions that act like a person."""

OWN_NAMES = ("adapters", "distributed", "doctor", "exchange", "page", "trackers", "frontends")
"""Folders in which such names are left."""

PUBLIC_NAMES = {"say_written"}
"""Functions that features call by name."""


ANY_DIALECT = re.compile(rf"(?<!\w)({'|'.join(PLAINER)})(?!\w)")


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each literal with a space in it, with `{}` for the fields of an f-string."""
    nodes = nodes_of(tree)
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    left_out |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            texts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, texts))
        elif isinstance(node, ast.Constant) and id(node) not in left_out and " " in str(node.value):
            yield node.lineno, str(node.value)


def dialect_in(texts: Iterator[tuple[int, str]]) -> list[str]:
    """Return a message for each text with a word that is not plain: its line, and a better word."""
    return [
        f"{line}: {text!r}: write {better!r} for {found[0]!r}"
        for line, text in texts
        if ANY_DIALECT.search(text)
        for pattern, better in PLAINER.items()
        if (found := re.search(rf"(?<!\w)({pattern})(?!\w)", text))
    ]


def test_what_a_user_reads_is_plain_english() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{fault}"
        for path in FILES
        for fault in dialect_in(texts_of(tree_of(path)))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("text", ["it lacks weights", "a file {name} is no JSON", "the plan foresees it"])
def test_a_text_of_ours_would_be_found(text: str) -> None:
    assert dialect_in(texts_of(ast.parse(f"raise Fault(f{text!r})")))
    assert not dialect_in(texts_of(ast.parse(f'def name():\n    """{text}"""')))


def vague_names(tree: ast.Module) -> Iterator[str]:
    """Yield each function, parameter and local variable with a vague name: its line, and a better name."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if (
            isinstance(node, ast.FunctionDef)
            and SPEECH.fullmatch(node.name)
            and node.name not in PUBLIC_NAMES
        ):
            yield f"{node.lineno}: name the function {node.name} by a technical verb"
        for part in ast.walk(node):
            name = part.arg if isinstance(part, ast.arg) else ""
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                name = part.id
            if name in VAGUE_NAMES:
                yield f"{part.lineno}: name {name!r} by its value: {VAGUE_NAMES[name]}"


def test_names_describe_their_values() -> None:
    faults = [
        f"{path.relative_to(SOURCE)}:{fault}"
        for path in FILES
        if not {*OWN_NAMES} & set(path.relative_to(SOURCE).parts)
        for fault in dict.fromkeys(vague_names(tree_of(path)))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "code", ["def run(why): ...", "def run():\n    said = 3", "def hear(text): ...", "run = lambda what: 3"]
)
def test_a_vague_name_would_be_found(code: str) -> None:
    assert list(vague_names(ast.parse(code)))
    assert not list(vague_names(ast.parse("def run(reason):\n    message = reason.why")))
