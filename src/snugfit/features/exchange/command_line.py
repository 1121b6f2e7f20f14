"""Parsing of arguments in the form of `HfArgumentParser`: `--per_device_train_batch_size 4 --bf16
--optim=adamw_torch`.

Two command lines follow the same rules. One is that of snugfit's commands, with such flags among its own
(`split_flags`). The other is in a shell file that starts a training script (`read_shell`): `python run_clm.py
...`, `torchrun ... run_clm.py ...`, `accelerate launch ... run_clm.py ...`, `trl sft ...` and
`llamafactory-cli train ...`. No command of the file is executed. A variable is resolved if the file sets it
once, to a plain value.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.exchange.account import UnsupportedJobError
from snugfit.features.exchange.dialect import dialect, words_of
from snugfit.features.exchange.python.values import Unknown
from snugfit.features.exchange.values import field_kinds
from snugfit.techniques import roster

SEVERAL = ("lora_target_modules", "report_to", "label_names", "lora_modules_to_save")
"""Command-line arguments whose value is all words up to the next option."""

LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Python modules that start a training script when run as `python -m MODULE`."""

RUN_FILE = "launcher.run_file"
"""Argument for the configuration file of the training run that a command starts."""

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
"""Regular expression of shell arithmetic, `$((A * B))`, with one level of parentheses."""

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
"""Functions for shell arithmetic on whole numbers from 0 on, by the type of Python's operator."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
"""Regular expression of a shell variable in a command. `${1:-gpt2}` has a default."""

_SLURM = re.compile(r"^#SBATCH\s+-{1,2}([\w-]+)[=\s]\s*(?:gpu:)?(?:[\w-]+:)?(\d+)\b", re.MULTILINE)
"""Regular expression of a SLURM option with a number: `--nodes=1`, `--gres=gpu:a100:4`."""

_OF_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gres": ("SLURM_GPUS_ON_NODE",), "gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}  # fmt: skip
"""Environment variables that SLURM sets, by the option that sets them."""


def split_flags(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Split a command line into snugfit's words and transformers' flags, the latter as texts `key=value`. The
    flags in `own` and unknown flags belong to snugfit.
    """
    declared: list[str] = []
    foreign: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and flag not in own and is_argument(name):
            foreign.append(f"{name}={value if equals else _take_value(name, rest)}")
        else:
            declared.append(word)
    return declared, foreign


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return arguments by name, parsed from texts `key=value`."""
    return {key: _scalar(key, value) for key, _, value in (pair.partition("=") for pair in pairs)}


def is_argument(name: str) -> bool:
    """Return True for the name of an argument of transformers' Trainer or of its example scripts."""
    table = dialect("script")
    return bool(name in argument_names() or table.refusal(name) or table.reason_to_ignore(name))


def argument_names() -> set[str]:
    """Return the names of the arguments for which `is_argument` is true, except those matched by a
    pattern.
    """
    named = (key for kind in roster.techniques() for one in kind.counterparts for key in one.arguments)
    return {*dialect("script").words(), *named, "per_device_train_batch_size"}


