"""Classes for the values of a script's expressions, which are derived without running the script."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Environment = dict[str, Any]
"""The type of the variables of a module or a function: values by name."""


@dataclass(frozen=True, repr=False)
class Unknown:
    """An expression of a script whose value is known only at run time."""

    text: str
    """Source text of the expression whose value is unknown."""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class OfGpu(Unknown):
    """A condition of a script on the GPU, such as support of bfloat16. It is equal to `holds` on GPUs with
    bfloat16.
    """

    holds: bool = True


@dataclass(frozen=True, repr=False)
class Option(Unknown):
    """A command-line option for which the script has no default."""


@dataclass(frozen=True)
class Name:
    """A name that the script imports from another library."""

    dotted: str
    """Full dotted name, such as `torch.bfloat16`."""

    @property
    def last(self) -> str:
        """The last word of the dotted name."""
        return self.dotted.rpartition(".")[2]


# Without `eq`, two equal calls create two distinct objects.
@dataclass(frozen=True, eq=False, repr=False)
class ForeignCall:
    """A call of another library's function, which is not executed."""

    function: Any
    """The called function: a `Name`, or the `Member` of an object."""
    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    """Keyword arguments. `**values` that cannot be resolved have the key `**`."""
    line: int
    text: str
    """Source text of the call, in one line."""
    unsure: bool = False
    """True if the call is in a branch whose condition is unknown."""
    tests: tuple[str, ...] = ()
    """Unknown conditions of the branches around the call."""

    @property
    def name(self) -> str:
        """Return the last word of the called function's name."""
        return self.function.last if isinstance(self.function, Name) else getattr(self.function, "name", "")

    @property
    def owner(self) -> str:
        """Return the class whose method is called: `AutoModel` of `AutoModel.from_pretrained`."""
        if isinstance(self.function, Name):
            return self.function.dotted.rpartition(".")[0].rpartition(".")[2]
        return ""

    @property
    def of(self) -> Any:
        """Return the object whose method is called; None for a function."""
        return self.function.of if isinstance(self.function, Member) else None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the values of all arguments, positional ones first."""
        return (*self.positional, *self.named.values())

    def argument(self, name: str, position: int = 0) -> Any:
        """Return the argument with this name or position; None without it."""
        return self.named.get(name, [*self.positional[position:], None][0])

    @property
    def library(self) -> str:
        """Return the top-level package of the called function; empty for a method of an object."""
        return self.function.dotted.partition(".")[0] if isinstance(self.function, Name) else ""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False, repr=False)
class Member:
    """An attribute or element of an object whose value is known only at run time."""

    of: Any
    name: str
    """Name of the attribute; `[]` for an element of a container."""

    def __repr__(self) -> str:
        return f"{self.of!r}{self.name if self.name == '[]' else '.' + self.name}"


@dataclass(eq=False)
class Record:
    """An object whose attributes are known: parsed command-line arguments, or an instance of a dataclass."""

    attributes: dict[str, Any] = field(default_factory=dict)
    of_options: bool = False
    """True if the attributes are defaults of the script's command-line options."""
    base: str = ""
    """Library class that the object's class derives from, such as `SFTConfig`; empty for none."""
    own: bool = True
    """True if the script defines the class. A library's class has defaults that are not in the script."""


@dataclass(eq=False)
class Parser:
    """A command-line parser that the script creates, such as `ArgumentParser`."""

    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the parser's options, by attribute of the parsed result."""
    kinds: tuple[Any, ...] = ()
    """Dataclasses whose fields the parser fills from the command line."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function that the user's script defines."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    environment: Environment
    """Variables of the module, and of functions that enclose this one."""


@dataclass(frozen=True, eq=False)
class Class:
    """A class that the user's script defines."""

    node: ast.ClassDef
    bases: tuple[Any, ...]
    environment: Environment

    @property
    def methods(self) -> dict[str, int]:
        """Return the line number of each method of the script's class, by name."""
        return {one.name: one.lineno for one in self.node.body if isinstance(one, ast.FunctionDef)}

    @property
    def library_bases(self) -> list[str]:
        """Return the names of the libraries' base classes, without their modules."""
        return [
            name
            for one in self.bases
            for name in (one.library_bases if isinstance(one, Class) else [getattr(one, "last", "")])
        ]


@dataclass(frozen=True)
class Assignment:
    """An assignment to an attribute or an element of an object in the script."""

    target: Any
    """Object whose attribute or element receives the value."""
    name: str
    """Name of the attribute, or key of the element."""
    value: Any
    line: int
    text: str
    unsure: bool = False
    """True if the assignment is in a branch whose condition is unknown."""
    tests: tuple[str, ...] = ()
    """Unknown conditions of the branches around the assignment."""


def is_known(value: Any) -> bool:
    """Return True if a value of a script consists of literals alone."""
    if isinstance(value, Mapping):
        return all(map(is_known, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_known, value))
    return value is None or isinstance(value, bool | int | float | str)


def replace_names(expression: ast.expr, by: Mapping[str, ast.expr]) -> ast.expr:
    """Return a copy of an expression's syntax tree in which the names in `by` are replaced by other
    expressions.
    """

    class Replace(ast.NodeTransformer):
        """A syntax-tree visitor that replaces names by expressions."""

        def visit_Name(self, node: ast.Name) -> ast.expr:
            """Return the expression that replaces this name, or the name itself."""
            return by.get(node.id, node)

    replaced: ast.expr = Replace().visit(as_read(expression))
    return replaced


def as_read(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression, so that its value can be evaluated."""
    read: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    return read


def first_line(node: ast.AST) -> str:
    """Return a script's statement as one line of text. A compound statement, such as `if`, gives its first
    line.
    """
    return ast.unparse(node).splitlines()[0]
