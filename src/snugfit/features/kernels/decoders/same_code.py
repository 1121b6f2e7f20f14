"""Classes of transformers whose code is that of a class which snugfit's kernels replace.

transformers generates the file of a new model from older models, so most of its classes are copies under
another name. A comparison of code finds all copies, in each version of transformers. Nothing is imported or
run for it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

PARTS = ("Attention", "MLP", "DecoderLayer", "RMSNorm", "Experts")
"""Ends of the class names that are compared."""

_PREFIX = "transformers.models."

_PASSED = frozenset({"eager_attention_forward"})
"""Functions that a class only passes on. snugfit's code calls those of the same file."""


def same_as(kind: type, part: str, references: Iterable[str]) -> str | None:
    """Return the first reference whose code is that of a module class; None if there is none.

    `part` is the end of the class's name, and a reference is `file.Class`, such as `llama.LlamaMLP`. A class
    outside of transformers is equal to none, as it may override more than its forward pass.
    """
    if not (kind.__module__.startswith(_PREFIX) and kind.__name__.endswith(part)):
        return None
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return None if file is None else _match(codes_of(file).get(kind.__name__), references)


def parts_of(model_type: str, references: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """Return the parts of a model type's file that have a class with the code of a reference of that part.

    `Experts` is one of them if the file has experts at all.
    """
    parts = set()
    for name, code in codes_of(_file_of(model_type)).items():
        part = next(part for part in PARTS if name.endswith(part))
        if part == "Experts" or _match(code, references.get(part, ())):
            parts.add(part)
    return frozenset(parts)


def has_copy(model_type: str, part: str, references: Iterable[str]) -> bool:
    """Return True if a model type's file has a class with this end of its name and a reference's code."""
    codes = codes_of(_file_of(model_type)).items()
    return any(name.endswith(part) and _match(code, references) for name, code in codes)


def _match(code: str | None, references: Iterable[str]) -> str | None:
    if code is None:
        return None
    return next((one for one in references if _code_of(one) == code), None)


def _code_of(reference: str) -> str | None:
    """Return the code of a class `file.Class`; None if this version of transformers has no such class."""
    file, _, name = reference.partition(".")
    return codes_of(_file_of(file)).get(name)


def _file_of(model_type: str) -> str:
    """Return the path of a model type's file in the installed transformers, which need not exist."""
    spec = find_spec("transformers")
    folder = Path(*(spec.submodule_search_locations or [])[:1] if spec else [], "models")
    # A model of text within another model is in the file of that model.
    names = [model_type, model_type.removesuffix("_text")]
    paths = [folder / name / f"modeling_{name}.py" for name in names]
    return str(next((path for path in paths if path.exists()), paths[0]))


@functools.cache
def codes_of(file: str) -> Mapping[str, str]:
    """Return the code of the forward pass of each class in a file, by class name.

    The code includes the functions and methods of the file that it calls, without annotations, decorators and
    docstrings. An unreadable file has no classes.
    """
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    functions = {one.name: one for one in body if isinstance(one, ast.FunctionDef)}
    codes = {}
    for one in body:
        if isinstance(one, ast.ClassDef) and one.name.endswith(PARTS):
            methods = {part.name: part for part in one.body if isinstance(part, ast.FunctionDef)}
            # A class that inherits its forward pass is equal to none.
            if "forward" in methods:
                codes[one.name] = _code("forward", methods, functions)
    return codes


def _code(name: str, methods: Mapping[str, ast.FunctionDef], functions: Mapping[str, ast.FunctionDef]) -> str:
    """Return the code of a method, and of the methods and functions that it calls."""
    left, visited, codes = [("self", name)], set(), []
    while left:
        owner, name = entry = left.pop()
        function = (methods if owner else functions).get(name)
        if function is None or entry in visited:
            continue
        visited.add(entry)
        codes.append(ast.unparse(_Bare().visit(function)))
        called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        left += [("", one.id) for one in called if isinstance(one, ast.Name) and one.id not in _PASSED]
        left += [
            ("self", one.attr)
            for one in called
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
        ]
    return "\n".join(codes)


class _Bare(ast.NodeTransformer):
    """Remover of annotations, decorators and docstrings, which change no result."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns, node.decorator_list = None, []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node