def read_shell(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return the library (its dialect) and the arguments of the one training command in a shell file. Raises
    `UsageError` when there is none, or more than one.
    """
    options = _SLURM.findall(text)
    variables = {name: number for option, number in options for name in _OF_SLURM.get(option, ())}
    commands: list[list[str]] = []
    for line in _lines(text):
        words = [word for word in _split(_with_sums(line, variables), where) if word != "export"]
        words = [one for word in words for one in _expand(word, variables, where)]
        # Assignments may precede a command on its line.
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
            variables[assigned[1]] = assigned[2]
            words.pop(0)
        if commanded := _training_command(words, where):
            commands.append(commanded)
    if len(commands) != 1:
        many = f"{len(commands)}; keep one" if commands else "none"
        launchers = ", ".join(words_of("launchers"))
        raise UsageError(
            f"{where}: a shell file must have one command that starts training ({launchers}), "
            f"but this one has {many}."
        )
    if commands[0][0].endswith("trl") and commands[0][1:2] != ["sft"]:
        job = " ".join(commands[0][:2])
        raise UnsupportedJobError(
            f"{where}: of TRL's commands only trl sft is predicted, not {job}. Give the script of an sft run."
        )
    return _read_command(commands[0], variables.get("CUDA_VISIBLE_DEVICES", ""))


def _lines(text: str) -> list[str]:
    """Return the lines of a shell file, joined where a quotation or a backslash continues a line."""
    lines: list[str] = []
    quote, current = "", ""
    whole = text.rstrip().removesuffix("\\")  # the last line may end in a backslash
    for line in whole.replace("\\\n", " ").splitlines():
        if not quote and line.lstrip().startswith("#"):
            continue
        current += (" " if quote else "") + line
        for character in line:
            if character in "'\"" and quote in ("", character):
                quote = "" if quote else character
        if not quote:
            lines.append(current)
            current = ""
    return [*lines, current] if current else lines


def _split(line: str, where: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(
            f"{where}: a line is not a shell command ({error}): {line.strip()[:60]} Correct that line."
        ) from None


def _expand(word: str, variables: Mapping[str, str], where: str) -> list[str]:
    """Return the words into which the shell expands one word of a command. If the word is a variable alone,
    its value is split into words.
    """
    whole = _VARIABLE.fullmatch(word)
    filled = _with_variables(word, variables)
    if whole and filled != word and " " in filled.strip():
        return _split(filled, where)
    return [filled]


def _training_command(words: list[str], where: str) -> list[str]:
    """Return the words of a training command, from its launcher (such as torchrun) on; empty for another
    command.
    """
    if not words or words[0] in words_of("commands that train nothing"):
        return []
    if "-c" in words and words.index("-c") + 1 < len(words):  # bash -c "COMMAND"
        return _training_command(_split(words[words.index("-c") + 1], where), where)
    names = [word.rpartition("/")[2] for word in words]
    first = next((at for at, name in enumerate(names) if name in words_of("launchers")), None)
    if first is None or not any(word.startswith("--") or _is_file(word) for word in words[first:]):
        return []
    # Other subcommands of these tools, such as `preprocess`, do not train.
    if names[first] in ("axolotl", "llamafactory-cli") and names[first + 1 : first + 2] != ["train"]:
        return []
    # A launcher's name far behind another command is an argument of it.
    if first > 3 and names[0] not in words_of("schedulers"):
        return []
    return words[first:]


def _read_command(words: list[str], visible: str) -> tuple[str, dict[str, Any]]:
    """Return the library and the arguments of one training command. The arguments of its launcher come first,
    then those of its script.
    """
    scripts = [
        at
        for at, word in enumerate(words)
        if word.endswith(".py")
        # TRL, axolotl and LLaMA-Factory have a subcommand instead of a script.
        or word in ("sft", "train")
        or (word == "-m" and words[at + 1 : at + 2] != [] and words[at + 1] not in LAUNCHER_MODULES)
    ]
    # Here `-m` comes before the name of the module.
    start = scripts[0] + (words[scripts[0]] == "-m") if scripts else 0
    name = words[start].rpartition("/")[2].removesuffix(".py")
    launcher = _flags(words[:start])
    # DeepSpeed names its GPUs as `--include localhost:0,1`.
    if type(include := launcher.get("include")) is str and ":" in include:
        launcher["num_gpus"] = len(include.partition(":")[2].split(","))
    # Plain Python starts one process, regardless of the number of visible GPUs.
    alone = words[0] in ("python", "python3") and not {"nproc_per_node", "nproc-per-node"} & set(launcher)
    if visible and not alone and not set(words_of("numbers of processes")) & set(launcher):
        launcher["visible"] = len(visible.split(","))
    arguments = {f"launcher.{key}": value for key, value in launcher.items()}
    arguments |= _flags(words[start + 1 :])
    if (file := _run_file(words[start:], arguments)) is not None:
        arguments[RUN_FILE] = file
    if task := words_of("tasks of scripts").get(name.removesuffix("_no_trainer")):
        arguments.setdefault("job.task", task)
    of_factory = set(dialect("llamafactory").known_by) - {"template", "dataset_dir"}
    if "llamafactory-cli" in words or of_factory & set(arguments):
        arguments.pop("job.task", None)
        return "llamafactory", arguments
    if name == "sft" and not {"dtype", "torch_dtype"} & set(arguments):
        arguments["job.dtype"] = "float32"  # the default of TRL's `ModelConfig`
    return ("sft" if name == "sft" else "script"), arguments


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _run_file(words: list[str], arguments: Mapping[str, Any]) -> str | None:
    """Return the path of the configuration file that a training command names: a word that is no flag, or
    TRL's `--config`.
    """
    beside = (word for before, word in pairwise(words) if _is_file(word) and not before.startswith("--"))
    config = arguments.get("config")
    return next(beside, config if isinstance(config, str) and _is_file(config) else None)


def _flags(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            continue
        name = flag[2:].replace("-", "_")
        values[name] = _scalar(name, value if equals else _take_value(name, rest))
    return values


def _take_value(name: str, rest: list[str]) -> str:
    """Remove the value that follows a flag from the list `rest` and return it. A flag without a value has the
    value true.
    """
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (not values or name in SEVERAL):
        if _is_switch(name) and rest[0].lower() not in ("true", "false", "1", "0", "yes", "no"):
            break
        values.append(rest.pop(0))
    return " ".join(values) or "true"


def _is_switch(name: str) -> bool:
    meaning = dialect("script").becomes.get(name)
    is_flag = isinstance(meaning, dict) and "true" in meaning and meaning.keys() <= {"true", "false", "null"}
    return field_kinds().get(name) is bool or is_flag


def _scalar(name: str, text: str) -> Any:
    """Convert the value of a command-line argument to a Python value."""
    # Only variables whose value is not in the file are left.
    if "$" in text:
        return Unknown(text)
    if name in SEVERAL and " " in text:
        return text.split()
    if _is_switch(name):
        return text.lower() in ("true", "1", "yes")
    try:
        # NaN and Infinity, which `json` would accept, stay strings.
        return json.loads(text.lower() if text in ("True", "False") else text, parse_constant=str)
    except ValueError:
        return text


def _with_variables(word: str, variables: Mapping[str, str]) -> str:
    """Return a word of the shell file with its variables replaced by their values or defaults."""
    return _VARIABLE.sub(lambda one: variables.get(one[1] or one[3], one[2] or one[0]), word)


def _with_sums(line: str, variables: Mapping[str, str]) -> str:
    """Return the line of a shell file with the results of its arithmetic. Arithmetic that cannot be computed
    stays one word of the line.
    """

    def result(text: re.Match[str]) -> str:
        # In shell arithmetic, variables have a dollar sign or none.
        written = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda one: variables.get(one[1], one[0]), text[1])
        try:
            return str(_whole_number(ast.parse(written.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return "".join(text[0].split())

    return _SUM.sub(result, line)


def _whole_number(node: ast.expr) -> int:
    """Return the value of arithmetic on whole numbers. Raises `ValueError` for other code, and for numbers
    below 0, which the shell divides otherwise than Python.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and (operate := _OPERATORS.get(type(node.op))):
        value = int(operate(_whole_number(node.left), _whole_number(node.right)))
        if value >= 0:
            return value
    raise ValueError(ast.unparse(node))
