"""Properties (facts) of a run's model, optimizer and schedule, which a checkpoint compares to detect another
run.

If snugfit builds the run, its job, recipe and options describe it completely. Front-ends that receive a
model, an optimizer and a schedule read facts from these objects. A fact influences the results of a step, and
a checkpoint does not restore it. Some facts are restored, but the restored value would hide the user's
change.

{"learning_rate": 0.001, "config.hidden_dropout_prob": 0.1, "dropout.Dropout.p": "0.1 x 25",
"optimizer.class": "AdamW", "optimizer.lr": 0.001, "schedule.factor at step 100": 0.9, ...}

Facts are one flat mapping of names to JSON values, so that errors can name each difference. A fact that only
one run has is compared if it describes a model or its data (`DESCRIBED`). Both runs must then have the same
package versions. Restored values that users rarely set (an optimizer's counters, random generators) are not
facts.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.training.checkpoint.code_facts import CODE, CONTINUE_ADVICE, code_facts, is_users
from snugfit.training.checkpoint.manager import differences

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]

FACTS = "facts"
"""Key of the run's facts (settings that must not change on resuming) in a checkpoint's description."""

DROPOUT = "dropout."
DESCRIBED = (DROPOUT, "config.", "adapters", "data_collator.", "loader.")
"""Prefixes of facts that are compared even if only one of two runs recorded them. Dropout rates are compared
even between versions of the packages."""

CONTENT = "dataset.content"
"""Name of the fact that is a checksum of the dataset. Its values are not shown in errors."""

_FACTOR = ".factor at step"

_STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
"""Step numbers at which a learning rate schedule is evaluated for comparison (chosen)."""

_NO_CONFIG_FACTS = frozenset({
    "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "problem_type", "id2label",
    "label2id", "gradient_checkpointing", "pad_token_id", "bos_token_id", "eos_token_id", "finetuning_task",
    "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip
"""Fields of a model's config that are not compared. They change no step, or transformers sets them itself."""

_NO_ADAPTER_FACTS = frozenset({
    "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
})  # fmt: skip
"""Fields of an adapter's config that are not compared, since they do not change the computation."""

_NO_GROUP_FACTS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Fields of an optimizer's parameter group that are not compared, since they only select an implementation.
"""

_PROGRESS = frozenset({"last_epoch", "base_lrs", "lr_lambdas", "verbose"})
"""Fields of a schedule's state that are progress, not settings. Fields with a leading `_` are no settings
either."""

_NO_FACT = object()
"""Marker for a setting without a JSON form, which checkpoints neither record nor compare."""


def compare_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the stored properties of two runs, by name.

    If the versions of the libraries differ, properties that only one run has are ignored, because the
    arguments differ. If the Python versions differ, code is ignored, because it compiles differently.
    """
    if FACTS not in before:
        return ["it has no settings to compare, as a snugfit before 0.1.0 wrote it"]
    software, own_software = before.get("versions", {}), now["versions"]
    described = DESCRIBED if software == own_software else DROPOUT
    left_out = CONTENT if software.get("python") == own_software.get("python") else (CONTENT, CODE)
    before, now = before[FACTS], now[FACTS]
    names = [
        name
        for name in dict.fromkeys((*now, *before))
        if (name in before and name in now) or name.startswith(described)
    ]
    names = [name for name in names if not name.startswith(left_out)]
    wrong = differences(before, now, names) if names else []
    wrong = [f"{text}{CONTINUE_ADVICE}" if text.startswith(CODE) else text for text in wrong]
    # If the schedule differs, it differs at many steps, so only the first one is reported.
    factors = [text for text in wrong if _FACTOR in text]
    wrong = [text for text in wrong if text not in factors[1:]]
    # If one run has not recorded this fact, both count as equal.
    if before.get(CONTENT, now.get(CONTENT)) != now.get(CONTENT, before.get(CONTENT)):
        wrong.append("the dataset has other samples")
    return wrong


