"""JSON Schema (draft 2020-12) of the documents that commands print with `--json`.

The properties are the fields of the dataclasses, and their descriptions are the docstrings under the fields.

**The tables.** Documents of the commands, and the sentences about their keys that no docstring holds.

A document is the `to_json` of a dataclass. Most sentences are the docstrings of its fields. The tables here
list the keys that `to_json` adds, the fields that it omits, and the sentences for fields without a docstring.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from inspect import getdoc
from typing import Any, Literal

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.documents import JsonDocument
from snugfit.errors import UsageError, nearest
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Cost
from snugfit.planning.plan import Choice, Pace, Plan
from snugfit.prediction.rates import HostLaunchCosts
from snugfit.report.techniques import TechniqueList
from snugfit.results.footprint import Moment
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks
from snugfit.techniques.roster import field_docs

# ---- the tables --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PredictedTiming(StepSpeed, StepSeconds):
    """Seconds of a predicted step, and their causes."""


@dataclass(frozen=True, kw_only=True)
class PlannedTiming(StepSpeed, Pace):
    """Seconds of a step of a plan's best recipe, or of its nearest miss."""


class RunCosts:
    """Costs of a run at the given prices."""


class KnownGpus:
    """The GPUs for which snugfit can predict."""


DOCUMENTS: dict[str, type] = {
    "predict --json": Prediction,
    "predict --compare --json": RecipeComparison,
    "plan --json": Plan,
    "gpus --json": KnownGpus,
    "gpus --for MODEL --json": GpuPlans,
    "measure --json": Measurement,
    "measure --predict --json": Comparison,
    "techniques --json": TechniqueList,
}
"""The dataclass of the JSON document of each core command, by command line."""


def heads(word: Any) -> dict[str, tuple[Any, str]]:
    """Return the keys at the head of a JSON document: `schema`, and `what` with the type `word`."""
    return {
        "schema": (int, "Version of the document's form. It rises when a key changes its meaning or goes."),
        "what": (word, "Name of the document."),
    }


ADDED: dict[type, dict[str, tuple[Any, str]]] = {
    Prediction: {
        "timing": (PredictedTiming | None, "Seconds of a step; null without a GPU."),
        "fits": (bool | None, ""),
        "tight": (bool | None, ""),
        "spare_bytes": (int | None, ""),
        "phase_results": (Mapping[str, Any], ""),
    },
    RecipeComparison: {
        "difference_bytes": (tuple[int, ...], "Bytes of each recipe minus those of the first."),
    },
    Plan: {
        "fits": (bool, ""),
        "tight": (bool, ""),
        "nearest_miss": (Choice | None, "The smallest recipe when nothing fits, up to 3 %."),
        "timing": (PlannedTiming | None, "Seconds of a step of the answer; null without rates."),
    },
    KnownGpus: {**heads(Literal["gpus"]), "gpus": (tuple[Gpu, ...], "All GPUs, or those that were named.")},
    GpuPlans: {
        "smallest": (str | None, "The key of the smallest GPU that trains it."),
        "fastest": (str | None, "The key of the fastest."),
        "run": (RunCosts, "Costs of a run; with prices or a run length only."),
    },
    OnGpu: {"timing": (StepSpeed | None, "Seconds of a step; null without rates.")},
    RunCosts: {
        "currency": (str, "Currency of all prices: `USD`."),
        "steps": (int | None, "Optimizer steps of the run; null if they were not given."),
        "cheapest": (str | None, "The key of the cheapest GPU; null without prices."),
        "costs": (tuple[Cost, ...], "Cost on each GPU that trains the job."),
    },
    Measurement: {
        "losses": (tuple[float | None, ...], "The loss of each step; null where it is not finite."),
        "calls": (Mapping[str, Any] | None, ""),
    },
    Comparison: {
        **heads(Literal["comparison"]),
        "errors": (Mapping[str, float], "predicted / measured - 1, by figure."),
    },
    Model: {"config": (Mapping[str, Any], "The keys of its config.json that matter; empty for a module.")},
    HostLaunchCosts: {"foreign": (float, "A kernel that a library launches from Python.")},
    Moment: {"counted_from": (int, "First number of a step: 1. Documents without this key count from 0.")},
}
"""JSON keys that `to_json` adds to a dataclass's fields, with types and descriptions. An empty description
means the docstring of the property.

A class of a feature has its own table `added_keys`. Its `optional_keys` and `left_out_keys` correspond to the
tables below.
"""

LEFT_OUT: dict[type, set[str]] = {
    Job: {"mixes_samples", "unclear_cut"},
    Comparison: {"lines", "pace"},
    Model: {"facts", "module", "example", "batch_dims", "resized"},
    HostLaunchCosts: {"python_launched"},
}
"""Fields of each dataclass that `to_json` omits."""

OPTIONAL: dict[type, set[str]] = {
    Model: {"dtype"},
    GpuPlans: {"run"},
    Prediction: {"phase_results"},
}
"""JSON keys that some documents omit: those of an option, or of a model with a declared dtype."""

