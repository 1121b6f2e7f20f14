"""Symbolic evaluation of a script's statements in order, without executing anything.

A variable has the value of its last assignment. Functions of the script are evaluated at their calls. If a
condition is known, only its branch is evaluated. Otherwise both are, and variables that they set differently
become unknown. Loops are evaluated once. Command-line arguments have their defaults. Every call of a
library's function is recorded with its arguments.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snugfit.features.exchange.python.values import (
    Assignment,
    Class,
    Environment,
    ForeignCall,
    Function,
    Member,
    Name,
    OfGpu,
    Option,
    Parser,
    Record,
    Unknown,
    as_read,
    first_line,
    is_known,
    replace_names,
)

MOST_STATEMENTS = 200_000
"""Largest number of evaluated statements of one script. Generated code may call functions without end."""

DEEPEST = 12
"""Largest depth of nested calls of functions that the script defines."""

LARGEST = 10**15
"""Largest number, and longest text in characters, that arithmetic in a script may produce."""

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip

_BUILTINS: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "max": max, "min": min, "abs": abs,
    "round": round, "list": list, "tuple": tuple,
}  # fmt: skip

_TEXT_METHODS = ("split", "strip", "lower", "upper", "removeprefix", "removesuffix", "startswith", "endswith")
"""String methods that are evaluated if the string is known."""

USUAL_NAMES = ("model", "trainer", "optimizer", "tokenizer")
"""Variable names that are assumed to mean a model, trainer and the like. This applies to function parameters
and to script excerpts that do not create the object.
"""

_OF_GPU = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
"""Functions of torch, unsloth and transformers that return True on a GPU with bfloat16."""

PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
"""Classes that parse the command line into dataclasses."""


_NAMES_A_MODEL = re.compile(r"model.*(?:name|path|id)|^model$")

CHOSEN = "[if "
"""Prefix of the name of a value that represents some elements of an object, selected by a condition."""


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _BlockEnds(Exception):
    """Exception that ends the evaluation of a block in the user's script, as by `return` or `break`."""


@dataclass
class Evaluation:
    """The relevant statements of a user's training script: library calls and assignments, in order of
    execution.
    """

    calls: list[ForeignCall] = field(default_factory=list)
    """Recorded calls of functions of other libraries, and of methods of objects."""
    assignments: list[Assignment] = field(default_factory=list)
    """Recorded assignments to attributes and elements of objects."""
    globals: Environment = field(default_factory=dict)
    """Values of the module's global variables at the end of the script."""
    events: list[ForeignCall | Assignment] = field(default_factory=list)
    """Recorded calls and assignments, in the order of their execution."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Used defaults of command-line options and environment variables, by `--option` or `$VARIABLE`."""
    divisions: list[tuple[Member, int]] = field(default_factory=list)
    """Recorded divisions of an object's attribute by a number, such as of a loss by the accumulation steps.
    """


def evaluate(tree: ast.Module, *, bfloat16: bool | None = None) -> Evaluation:
    """Evaluate a user's training script symbolically. Return its library calls and assignments in order.

    `bfloat16` is True if the GPU supports it; None if no GPU is named.
    """
    evaluator = _Evaluator(bfloat16)
    # Code below `if __name__ == "__main__"` runs too.
    names: Environment = {"__name__": "__main__"}
    for statement in tree.body:  # a script that exits early is read to its end
        with contextlib.suppress(_Return):
            evaluator.quiet_block([statement], names)
    evaluator.run_uncalled()
    evaluator.done.globals = names
    return evaluator.done