def model_facts(model: torch.nn.Module) -> Facts:
    """Return properties that identify a model: its class, its numbers of parameters, its config, its dropout,
    its adapters.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model
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
    """Return the class of a module before torch's FSDP2 replaced it."""
    import torch.distributed as dist

    if dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            # FSDP2 replaces a module's class by a subclass, so the original class is searched for.
            kinds = type(model).__mro__
            return kinds[kinds.index(FSDPModule) + 1]
    return type(model)


def forward_facts(model: torch.nn.Module) -> Facts:
    """Return fingerprints of the code of a model's forward passes by name, for the user's own classes
    alone.
    """
    kinds = {model_class(module) for module in getattr(model, "_orig_mod", model).modules()}
    forwards = [vars(kind).get("forward") for kind in kinds]
    users = [forward for forward in forwards if isinstance(forward, types.FunctionType) and is_users(forward)]
    return code_facts({forward.__qualname__: forward for forward in users})


def _dropout(model: torch.nn.Module) -> Facts:
    """Return rates of dropout and label smoothing by class and attribute, in the modules' order."""
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
    """Return properties that identify a new optimizer: its class, and the numbers in its parameter groups.

    After a first step this is its class alone, because some optimizers count steps in their groups.
    """
    facts: Facts = {"optimizer.class": type(optimizer).__name__}
    if optimizer.state:
        return facts
    names = dict.fromkeys(name for group in optimizer.param_groups for name in group)
    for name in (name for name in names if name not in _NO_GROUP_FACTS):
        source = [
            # A new schedule changes `lr`, so `initial_lr` is recorded.
            group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name)
            for group in optimizer.param_groups
        ]
        values = [_plain(value) for value in source]
        if not any(value is _NO_FACT for value in values):
            facts[f"optimizer.{name}"] = values[0] if values.count(values[0]) == len(values) else values
    return facts


def schedule_facts(scheduler: Any, prefix: str = "schedule") -> Facts:
    """Return properties that identify a new schedule: its class, its settings, its factors, and those of its
    inner schedules.

    After a first step this is its class alone.
    """
    facts: Facts = {f"{prefix}.class": type(scheduler).__name__}
    if getattr(scheduler, "last_epoch", 0) not in (0, -1):
        return facts
    settings = {name: value for name, value in scheduler.state_dict().items() if name not in _PROGRESS}
    facts |= flatten(prefix, settings)
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        facts |= schedule_facts(part, f"{prefix}.{number}")
    return facts | _factors(scheduler, prefix)


def _factors(scheduler: Any, prefix: str) -> Facts:
    """Return the learning-rate factors that a schedule's functions compute for some steps.

    Callable objects are not called, because they may have a state.
    """
    facts: Facts = {}
    for number, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        if not isinstance(getattr(function, "func", function), types.FunctionType):
            continue
        group = f", group {number}" if number else ""
        for step in _STEPS:
            try:
                facts[f"{prefix}{_FACTOR} {step}{group}"] = float(function(step))
            except Exception:  # such as the end of a table; training will raise it again
                break
    return facts


def settings_of(prefix: str, owner: Any) -> Facts:
    """Return the class and the plain public attributes of a user's object, such as a collator's mask rate, to
    compare runs.

    A function has no such attributes.
    """
    if owner is None or isinstance(owner, types.FunctionType | types.MethodType | functools.partial):
        return {}
    return {f"{prefix}.class": type(owner).__name__, **flatten(prefix, getattr(owner, "__dict__", {}))}


def flatten(prefix: str, settings: Mapping[Any, Any]) -> Facts:
    """Return nested settings as a flat dict by path, without values that JSON lacks and names with a leading
    `_`.
    """
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
    """Return a value in JSON form: a number, text, or a list of them; `_NO_FACT` for any other type."""
    if getattr(value, "ndim", 1) == 0:  # a scalar tensor or numpy number
        value = value.item()
    if isinstance(value, str):
        return str(getattr(value, "value", value))  # such as the text of an enum
    if isinstance(value, set | frozenset):
        value = sorted(map(str, value))
    if isinstance(value, list | tuple):
        values = [_plain(part) for part in value]
        return _NO_FACT if any(part is _NO_FACT for part in values) else values
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float) else _NO_FACT