SENTENCES = {
    "anatomy": "Bytes at the peak by tensor and module, and the kernels of the step.",
    "bytes": "Number of bytes.",
    "count": "Number of tensors.",
    "curve": "Live and reserved bytes through the steady step.",
    "device": "Device of the run.",
    "driver": "The driver's version.",
    "flops": "Their floating-point operations; a multiplication with its addition counts as two.",
    "footprint": "Bytes at the peak.",
    "gpu": "GPU of the prediction.",
    "gradients": "Bytes per parameter.",
    "job": "The training job.",
    "kernels": "Number of kernels.",
    "kind": "Use of the bytes: weights, gradients, optimizer states, activations, ...",
    "kinds": "Bytes by kind at the peak.",
    "largest": "The largest tensors at the peak, the largest first.",
    "live_bytes": "Live bytes at that moment.",
    "loop": "The training loop: `plain`, `accelerate` or `trainer`.",
    "machine": "The GPU of the published figure, or the machine.",
    "measured": "Measured bytes.",
    "measurement": "The measurement.",
    "model": "The model's name.",
    "name": "Its own name.",
    "operator": "The operator that allocated them, by torch's name.",
    "operators": "Kernels of the steady step, by phase and operator group.",
    "phase": "`build`, `load`, `forward`, `backward`, `clip` or `update`.",
    "prediction": "The prediction.",
    "published": "A published figure.",
    "reason": "Reason for the allocation.",
    "recipe": "The recipe, as text.",
    "reserved_bytes": "Bytes that the allocator has reserved at that moment.",
    "samples_per_second": "As published.",
    "smi_nvml_bytes": "NVML's reading at that moment.",
    "states": "States of the optimizer, in bytes per parameter.",
    "timing": "Seconds of a step.",
    "uuid": "UUID of the GPU by NVML; null on a CPU.",
    "versions": "Package versions.",
}
"""Descriptions of fields without a docstring, by the field's name."""

UNITS = {
    "_bytes": "bytes",
    "bytes": "bytes",
    "_seconds": "s",
    "seconds": "s",
    "samples_per_second": "1/s",
    "tokens_per_second": "1/s",
    "mib": "MiB",
    "flops": "FLOP",
    "bandwidth": "bytes/s",
    "_hz": "Hz",
    "_mhz": "MHz",
    "reasons": "share",
    "_watts": "W",
    "_gb": "GB",
    "mfu": "share",
    "_memory": "bytes",
    "spread": "share",
    "gain": "share",
    "position": "share",
    "padding": "share",
    "disturbed": "share",
    "per_hour": "USD",
    "per_1000_samples": "USD",
    "run": "USD",
}
"""Units of numbers by the suffix of a field's name."""


DIALECT = "https://json-schema.org/draft/2020-12/schema"

PLAIN: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    Any: {},
}
"""JSON Schemas of Python types. Values of all other types without fields are written as text."""


def documents() -> dict[str, type]:
    """Return the dataclass of each JSON document by command line, such as `predict --json`; those of features
    are last.
    """
    return DOCUMENTS | {call: kind for entry in hooks("documents") for call, kind in entry().items()}


