"""A Python script's arguments, read from its syntax tree and never executed.

The reader finds the call of `TrainingArguments` or TRL's `SFTConfig` (or, without one, of `Accelerator`). It
also finds calls of `from_pretrained` or `from_config` on one of transformers' auto classes, of peft's
`LoraConfig`, and unsloth's two calls. It finds code that compiles the model or, in a loop, its layers, and
torchao's call that converts them. An argument is resolved when it is a literal or a dtype of torch. So is a
name that the script sets to such a value exactly once. `**name` of a dict works likewise, as in the guide.
Values computed while the script runs stay unknown, and are reported as such.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snugfit.errors import UsageError
from snugfit.job.architectures import heads

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "UnslothTrainingArguments")
OTHER_DEFAULTS = ("DPOConfig", "GRPOConfig", "KTOConfig", "ORPOConfig", "RewardConfig")
"""TRL's subclasses for preference training, which runs other passes."""

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
"""Classes of unsloth, with `from_pretrained` and `get_peft_model`."""

UNSLOTH_DEFAULTS: dict[str, dict[str, Any]] = {
    "from_pretrained": {"max_seq_length": 2048, "load_in_4bit": True},
    "get_peft_model": {"r": 16, "target_modules": "all-linear"},
}
"""Defaults of arguments of unsloth's calls."""

WIDENS = "prepare_model_for_kbit_training"
"""peft's function that casts unquantized weights to float32, and checkpoints unless switched off."""

_AUTO = {auto: task for task, (auto, _) in heads().items()}


@dataclass(frozen=True, repr=False)
class Unknown:
    """A value that is computed while the script runs."""

    text: str
    """Text in the script."""

    def __repr__(self) -> str:
        return self.text


