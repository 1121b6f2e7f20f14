"""A Python script's arguments, read from its syntax tree and never executed.

Found are the call of `TrainingArguments` (or, where there is none, of `Accelerator`), of `from_pretrained` on
one of transformers' auto classes, and of peft's `LoraConfig`. An argument is known when it is a literal, a
dtype of torch, or a name that the script gives such a value exactly once; `**name` of a dict works likewise,
as the guide has it. What is computed while the script runs stays unknown, and is reported as such.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from snugfit.errors import UsageError
from snugfit.job.architectures import HEADS

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
OTHER_DEFAULTS = ("SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig", "ORPOConfig", "RewardConfig")
"""trl's subclasses, whose defaults are not those of `TrainingArguments`."""

_AUTO = {auto: task for task, (auto, _) in HEADS.items()}


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would tell."""

    text: str
    """As the script writes it."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Written:
    """Where an argument stands in the text: byte offsets of its name and of its value."""

    name: tuple[int, int]
    """Of the keyword, or of the key in a dict."""

    value: tuple[int, int]
    """Of the value."""

    quoted: bool
    """Whether the name stands in quotes, as in a dict."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What was found."""

    arguments: dict[str, Any]
    """By name, with `model.` and `lora.` before the arguments of those calls."""

    places: dict[str, Written]
    """Where the arguments of the main call stand; those of a dict that is shared stand there."""

    end: int | None
    """The offset just behind the main call's last argument, for one more; None when it has none."""

    dialect: str
    """Which call it is: `trainer` or `accelerate`."""


def read_script(text: str, where: str) -> Script:
    """The arguments in a script; raises `UsageError` when there is no such call, or more than one."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, why = "", str(error)
        if isinstance(error, SyntaxError):
            line, why = f", line {error.lineno}" if error.lineno else "", error.msg
        raise UsageError(f"{where}{line}: this is not Python ({why}).") from None
    reader = _Reader(text, tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if other := [call for call in calls if _name(call) in OTHER_DEFAULTS]:
        raise UsageError(
            f"{where}, line {other[0].lineno}: {_name(other[0])} has other defaults than TrainingArguments, "
            "and is not read yet. Write its arguments as TrainingArguments."
        )
    found = [call for call in calls if _name(call) in ARGUMENTS]
    kind = "trainer" if found else "accelerate"
    found = found or [call for call in calls if _name(call) == "Accelerator"]
    if len(found) != 1:
        lines = ", ".join(str(call.lineno) for call in found)
        many = f"calls it on the lines {lines}; keep one" if found else "has no such call"
        raise UsageError(f"{where}: a script is read for its call of TrainingArguments, and this one {many}.")
    arguments, places = reader.call(found[0])
    for call in calls:
        if _name(call) == "from_pretrained" and (task := _AUTO.get(_owner(call))):
            arguments |= reader.model(call, task)
        elif _name(call) == "LoraConfig":
            inner, _ = reader.call(call)
            arguments |= {f"lora.{key}": value for key, value in inner.items()} or {"lora.task_type": None}
    end = max((place.value[1] for place in reader.direct(found[0])), default=None)
    return Script(arguments=arguments, places=places, end=end, dialect=kind)


class _Reader:
    """Values and places in one script."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.lines = [0]
        for line in text.encode().splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.names = _assigned_once(tree)

    def call(self, call: ast.Call) -> tuple[dict[str, Any], dict[str, Written]]:
        """A call's keyword arguments and where they stand. A positional first one names the output folder."""
        arguments: dict[str, Any] = {"output_dir": self.value(call.args[0])} if call.args else {}
        places: dict[str, Written] = {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = self.value(keyword.value)
                places[keyword.arg] = self._keyword(keyword)
                continue
            shared = self._node(keyword.value)
            if not isinstance(shared, ast.Dict):
                arguments[f"**{ast.unparse(keyword.value)}"] = Unknown(ast.unparse(keyword.value))
                continue
            for key, value in zip(shared.keys, shared.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    arguments[key.value] = self.value(value)
                    places[key.value] = Written(name=self._span(key), value=self._span(value), quoted=True)
        return arguments, places

    def direct(self, call: ast.Call) -> Iterator[Written]:
        """The places of the arguments that stand in the call itself."""
        for keyword in call.keywords:
            yield self._keyword(keyword)
        for argument in call.args:
            yield Written(name=self._span(argument), value=self._span(argument), quoted=False)

    def model(self, call: ast.Call, task: str) -> Mapping[str, Any]:
        """`from_pretrained` as arguments of the model and facts of the job."""
        inner, _ = self.call(call)
        name = inner.pop("pretrained_model_name_or_path", inner.pop("output_dir", None))
        known = {"job.model": name} if isinstance(name, str) else {}
        return {"job.task": task, **known, **{f"model.{key}": value for key, value in inner.items()}}

    def value(self, node: ast.expr) -> Any:
        """What an expression is worth, as far as its text says."""
        node = self._node(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {
                str(getattr(key, "value", "")): self.value(value)
                for key, value in zip(node.keys, node.values, strict=True)
            }
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Unknown(ast.unparse(node))

    def _node(self, node: ast.expr) -> ast.expr:
        return self.names.get(node.id, node) if isinstance(node, ast.Name) else node

    def _keyword(self, keyword: ast.keyword) -> Written:
        start = self.lines[keyword.lineno - 1] + keyword.col_offset
        end = start + len((keyword.arg or "").encode())
        return Written(name=(start, end), value=self._span(keyword.value), quoted=False)

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.lines[node.lineno - 1] + node.col_offset,
            self.lines[node.end_lineno - 1] + node.end_col_offset,
        )


def _assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    """Names with the one value that the script ever gives them."""
    times: dict[str, int] = {}
    values: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            times[node.id] = times.get(node.id, 0) + 1
        elif isinstance(node, ast.arg):
            times[node.arg] = times.get(node.arg, 0) + 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return {name: value for name, value in values.items() if times.get(name) == 1}


def _name(call: ast.Call) -> str:
    """The last word of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _owner(call: ast.Call) -> str:
    """`AutoModelForCausalLM` of `transformers.AutoModelForCausalLM.from_pretrained`."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    owner = call.func.value
    return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
