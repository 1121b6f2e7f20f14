"""What makes a run another run: facts about live objects that its checkpoints carry.

A description of a run (its job, its recipe, its options) says all of it where the run is built from that. The
front-ends that are given a model, an optimizer and a schedule read them instead: what decides a step's
numbers and is not restored by a checkpoint, or is restored and would hide what the user has changed since.

    {"learning_rate": 0.001, "config.hidden_dropout_prob": 0.1, "dropout.Dropout.p": "0.1 x 25",
     "optimizer.class": "AdamW", "optimizer.lr": 0.001, "schedule.factor at step 100": 0.9, ...}

They are one flat mapping of names to JSON values, so that whatever differs can be named. A fact that only one
side has is compared where it describes a model or its data (`DESCRIBED`), and both were noted by the same
software. What a checkpoint restores and a user hardly names (an optimizer's counters, the
generators) is no fact.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.training.checkpoint.code_facts import CODE, TO_GO_ON, code_facts, is_users
from snugfit.training.checkpoint.manager import differences

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]

FACTS = "facts"
"""What a checkpoint's description of its run calls them."""

DROPOUT = "dropout."
DESCRIBED = (DROPOUT, "config.", "adapters", "data_collator.", "loader.")
"""Beginnings of the names of facts that are compared where only one side has them, too; rates of dropout are
whatever the software is."""

CONTENT = "dataset.content"
"""The fact whose value says nothing to a reader."""

_FACTOR = ".factor at step"

_STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
"""At which a schedule's function is asked for its factor. A choice."""