def schema_of(command: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of all documents, or of those of one command. Raises `UsageError` for a command
    without one.
    """
    chosen = {call: owner for call, owner in documents().items() if command in (None, call.split()[0])}
    if not chosen:
        known = sorted({call.split()[0] for call in documents()})
        similar = nearest(command or "", known, count=1)
        raise UsageError(
            f"{command!r} has no JSON Schema. Commands with one: {', '.join(known)}. "
            f"Try: snugfit schema{''.join(f' {name}' for name in similar)}"
        )
    owners = list(dict.fromkeys(chosen.values()))
    calls = {
        owner: [f"snugfit {call}" for call, command_class in chosen.items() if command_class is owner]
        for owner in owners
    }
    return {
        "$schema": DIALECT,
        "title": f"snugfit {command} --json" if command else "Documents of snugfit's commands with --json",
        "anyOf": [{**reference(owner), "description": ", ".join(calls[owner])} for owner in owners],
        "$defs": {title(owner): object_schema(owner) for owner in objects(owners)},
    }


def object_schema(owner: type) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass's object. Later versions may add keys, so further keys are
    allowed.
    """
    known, optional = keys(owner), OPTIONAL.get(owner, getattr(owner, "optional_keys", ()))
    return {
        "type": "object",
        "description": _one_line((getdoc(owner) or "").split("\n\n")[0]),
        "properties": {name: property_schema(name, kind, text) for name, (kind, text) in known.items()},
        "required": [name for name in known if name not in optional],
    }


def property_schema(name: str, kind: Any, sentences: str) -> dict[str, Any]:
    """Return the JSON Schema of a key's value, with its description and its unit."""
    description = {"description": _json_words(_one_line(sentences))} if sentences else {}
    measure = unit(name, kind)
    return {**value_schema(kind), **description, **({"x-unit": measure} if measure else {})}


def value_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a value of this Python type."""
    if described_class(kind):
        return reference(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"enum": [entry.value for entry in kind]}
    return _schema_of_parts(kind) or PLAIN.get(kind, {"type": "string"})


def _schema_of_parts(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a union, a literal, a list or a mapping; empty for other types."""
    origin, arguments, inner = typing.get_origin(kind), typing.get_args(kind), parts(kind)
    composed: dict[str, Any] = {}
    if origin in (types.UnionType, typing.Union):
        composed = _nullable([value_schema(argument) for argument in inner])
    elif origin is Literal:
        composed = {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    elif origin is tuple and arguments[-1] is not Ellipsis:
        size = len(inner)
        entries = [value_schema(argument) for argument in inner]
        composed = {"type": "array", "prefixItems": entries, "minItems": size, "maxItems": size}
    elif origin in (tuple, list):
        composed = {"type": "array", "items": value_schema(inner[0])}
    elif origin in (Mapping, dict):
        composed = {"type": "object", "additionalProperties": value_schema(inner[1])}
    return composed


def _nullable(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON Schema of a value that is null or matches one of these schemas."""
    # In a schema with keywords besides `type`, these would reject null, so null becomes an alternative
    # schema.
    if len(choices) == 1 and set(choices[0]) == {"type"}:
        return {"type": [choices[0]["type"], "null"]}
    return {"anyOf": [*choices, {"type": "null"}]}


def reference(owner: type) -> dict[str, str]:
    """Return a JSON Schema reference (`$ref`) to the definition of this class."""
    return {"$ref": f"#/$defs/{title(owner)}"}


@cache
def keys(owner: type) -> dict[str, tuple[Any, str]]:
    """Return every JSON key of a dataclass with its Python type and its description."""
    own: dict[str, Any] = {}
    names: list[str] = []
    docs: dict[str, str] = {}
    if is_dataclass(owner):
        # Annotations may name `nn.Module`; a placeholder for it avoids importing torch.
        own = typing.get_type_hints(owner, localns={"nn": types.SimpleNamespace(Module=Any)})
        names, docs = [entry.name for entry in fields(owner)], SENTENCES | field_docs(owner)
    literal: Any = Literal
    usual = heads(str) if owner in documents().values() else {}
    usual |= heads(literal[owner.what]) if issubclass(owner, JsonDocument) else {}
    left_out = LEFT_OUT.get(owner, getattr(owner, "left_out_keys", ()))
    added = usual | _added_keys(owner)
    written = {name: (own[name], docs.get(name, "")) for name in names if name not in (*left_out, *added)}
    more = {name: (kind, text or getdoc(getattr(owner, name)) or "") for name, (kind, text) in added.items()}
    first = [name for name in ("schema", "what") if name in more]
    return {name: more[name] for name in first} | written | more


def _added_keys(owner: type) -> dict[str, tuple[Any, str]]:
    """Return the keys that `to_json` adds to a dataclass's fields, with their types and descriptions. Those
    of base classes are included.
    """
    bases = reversed(owner.__mro__)
    return {
        name: entry
        for base in bases
        for name, entry in (ADDED.get(base) or vars(base).get("added_keys", {})).items()
    }


def objects(roots: Iterable[type]) -> Iterator[type]:
    """Yield each dataclass that these documents contain once, in the order of first occurrence."""
    waiting, owners = list(roots), set[type]()
    while waiting:
        owner = waiting.pop(0)
        if owner not in owners:
            owners.add(owner)
            yield owner
            waiting += [class_ for kind, _ in keys(owner).values() for class_ in described_classes(kind)]


def parts(kind: Any) -> tuple[Any, ...]:
    """Return the types inside of a generic type: of a list's entries, a mapping's values, or a union's
    members, without None.
    """
    return tuple(argument for argument in typing.get_args(kind) if argument not in (type(None), Ellipsis))


def described_classes(kind: Any) -> Iterator[type]:
    """Yield the dataclasses in a value of this type: its own, and those of list entries and union members."""
    if described := described_class(kind):
        yield described
    for part in parts(kind):
        yield from described_classes(part)


def described_class(kind: Any) -> type | None:
    """Return the class itself if its JSON form is an object with keys of its own, else None."""
    is_object = isinstance(kind, type) and kind is not Recipe and (is_dataclass(kind) or kind in ADDED)
    return kind if is_object else None


def title(owner: type) -> str:
    """Return the name of a class's definition in a JSON Schema: its words in small letters, joined by
    dashes.
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", owner.__name__).lower()


def unit(name: str, kind: Any) -> str:
    """Return the unit of a JSON number by the end of its key, such as bytes for `_bytes`; empty for none."""
    numbers = {int, float} & {
        kind,
        *parts(kind),
        *(argument for part in parts(kind) for argument in parts(part)),
    }
    ending = next((end for end in UNITS if name == end or (end[0] == "_" and name.endswith(end))), "")
    return UNITS.get(ending, "") if numbers else ""


def _json_words(sentence: str) -> str:
    """Return a sentence with JSON's values in the place of Python's."""
    for python, name in {"None": "null", "True": "true", "False": "false"}.items():
        sentence = re.sub(rf"\b{python}\b", name, sentence)
    return sentence


def _one_line(text: str) -> str:
    return " ".join(text.split())