class _Evaluator:
    def __init__(self, bfloat16: bool | None) -> None:
        self.bfloat16 = bfloat16
        self.done = Evaluation()
        self.functions: list[Function] = []
        self.called: set[ast.AST] = set()
        self.depth = 0
        self.unsure = 0
        self.tests: list[str] = []
        self.statements = 0

    # ---- statements ----------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], names: Environment) -> None:
        for statement in body:
            self.statements += 1
            if self.statements > MOST_STATEMENTS:
                raise _BlockEnds
            # Statements without a handler may still contain calls to record.
            getattr(self, f"run_{type(statement).__name__}", self.inner_values)(statement, names)

    def quiet_block(self, body: Sequence[ast.stmt], names: Environment) -> bool:
        """Evaluate a block of the script's statements, and return False if it ends early, as by `return` or
        `break`.
        """
        try:
            self.block(body, names)
        except _BlockEnds:
            return False
        return True

    def run_uncalled(self) -> None:
        """Evaluate the script's functions without a visible call, such as those passed to `map`. Callers come
        before their callees.
        """
        used = {
            node.id
            for function in self.functions
            for node in ast.walk(function.node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        first = [one for one in self.functions if getattr(one.node, "name", "") not in used]
        # Functions that only call each other are only in the second list.
        for function in [*first, *self.functions]:
            if function.node not in self.called:
                self.call_own(function, (), {})

    def run_Import(self, node: ast.Import, names: Environment) -> None:
        for one in node.names:
            top = one.name.partition(".")[0]
            # `import a.b` binds `a`, while `import a.b as c` binds `a.b`.
            names[one.asname or top] = Name(one.name if one.asname else top)

    def run_ImportFrom(self, node: ast.ImportFrom, names: Environment) -> None:
        for one in node.names:
            names[one.asname or one.name] = Name(f"{node.module or ''}.{one.name}")

    def run_FunctionDef(self, node: ast.FunctionDef, names: Environment) -> None:
        function = Function(node, names)
        names[node.name] = function
        self.functions.append(function)

    run_AsyncFunctionDef = run_FunctionDef

    def run_ClassDef(self, node: ast.ClassDef, names: Environment) -> None:
        script_class = Class(node, tuple(self.value(base, names) for base in node.bases), names)
        names[node.name] = script_class
        for one in node.body:
            if isinstance(one, ast.FunctionDef):
                # Libraries call methods, so methods run like functions that the script never calls.
                self.functions.append(Function(one, names))

    def run_Assign(self, node: ast.Assign, names: Environment) -> None:
        value = self.value(node.value, names)
        for target in node.targets:
            self.assign(target, value, names, node)

    def run_AnnAssign(self, node: ast.AnnAssign, names: Environment) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value, names), names, node)

    def run_AugAssign(self, node: ast.AugAssign, names: Environment) -> None:
        value = self.value(ast.BinOp(as_read(node.target), node.op, node.value), names)
        self.assign(node.target, value, names, node)

    def run_Expr(self, node: ast.Expr, names: Environment) -> None:
        self.value(node.value, names)

    def run_Return(self, node: ast.Return, names: Environment) -> None:
        raise _Return(self.value(node.value, names) if node.value else None)

    def run_Raise(self, node: ast.Raise, names: Environment) -> None:
        if self.unsure:  # elsewhere the script rejects options that the command line still sets
            raise _BlockEnds

    def run_If(self, node: ast.If, names: Environment) -> None:
        test = self.value(node.test, names)
        if is_known(test):
            self.block(node.body if test else node.orelse, names)
            return
        text = ast.unparse(_with_literals(node.test, names))
        self.unsure += 1
        try:
            self.branches({text: node.body, f"not ({text})": node.orelse}, names)
        finally:
            self.unsure -= 1
        # After a conditional `continue`, the following statements run only for some elements.
        if any(isinstance(one, ast.Continue | ast.Break) for one in [*node.body, *node.orelse]):
            is_plain = isinstance(node.body[0], ast.Continue) and not node.orelse
            self.tests.append(f"not ({text})" if is_plain else "the rest of the loop")

    def branches(self, bodies: Mapping[str, Sequence[ast.stmt]], names: Environment) -> None:
        """Evaluate each branch of an `if` or similar statement, starting from the same variables. A variable
        that the branches set differently becomes unknown.
        """
        before = dict(names)
        ends: list[Environment] = []
        for test, body in bodies.items():
            copy, around = dict(before), len(self.tests)
            self.tests.append(test)
            try:
                if self.quiet_block(body, copy):
                    ends.append(copy)
            except _Return as returned:
                if is_known(returned.value) or returned.value is None:
                    continue  # one case returns early
                raise
            finally:
                del self.tests[around:]
        # If no branch reaches its end, variables keep the values from before.
        for end in ends[:1] or [before]:
            names.update(end)
        for name in {name for end in ends[1:] for name in end}:
            values = [end[name] for end in ends if name in end]
            if any(not _same(value, values[0]) for value in values):
                names[name] = _one_of(name, values)
            else:
                names[name] = values[0]

    def run_For(self, node: ast.For, names: Environment) -> None:
        # The condition of a `continue` ends with the loop.
        around = len(self.tests)
        self.loop(node, names)
        del self.tests[around:]

    def loop(self, node: ast.For, names: Environment) -> None:
        items = self.value(node.iter, names)
        if isinstance(items, list | tuple) and len(items) == 1:
            item = items[0]
        else:
            item = Member(items, "[]") if not is_known(items) else Unknown(ast.unparse(node.target))
            # Elements of a list, such as a model's parts, are frozen or cast one by one.
            if isinstance(items, list | tuple) and items and not any(map(is_known, items)):
                for one in items:
                    self.assign(node.target, one, names, node)
                    self.quiet_block(node.body, names)
                return
        self.assign(node.target, item, names, node)
        self.quiet_block(node.body, names)
        self.quiet_block(node.orelse, names)

    run_AsyncFor = run_For

    def run_While(self, node: ast.While, names: Environment) -> None:
        self.value(node.test, names)
        self.quiet_block(node.body, names)

    def run_With(self, node: ast.With, names: Environment) -> None:
        for item in node.items:
            value = self.value(item.context_expr, names)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, names, node)
        self.block(node.body, names)

    run_AsyncWith = run_With

    def run_Try(self, node: ast.Try, names: Environment) -> None:
        if self.quiet_block(node.body, names):
            self.block(node.orelse, names)
        else:
            # The raised exception is unknown, so every handler is read.
            for handler in node.handlers:
                self.quiet_block(handler.body, names)
        self.block(node.finalbody, names)

    def assign(self, target: ast.expr, value: Any, names: Environment, node: ast.stmt) -> None:
        """Assign a value to a variable, attribute or element of the script, or to several of them."""
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for number, one in enumerate(target.elts):
                if isinstance(value, list | tuple) and len(value) == len(target.elts):
                    self.assign(one, value[number], names, node)
                else:
                    self.assign(one, Member(value, f"[{number}]"), names, node)
        elif isinstance(target, ast.Attribute):
            of = self.value(target.value, names)
            if isinstance(of, Record):
                of.attributes[target.attr] = value
                return
            self.set(of, target.attr, value, node)
        elif isinstance(target, ast.Subscript):
            of, key = self.value(target.value, names), self.value(target.slice, names)
            if isinstance(of, dict) and isinstance(key, str):
                of[key] = value
                return
            self.set(of, str(key), value, node)

    def run_Delete(self, node: ast.Delete, names: Environment) -> None:
        """Record the deletion of an attribute or element as an assignment of an unknown value."""
        for target in node.targets:
            of = self.value(target.value, names) if isinstance(target, ast.Subscript) else None
            if isinstance(of, dict):
                of.pop(str(self.value(target.slice, names)), None)  # type: ignore[attr-defined]
            elif isinstance(target, ast.Subscript | ast.Attribute):
                self.assign(target, Unknown("deleted"), names, node)

    def conditions(self) -> tuple[bool, tuple[str, ...]]:
        return self.unsure > 0, tuple(self.tests)

    def set(self, of: Any, name: str, value: Any, node: ast.stmt | ast.expr) -> None:
        """Record an assignment to an attribute or element of an object."""
        assignment = Assignment(of, name, value, node.lineno, first_line(node), *self.conditions())
        self.done.assignments.append(assignment)
        self.done.events.append(assignment)

    # ---- expressions ---------------------------------------------------------------------------------------

    def value(self, node: ast.expr, names: Environment) -> Any:
        """Return the value of an expression in the script, and record the calls in it."""
        method = getattr(self, f"value_of_{type(node).__name__}", self.inner_values)
        value = method(node, names)
        return Unknown(ast.unparse(node)) if value is _NOT_KNOWN else value

    def inner_values(self, node: ast.AST, names: Environment) -> Any:
        """Record the calls within a statement or an expression that has no handler of its own."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, names)
        return _NOT_KNOWN

    def value_of_Constant(self, node: ast.Constant, names: Environment) -> Any:
        return node.value if is_known(node.value) else _NOT_KNOWN

    def value_of_Name(self, node: ast.Name, names: Environment) -> Any:
        if node.id in names:
            return names[node.id]
        return Unknown(node.id) if node.id in USUAL_NAMES else Name(node.id)

    def value_of_Attribute(self, node: ast.Attribute, names: Environment) -> Any:
        of = self.value(node.value, names)
        if isinstance(of, Name):
            return Name(f"{of.dotted}.{node.attr}")
        if isinstance(of, Record):
            kind = Option if of.of_options else Unknown
            value = of.attributes.get(node.attr, kind(ast.unparse(node)))
            # The user names the model of a run, so the default None is not used.
            if value is None and of.of_options and _NAMES_A_MODEL.search(node.attr):
                value = Option(ast.unparse(node))
            if of.of_options and is_known(value):
                self.done.defaults[f"--{node.attr}"] = value
            return value
        is_method = isinstance(of, str) and node.attr in _TEXT_METHODS
        return Member(of, node.attr) if is_method or not is_known(of) else _NOT_KNOWN

    def value_of_List(self, node: ast.List, names: Environment) -> Any:
        return [
            Member(self.value(one.value, names), "[]")
            if isinstance(one, ast.Starred)
            else self.value(one, names)
            for one in node.elts
        ]

    value_of_Set = value_of_List

    def value_of_Tuple(self, node: ast.Tuple, names: Environment) -> Any:
        return tuple(self.value_of_List(ast.List(elts=node.elts), names))

    def value_of_Dict(self, node: ast.Dict, names: Environment) -> Any:
        result: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value, names)
            if key is None:
                if not isinstance(inner, Mapping):
                    return _NOT_KNOWN
                result |= inner
                continue
            name = self.value(key, names)
            if not isinstance(name, str | int):
                return _NOT_KNOWN
            result[str(name)] = inner
        return result

    def value_of_JoinedStr(self, node: ast.JoinedStr, names: Environment) -> Any:
        parts = [self.value(one, names) for one in node.values]
        return "".join(map(str, parts)) if all(map(is_known, parts)) else _NOT_KNOWN

    def value_of_FormattedValue(self, node: ast.FormattedValue, names: Environment) -> Any:
        value = self.value(node.value, names)
        return value if node.format_spec is None else Unknown(ast.unparse(node.value))

    def value_of_BinOp(self, node: ast.BinOp, names: Environment) -> Any:
        left, right = self.value(node.left, names), self.value(node.right, names)
        # A loss that is divided by a number shows gradient accumulation (`_of_loop`). It is still the loss.
        if isinstance(node.op, ast.Div) and isinstance(left, Member) and type(right) is int:
            self.done.divisions.append((left, right))
            return left
        return self.compute(node, type(node.op), left, right)

    def value_of_UnaryOp(self, node: ast.UnaryOp, names: Environment) -> Any:
        value = self.value(node.operand, names)
        if isinstance(value, OfGpu) and isinstance(node.op, ast.Not):
            return OfGpu(ast.unparse(node), not value.holds)
        return self.compute(node, type(node.op), value)

    def value_of_BoolOp(self, node: ast.BoolOp, names: Environment) -> Any:
        values = [self.value(one, names) for one in node.values]
        # `or` ends at the first true value, `and` at the first false one.
        ends = isinstance(node.op, ast.Or)
        for value in values:
            if not is_known(value):
                return value if value is values[-1] else _NOT_KNOWN
            if bool(value) is ends:
                return value
        return values[-1]

    def value_of_Compare(self, node: ast.Compare, names: Environment) -> Any:
        left, values = self.value(node.left, names), [self.value(one, names) for one in node.comparators]
        # Scripts choose a precision by comparing the GPU's compute capability with 8.0, the first with
        # bfloat16.
        if _is_capability(left) and len(values) == 1 and values[0] in (8, (8, 0)):
            above = isinstance(node.ops[0], ast.GtE)
            return self.of_gpu(node, above) if isinstance(node.ops[0], ast.GtE | ast.Lt) else Unknown("")
        if len(values) > 1:
            return _NOT_KNOWN
        # Dotted names such as `torch.float16` are constants, so they can be compared.
        if (
            isinstance(left, Name)
            and isinstance(values[0], Name)
            and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        ):
            return (left == values[0]) is isinstance(node.ops[0], ast.Eq)
        return self.compute(node, type(node.ops[0]), left, values[0])

    def value_of_IfExp(self, node: ast.IfExp, names: Environment) -> Any:
        test = self.value(node.test, names)
        if is_known(test):
            return self.value(node.body if test else node.orelse, names)
        yes, no = self.value(node.body, names), self.value(node.orelse, names)
        if isinstance(test, OfGpu):
            return OfGpu(ast.unparse(node), test.holds)
        return yes if _same(yes, no) else _NOT_KNOWN

    def value_of_Subscript(self, node: ast.Subscript, names: Environment) -> Any:
        of, key = self.value(node.value, names), self.value(node.slice, names)
        if isinstance(of, dict | list | tuple | str):
            try:
                # `value_of_Dict` stores all keys as strings.
                return of[str(key) if isinstance(of, dict) else key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return _NOT_KNOWN
        if isinstance(of, Name):
            return Name(f"{of.dotted}[{key}]") if of.dotted != "os.environ" else _NOT_KNOWN
        return Member(of, f"[{key}]")

    def value_of_Slice(self, node: ast.Slice, names: Environment) -> Any:
        """Return a slice in the user's script as text, with the bounds that are known."""
        bounds = [None if one is None else self.value(one, names) for one in (node.lower, node.upper)]
        if node.step is not None or not all(one is None or type(one) is int for one in bounds):
            return _NOT_KNOWN
        return Unknown(":".join("" if one is None else str(one) for one in bounds))

    def value_of_NamedExpr(self, node: ast.NamedExpr, names: Environment) -> Any:
        value = self.value(node.value, names)
        names[node.target.id] = value
        return value

    def value_of_Lambda(self, node: ast.Lambda, names: Environment) -> Any:
        function = Function(node, names)
        self.functions.append(function)
        return function

    def comprehension(self, node: Any, names: Environment) -> Any:
        inner = dict(names)
        for one in node.generators:
            items = self.value(one.iter, inner)
            item = Unknown(ast.unparse(one.target)) if is_known(items) else Member(items, "[]")
            self.assign(one.target, item, inner, ast.Pass(lineno=node.lineno))
        parts = [node.elt] if hasattr(node, "elt") else [node.key, node.value]
        values = [self.value(one, inner) for one in parts]
        if not isinstance(values[-1], Member):
            return _NOT_KNOWN
        tests = [ast.unparse(test) for one in node.generators for test in one.ifs]
        return Member(values[-1], f"{CHOSEN}{' and '.join(tests)}]") if tests else values[-1]

    value_of_ListComp = value_of_SetComp = value_of_GeneratorExp = value_of_DictComp = comprehension

    def value_of_Call(self, node: ast.Call, names: Environment) -> Any:
        function = self.value(node.func, names)
        positional: list[Any] = []
        for one in node.args:
            if isinstance(one, ast.Starred):
                inner = self.value(one.value, names)
                positional += inner if isinstance(inner, list | tuple) else [Member(inner, "[]")]
            else:
                positional.append(self.value(one, names))
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, names)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, Mapping):
                named |= value
            elif isinstance(value, Record):
                named |= value.attributes
            else:
                named[f"**{ast.unparse(keyword.value)}"] = value if not is_known(value) else Unknown("")
        if isinstance(function, Function):
            return self.call_own(function, tuple(positional), named)
        if isinstance(function, Class) and _is_dataclass(function):
            return self.instance(function, tuple(positional), named)
        known = self.known_value(node, function, positional, named)
        if known is not _NOT_KNOWN:
            return known
        call = ForeignCall(
            function, tuple(positional), named, node.lineno, first_line(node), *self.conditions()
        )
        self.done.calls.append(call)
        self.done.events.append(call)
        self.run_methods(function, call)
        return call

    def run_methods(self, script_class: Any, instance: ForeignCall) -> None:
        """Evaluate the methods of a trainer class at the statement that creates the trainer, because its run
        calls them.
        """
        bases = script_class.library_bases if isinstance(script_class, Class) else []
        if not any(name.endswith("Trainer") for name in bases):
            return
        for one in script_class.node.body:
            if isinstance(one, ast.FunctionDef):
                self.call_own(Function(one, script_class.environment), (instance,), {})

    def known_value(
        self, node: ast.Call, function: Any, positional: list[Any], named: Mapping[str, Any]
    ) -> Any:
        """Return the value of a call in the user's script if it follows from the arguments; otherwise the
        constant `_NOT_KNOWN`.
        """
        value: Any = _NOT_KNOWN
        if isinstance(function, Member):
            value = self.method(node, function, positional, named)
        elif not isinstance(function, Name):
            pass
        elif function.dotted in ("os.environ.get", "os.getenv"):
            # The environment variables of the run are unknown, so the script's default is used.
            value = [*positional[1:], *named.values(), Unknown(ast.unparse(node))][0]
            if is_known(value) and positional:
                self.done.defaults[f"${positional[0]}"] = value
        elif function.dotted in ("getattr", "setattr", "map"):
            value = self.of_member(node, function.dotted, positional)
        elif function.last in _OF_GPU:
            value = self.of_gpu(node, True)
        elif function.dotted == "torch.cuda.is_available":
            # Predictions assume a GPU.
            value = True
        elif function.last in ("ArgumentParser", *PARSERS):
            # The call is recorded too, because `_main_call` searches recorded calls for parsers.
            self.done.calls.append(
                ForeignCall(function, tuple(positional), named, node.lineno, first_line(node))
            )
            kinds = [] if function.last == "ArgumentParser" else [*positional, *named.values()][:1]
            several = bool(kinds) and isinstance(kinds[0], list | tuple)
            value = Parser(kinds=tuple(kinds[0]) if several else tuple(kinds))
        elif function.dotted == "dict" and not positional:
            value = dict(named)
        elif function.dotted in _BUILTINS and positional and all(map(is_known, positional)) and not named:
            value = self.built_in(node, _BUILTINS[function.dotted], positional)
        return value

    def of_member(self, node: ast.Call, name: str, positional: list[Any]) -> Any:
        """Evaluate a call of `getattr`, `setattr` or `map` in the script: return the attribute, or the
        function's result.
        """
        first, second = [*positional, None, None][:2]
        if name == "getattr" and isinstance(first, Name):  # `getattr(torch, options.dtype)`
            return second if isinstance(second, Option) else Name(f"{first.dotted}.{second}")
        if name == "map" and isinstance(first, Function) and isinstance(second, ForeignCall | Member):
            return self.call_own(first, (Member(second, "[]"),), {})
        if not isinstance(first, ForeignCall | Member) or not isinstance(second, str):
            return _NOT_KNOWN
        if name == "getattr":
            return Member(first, second)
        if name == "setattr" and len(positional) == 3:
            self.set(first, second, positional[2], node)
            return None
        return _NOT_KNOWN

    def built_in(self, node: ast.Call, function: Callable[..., Any], positional: list[Any]) -> Any:
        """Return the result of a call of a Python built-in, such as `int`, in the user's script. Return
        `Unknown` if the call fails.
        """
        try:
            return function(*positional)
        except (TypeError, ValueError, OverflowError):
            return Unknown(ast.unparse(node))

    def method(
        self, node: ast.Call, function: Member, positional: list[Any], named: Mapping[str, Any]
    ) -> Any:
        """Return the result of calling a method of a command-line parser or a mapping; `_NOT_KNOWN` for other
        objects.
        """
        of, name = function.of, function.name
        if not isinstance(of, Parser):
            of_text = isinstance(of, str) and is_known(positional)
            return self.built_in(node, getattr(of, name), positional) if of_text else _NOT_KNOWN
        if name.startswith("parse"):
            if of.kinds:
                return tuple(map(self.parse_kind, of.kinds))
            parsed = Record(dict(of.defaults), of_options=True)
            # With defaults alone there are no unknown arguments, the second result of `parse_known_args`.
            return (parsed, []) if name == "parse_known_args" else parsed
        if name == "add_argument":
            flags = [one for one in positional if isinstance(one, str)]
            longest = max(flags, key=len, default="")
            key = str(named.get("dest", longest.lstrip("-").replace("-", "_")))
            usual: Any = {"store_true": False, "store_false": True}.get(str(named.get("action")))
            has_default = longest.startswith("-") and not named.get("required")
            of.defaults[key] = named.get("default", usual) if has_default else Option(key)
            return None
        if name == "set_defaults":
            of.defaults |= named
            return None
        # Groups of options share the defaults of their parser.
        return of if name.startswith("add_") else Unknown(ast.unparse(node))

    def parse_kind(self, kind: Any) -> Any:
        """Return the instance of a dataclass that `HfArgumentParser` fills from the command line, with the
        dataclass's defaults.
        """
        if not isinstance(kind, Class):
            return Record(of_options=True, base=getattr(kind, "last", ""), own=False)
        given = self.instance(kind, (), {}).attributes
        own = {key: Option(key) if isinstance(one, Unknown) else one for key, one in given.items()}
        return Record(own, of_options=True, base=next(iter(kind.library_bases), ""))

    def of_gpu(self, node: ast.expr, holds: bool) -> Any:
        if self.bfloat16 is None:
            return OfGpu(ast.unparse(node), holds)
        return self.bfloat16 is holds

    def call_own(self, function: Function, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Evaluate a function that the script defines, and return its value."""
        node = function.node
        self.called.add(node)
        if self.depth >= DEEPEST:
            return Unknown(getattr(node, "name", "a function"))
        names = dict(function.environment)
        parameters = [*node.args.posonlyargs, *node.args.args]
        defaults = dict(zip([one.arg for one in parameters][::-1], node.args.defaults[::-1], strict=False))
        defaults |= {
            one.arg: default
            for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if default is not None
        }
        every = [*parameters, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
        own = {one.arg for one in every}
        for one in every:
            default = defaults.get(one.arg)
            names[one.arg] = Unknown(one.arg) if default is None else self.value(default, names)
        # Further positional arguments belong to `*args`, whose content stays unknown.
        names.update(zip((one.arg for one in parameters), positional, strict=False))
        names.update({key: value for key, value in named.items() if key in own})
        self.depth += 1
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body, names)
            self.block(node.body, names)
        except _Return as returned:
            return returned.value
        except _BlockEnds:
            return Unknown(getattr(node, "name", "a function"))
        finally:
            self.depth -= 1
        return None

    def instance(self, script_class: Class, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Record:
        """Return an instance of a dataclass that the script defines, with these arguments as fields."""
        record = Record()
        for base in script_class.bases:
            if isinstance(base, Class):
                record.attributes |= self.instance(base, (), {}).attributes
        for one in script_class.node.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                continue
            default = (
                Unknown(one.target.id)
                if one.value is None
                else self.value(one.value, script_class.environment)
            )
            if isinstance(default, ForeignCall) and default.name == "field":
                default = default.named.get("default", Unknown(one.target.id))
            record.attributes[one.target.id] = default
        # Positional arguments are in the order of the fields, with inherited ones first.
        record.attributes |= dict(zip(record.attributes, positional, strict=False))
        record.attributes |= named
        return record

    def compute(self, node: ast.expr, kind: type[ast.AST], *values: Any) -> Any:
        """Return the result of an operator on known values."""
        function = _OPERATORS.get(kind)
        if function is None or not all(map(is_known, values)) or not all(map(_is_small, values)):
            return _NOT_KNOWN
        # A power may be huge even if its operands are small.
        if kind is ast.Pow and (not isinstance(values[1], int) or abs(values[1]) > 64):
            return _NOT_KNOWN
        # A string or list times a number may be huge.
        if kind is ast.Mult and not all(isinstance(one, int | float) for one in values):
            return _NOT_KNOWN
        try:
            return function(*values)
        except (TypeError, ValueError, ArithmeticError):
            return _NOT_KNOWN


_NOT_KNOWN = object()
"""Result of a handler that finds no value. For a call, it means that the call is one of a library."""


def _same(one: Any, other: Any) -> bool:
    # In Python, True == 1, but arguments distinguish the two.
    return one is other or (is_known(one) and is_known(other) and type(one) is type(other) and one == other)


def _one_of(name: str, values: Sequence[Any]) -> Any:
    """Return the value of a variable that branches of a script set differently. If each branch sets an
    object, return one of them.
    """
    known = [value for value in values if is_known(value) or isinstance(value, Unknown)]
    return Unknown(name) if known else values[0]


def _is_capability(value: Any) -> bool:
    """Return True if an expression of a script is a GPU's compute capability, or its first number."""
    inner = value.of if isinstance(value, Member) and value.name == "[0]" else value
    return isinstance(inner, ForeignCall) and inner.name == "get_device_capability"


def _with_literals(test: ast.expr, names: Environment) -> ast.expr:
    """Return a condition of a script with the names of known lists and texts replaced by their values."""
    used = {node.id: names.get(node.id) for node in ast.walk(test) if isinstance(node, ast.Name)}
    known = {key: one for key, one in used.items() if isinstance(one, str | list | tuple) and is_known(one)}
    return replace_names(test, {key: ast.parse(repr(one), mode="eval").body for key, one in known.items()})


def _is_dataclass(script_class: Class) -> bool:
    return any("dataclass" in ast.unparse(one) for one in script_class.node.decorator_list)


def _is_small(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str | list | tuple):
        return True
    return (len(value) if isinstance(value, str | list | tuple) else abs(value)) <= LARGEST
