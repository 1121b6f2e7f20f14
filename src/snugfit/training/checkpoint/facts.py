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

FACTOR = ".factor at step"
"""Part of a fact's name, for the factor of a learning-rate schedule at one step."""

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

NO_FACT = object()
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
    factors = [text for text in wrong if FACTOR in text]
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
        elif (plain := plain_value(value)) is not NO_FACT:
            facts[name] = plain
    return facts


def plain_value(value: Any) -> Any:
    """Return a value in JSON form: a number, text, or a list of them; `NO_FACT` for any other type."""
    if getattr(value, "ndim", 1) == 0:  # a scalar tensor or numpy number
        value = value.item()
    if isinstance(value, str):
        return str(getattr(value, "value", value))  # such as the text of an enum
    if isinstance(value, set | frozenset):
        value = sorted(map(str, value))
    if isinstance(value, list | tuple):
        values = [plain_value(part) for part in value]
        return NO_FACT if any(part is NO_FACT for part in values) else values
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float) else NO_FACT