_NO_CONFIG_FACTS = frozenset({
    "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "problem_type", "id2label",
    "label2id", "gradient_checkpointing", "pad_token_id", "bos_token_id", "eos_token_id", "finetuning_task",
    "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip
"""Of a model's config, what changes no number of a step, or what transformers itself sets while it trains."""

_NO_ADAPTER_FACTS = frozenset({
    "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
})  # fmt: skip
"""Of an adapter's config, what changes no number."""

_NO_GROUP_FACTS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Of an optimizer's group, what only says how its update is computed."""

_PROGRESS = frozenset({"last_epoch", "base_lrs", "lr_lambdas", "verbose"})
"""Of a schedule's state, what is no setting; what begins with `_` is none either."""

_NO_FACT = object()
"""What JSON cannot hold."""


def compare_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same in what two runs say of themselves, by name; nothing where one of them was noted
    by an earlier snugfit. Other versions of the libraries know other arguments, and another Python compiles
    code otherwise."""
    software, own_software = before.get("versions", {}), now["versions"]
    described = DESCRIBED if software == own_software else DROPOUT
    left_out = CONTENT if software.get("python") == own_software.get("python") else (CONTENT, CODE)
    before, now = before.get(FACTS, {}), now[FACTS]
    if not before:
        return []
    names = [
        name
        for name in dict.fromkeys((*now, *before))
        if (name in before and name in now) or name.startswith(described)
    ]
    names = [name for name in names if not name.startswith(left_out)]
    wrong = differences(before, now, names) if names else []
    wrong = [f"{text}{TO_GO_ON}" if text.startswith(CODE) else text for text in wrong]
    factors = [text for text in wrong if _FACTOR in text]
    wrong = [text for text in wrong if text not in factors[1:]]
    if before.get(CONTENT, now.get(CONTENT)) != now.get(CONTENT, before.get(CONTENT)):
        wrong.append("the dataset has other samples")
    return wrong


def model_facts(model: torch.nn.Module) -> Facts:
    """Of a model: its class, how much of it trains, its config, its dropout, its adapters."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's is a shell
    parameters = list(model.parameters())
    facts: Facts = {
        "model.class": model_class(model).__name__,
        "model.parameters": sum(weight.numel() for weight in parameters),
        "model.parameters that train": sum(w.numel() for w in parameters if w.requires_grad),
    }
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        facts |= flatten("config", {k: v for k, v in config.to_dict().items() if k not in _NO_CONFIG_FACTS})
    return facts | _dropout(model) | _adapters(model)


def model_class(model: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module, which torch's FSDP2 has replaced by one of its own where it has spread it."""
    import torch.distributed as dist

    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            kinds = type(model).__mro__
            return kinds[kinds.index(FSDPModule) + 1]
    return type(model)


def forward_facts(model: torch.nn.Module) -> Facts:
    """The code of a model's forward passes, by their names; of the user's own classes alone."""
    kinds = {model_class(module) for module in getattr(model, "_orig_mod", model).modules()}
    forwards = [vars(kind).get("forward") for kind in kinds]
    users = [forward for forward in forwards if isinstance(forward, types.FunctionType) and is_users(forward)]
    return code_facts({forward.__qualname__: forward for forward in users})


def _dropout(model: torch.nn.Module) -> Facts:
    """Rates of dropout and label smoothing of all modules, by class and attribute, in the modules' order."""
    rates: dict[str, list[float]] = {}
    for module in model.modules():
        kind = model_class(module).__name__
        for name, value in vars(module).items():
            named = "drop" in name or "smoothing" in name or (name == "p" and "drop" in kind.lower())
            if named and isinstance(value, int | float) and not isinstance(value, bool):
                rates.setdefault(f"{DROPOUT}{kind}.{name}", []).append(value)
    return {
        name: ", ".join(f"{rate:g} x {len(list(same))}" for rate, same in itertools.groupby(values))
        for name, values in sorted(rates.items())
    }


def _adapters(model: Any) -> Facts:
    configs = getattr(model, "peft_config", None) or {}
    facts: Facts = {"adapters": sorted(configs)}
    for name, config in configs.items():
        settings = config.to_dict() if hasattr(config, "to_dict") else {}
        facts |= flatten(
            f"adapters.{name}",
            {key: value for key, value in settings.items() if key not in _NO_ADAPTER_FACTS},
        )
    return facts


def optimizer_facts(optimizer: torch.optim.Optimizer) -> Facts:
    """Of an optimizer that has taken no step: its class, and its groups' numbers. Of one that has, its class
    alone: some count in their groups."""
    facts: Facts = {"optimizer.class": type(optimizer).__name__}
    if optimizer.state:
        return facts
    names = dict.fromkeys(name for group in optimizer.param_groups for name in group)
    for name in (name for name in names if name not in _NO_GROUP_FACTS):
        source = [
            group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name)
            for group in optimizer.param_groups
        ]
        values = [_plain(value) for value in source]
        if not any(value is _NO_FACT for value in values):
            facts[f"optimizer.{name}"] = values[0] if values.count(values[0]) == len(values) else values
    return facts


def schedule_facts(scheduler: Any, prefix: str = "schedule") -> Facts:
    """Of a schedule that has taken no step: its class, its settings, and what its functions give; the same of
    those that it is made of. Of one that has, its class alone."""
    facts: Facts = {f"{prefix}.class": type(scheduler).__name__}
    if getattr(scheduler, "last_epoch", 0) not in (0, -1):
        return facts
    settings = {name: value for name, value in scheduler.state_dict().items() if name not in _PROGRESS}
    facts |= flatten(prefix, settings)
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        facts |= schedule_facts(part, f"{prefix}.{number}")
    return facts | _factors(scheduler, prefix)


def _factors(scheduler: Any, prefix: str) -> Facts:
    """Factors of the learning rate that a schedule's functions give; of objects that are called nothing, for
    they may remember it."""
    facts: Facts = {}
    for number, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        if not isinstance(getattr(function, "func", function), types.FunctionType):
            continue
        group = f", group {number}" if number else ""
        for step in _STEPS:
            try:
                facts[f"{prefix}{_FACTOR} {step}{group}"] = float(function(step))
            except Exception:  # a table that ends; whoever takes so many steps will see it
                break
    return facts


def settings_of(prefix: str, owner: Any) -> Facts:
    """The class of a user's object and its plain public attributes: of a collator, say, how much it masks. Of
    a function none."""
    if owner is None or isinstance(owner, types.FunctionType | types.MethodType | functools.partial):
        return {}
    return {f"{prefix}.class": type(owner).__name__, **flatten(prefix, getattr(owner, "__dict__", {}))}


def flatten(prefix: str, settings: Mapping[Any, Any]) -> Facts:
    """Nested settings as facts, by their path; what JSON cannot hold is left out, and so is what begins with
    `_`."""
    facts: Facts = {}
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if str(key).startswith("_"):
            continue
        if isinstance(value, Mapping):
            facts |= flatten(name, value)
        elif (plain := _plain(value)) is not _NO_FACT:
            facts[name] = plain
    return facts


def _plain(value: Any) -> Any:
    """The value as JSON holds it: a number, text, or a list of them; `_NO_FACT` for anything else."""
    if getattr(value, "ndim", 1) == 0:  # a tensor or a number of numpy's
        value = value.item()
    if isinstance(value, str):
        return str(getattr(value, "value", value))  # an enumeration's text
    if isinstance(value, set | frozenset):
        value = sorted(map(str, value))
    if isinstance(value, list | tuple):
        values = [_plain(part) for part in value]
        return _NO_FACT if any(part is _NO_FACT for part in values) else values
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float) else _NO_FACT