def read_script(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return the call that the script was read for, `trainer` or `accelerate`, and its arguments by name.

    The arguments of related calls have the prefix `model.` or `lora.`. Raises `UsageError` when there is no
    such call, or more than one.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, why = "", str(error)
        if isinstance(error, SyntaxError):
            line, why = f", line {error.lineno}" if error.lineno else "", error.msg
        raise UsageError(f"{where}{line}: this is not valid Python ({why}).") from None
    reader = _CallReader(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if other := [call for call in calls if _name(call) in OTHER_DEFAULTS]:
        raise UsageError(
            f"{where}, line {other[0].lineno}: {_name(other[0])} trains on preferences, which snugfit does "
            "not support yet."
        )
    main = [call for call in calls if _name(call) in ARGUMENTS]
    trainers = [call for call in calls if _name(call) == "SFTTrainer"]
    is_sft = bool(trainers) if not main else _name(main[0]) == "SFTConfig"
    kind = "sft" if is_sft else "trainer" if main else "accelerate"
    main = main or [call for call in calls if _name(call) == "Accelerator"]
    if not main and any(_name(call) == "HfArgumentParser" for call in calls):
        raise UsageError(
            f"{where}: this script reads its arguments from the command line. Give the shell file that "
            "starts it, or the arguments: snugfit predict --model_name_or_path ..."
        )
    if len(main) != 1 and not (is_sft and not main):
        lines = ", ".join(str(call.lineno) for call in main)
        many = f"calls it on the lines {lines}; keep one" if main else "does not call it"
        raise UsageError(f"{where}: a script must call TrainingArguments once, but this one {many}.")
    arguments = reader.call(main[0]) if main else {}
    for call in calls:
        if _owner(call) in UNSLOTH and _name(call) in UNSLOTH_DEFAULTS:
            arguments |= reader.unsloth(call)
        elif call in trainers:
            arguments |= reader.trained_model(call, arguments.get("model_init_kwargs"))
        elif _name(call) == "from_pretrained" and (task := _AUTO.get(_owner(call))):
            arguments |= reader.model(call, task)
        elif _name(call) == "from_config" and (task := _AUTO.get(_owner(call))):
            arguments |= {**reader.model(call, task), **_config_dtype(call, calls)}
        elif _name(call) == "LoraConfig":
            inner = reader.call(call)
            arguments |= {f"lora.{key}": value for key, value in inner.items()} or {"lora.task_type": None}
    casts = {"adapters_dtype": "float32"} if is_sft and any(map(_casts_to_float32, ast.walk(tree))) else {}
    return kind, {
        **arguments,
        **reader.widening(calls),
        **casts,
        **_compiles(tree, calls),
        **reader.budget(tree),
        **reader.gpus(kind),
        **_converts(calls),
    }


class _CallReader:
    """Values of keyword arguments in one script."""

    def __init__(self, tree: ast.Module) -> None:
        self.names = _assigned_once(tree)

    def call(self, call: ast.Call) -> dict[str, Any]:
        """Return a call's keyword arguments by name. A positional first argument is the output folder."""
        arguments: dict[str, Any] = {"output_dir": self.value(call.args[0])} if call.args else {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = self.value(keyword.value)
                continue
            shared = self._node(keyword.value)
            if not isinstance(shared, ast.Dict):
                arguments[f"**{ast.unparse(keyword.value)}"] = Unknown(ast.unparse(keyword.value))
                continue
            for key, value in zip(shared.keys, shared.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    arguments[key.value] = self.value(value)
        return arguments

    def model(self, call: ast.Call, task: str) -> Mapping[str, Any]:
        """Return the arguments of `from_pretrained` as arguments of the model and facts of the job."""
        inner = self.call(call)
        name = inner.pop("pretrained_model_name_or_path", inner.pop("output_dir", None))
        known = {"job.model": name} if isinstance(name, str) else {}
        return {"job.task": task, **known, **{f"model.{key}": value for key, value in inner.items()}}

    def unsloth(self, call: ast.Call) -> dict[str, Any]:
        """Return the arguments of unsloth's `from_pretrained` or `get_peft_model`, which train a language
        model."""
        inner = {**UNSLOTH_DEFAULTS[_name(call)], **self.call(call)}
        first = inner.pop("output_dir", None)
        if _name(call) == "from_pretrained" and isinstance(first, str):
            inner = {"model_name": first, **inner}
        meant = {"lora.peft_type": "LORA"} if _name(call) == "get_peft_model" else {"job.task": "causal-lm"}
        return {**meant, **{f"unsloth.{key}": value for key, value in inner.items()}}

    def widening(self, calls: list[ast.Call]) -> dict[str, Any]:
        """Return the arguments of peft's preparation of a 4-bit model for training."""
        options = next((self.call(call) for call in calls if _name(call) == WIDENS), None)
        key = "use_gradient_checkpointing"
        return {} if options is None else {WIDENS: True, f"{WIDENS}.{key}": options.get(key, True) is True}

    def budget(self, tree: ast.Module) -> dict[str, Any]:
        """Return the script's setting of torch's activation memory budget."""
        name = "activation_memory_budget"
        values = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == name
        ]
        return {f"functorch.{name}": self.value(values[-1])} if values else {}

    def gpus(self, kind: str) -> dict[str, Any]:
        """Return the number of processes that the script declares, as the scripts exported by snugfit do."""
        node = self.names.get("GPUS")
        if not isinstance(node, ast.Constant) or type(node.value) is not int or node.value == 1:
            return {}
        return {"parallel.elsewhere" if kind == "accelerate" else "job.gpus": node.value}

    def trained_model(self, call: ast.Call, options: Any) -> dict[str, Any]:
        """Return the model that a trainer loads by name, not as an object.

        TRL loads it with the `options` of `model_init_kwargs`, in float32 unless these set a dtype
        (`create_model_from_path` of TRL 1.16).
        """
        given = [keyword.value for keyword in call.keywords if keyword.arg == "model"] or call.args[:1]
        name = self.value(given[0]) if given else None
        if not isinstance(name, str):
            return {}
        if isinstance(options, Unknown):
            return {"job.model": name, "job.dtype": options}
        said = {"dtype", "torch_dtype"} & set(options or ())
        return {"job.model": name} if said else {"job.model": name, "job.dtype": "float32"}

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, as far as it follows from its text."""
        node = self._node(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {
                str(getattr(key, "value", "")): self.value(value)
                for key, value in zip(node.keys, node.values, strict=True)
            }
        if isinstance(node, ast.Call) and _name(node) in ("BitsAndBytesConfig", "ParallelismConfig"):
            return self.call(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Unknown(ast.unparse(node))

    def _node(self, node: ast.expr) -> ast.expr:
        return self.names.get(node.id, node) if isinstance(node, ast.Name) else node


def _assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    """Return names with the one value that the script ever sets."""
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
    """Return the last word of the called name."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _casts_to_float32(node: ast.AST) -> bool:
    """Return True for `weight.data = weight.data.float()`, as in the exported script."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "data"
        and isinstance(node.value, ast.Call)
        and _name(node.value) == "float"
    )


def _compiles(tree: ast.Module, calls: list[ast.Call]) -> dict[str, Any]:
    """Return the script's use of torch.compile, and its options if set.

    It compiles layers in a loop over them, a model's own forward pass, or a model with the Trainer's
    wrappers.
    """
    loops = {getattr(node.target, "id", "") for node in ast.walk(tree) if isinstance(node, ast.For)}
    by_owner = {_owner(call): call for call in calls if _name(call) == "compile"}
    for owners, key in ((loops - {""}, "layers.compile"), ({"torch", "model"}, "torch_compile")):
        if calls_of_it := [call for owner, call in by_owner.items() if owner in owners]:
            of = "forward.compile" if _compiles_forward(calls_of_it[0]) else key
            return {of: True, **_how(calls_of_it[0], of)}
    return {}


def _compiles_forward(compiles: ast.Call) -> bool:
    """Return True for `torch.compile(model.forward)`."""
    of = compiles.args[0] if compiles.args else None
    return isinstance(of, ast.Attribute) and of.attr == "forward"


def _how(compiles: ast.Call, key: str) -> dict[str, Any]:
    """Return the mode and the backend in this call of `compile`, if they are not torch's defaults."""
    values = {keyword.arg: keyword.value for keyword in compiles.keywords}
    said = {
        f"{key}_{name}": value.value if isinstance(value, ast.Constant) else Unknown(ast.unparse(value))
        for name in ("mode", "backend")
        if (value := values.get(name)) is not None
    }
    return {name: value for name, value in said.items() if value not in (None, "default", "inductor")}


def _converts(calls: list[ast.Call]) -> dict[str, Any]:
    """Return torchao's recipe, if the script converts linear layers to 8-bit floats."""
    if not any(_name(call) == "convert_to_float8_training" for call in calls):
        return {}
    named = [call.args[0] for call in calls if _name(call) == "from_recipe_name" and call.args]
    known = next((name.value for name in named if isinstance(name, ast.Constant)), None)
    return {"layers.float8": "tensorwise" if not named else known or Unknown(ast.unparse(named[0]))}


def _config_dtype(from_config: ast.Call, calls: list[ast.Call]) -> dict[str, Any]:
    """Return the dtype of the random weights that `from_config` creates.

    It is the dtype argument, that of a config which the script reads, or else float32.
    """
    said = any(keyword.arg in ("dtype", "torch_dtype") for keyword in from_config.keywords)
    read = any(_name(call) == "from_pretrained" and _owner(call).endswith("Config") for call in calls)
    return {} if said or read else {"job.dtype": "float32"}


def _owner(call: ast.Call) -> str:
    """Return the class whose method is called: `AutoModelForCausalLM` of
    `AutoModelForCausalLM.from_pretrained`."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    owner = call.func.value
    return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
