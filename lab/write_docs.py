"""Write the parts of the documentation that are generated from the code, or report that they are out of date.

    python lab/write_docs.py            # docs/techniques.md and docs/json.md
    python lab/write_docs.py answers    # and the answers in README and docs, by running their commands

`docs/techniques.md` lists the roster. `docs/json.md` lists the fields of the dataclasses whose `to_json` the
commands print, with the sentences under them. `ADDED` holds the keys that `to_json` adds to the fields. An
answer is a fenced block of the language `console`, whose first line is `$ snugfit ...`. A last line `...`
replaces the rest of a long output.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from inspect import getdoc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.data.lengths import Lengths
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.fleet.cards import CardPlans, CardsCost, CardsOfKind
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Cost
from snugfit.planning.lengths.length_plan import LengthPlan
from snugfit.planning.lengths.padding import Way
from snugfit.planning.plan import Choice, Pace, Plan
from snugfit.planning.several_gpus.plan import SeveralGpusPlan
from snugfit.results.footprint import Moment
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.counterpart import Setting
from snugfit.techniques.feature import hooks
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import SettingLine, field_docs, setting_lines, techniques
from snugfit.techniques.technique import Technique

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True, kw_only=True)
class PredictedTiming(StepSpeed, StepSeconds):
    """How long a predicted step takes, and why."""


@dataclass(frozen=True, kw_only=True)
class PlannedTiming(StepSpeed, Pace):
    """How long a step of a plan's answer takes, or of its nearest miss."""


class RunCosts:
    """What a run costs, at the prices that were given."""


class CardsRun:
    """What a run costs on several GPUs, at the prices that were given."""


class CheapestCards:
    """The kind and number of GPUs on which a sample costs least."""


class GpuTable:
    """GPUs that can be predicted for."""


DOCUMENTS: dict[str, type] = {
    "predict --json": Prediction,
    "predict --compare --json": RecipeComparison,
    "plan --json": Plan,
    "plan --gpus N --json": SeveralGpusPlan,
    "gpus --json": GpuTable,
    "gpus --for MODEL --json": GpuPlans,
    "gpus --for MODEL --gpus N --json": CardPlans,
    "measure --json": Measurement,
    "measure --predict --json": Comparison,
    "lengths --json": LengthPlan,
}
"""Documents printed by the commands of the core. `plan --lengths` prints a plan with `lengths` beside it."""


def documents() -> dict[str, type]:
    """Return what each command prints, those of features last."""
    return DOCUMENTS | {command: kind for of in hooks("documents") for command, kind in of().items()}


_HEADS: dict[str, tuple[Any, str]] = {
    "schema": (int, "Version of the document's form. It rises when a key changes its meaning or goes."),
    "what": (str, "Which document this is."),
}

ADDED: dict[type, dict[str, tuple[Any, str]]] = {
    Prediction: {
        **_HEADS,
        "timing": (PredictedTiming | None, "How long a step takes; null where no GPU was named."),
        "fits": (bool | None, ""),
        "tight": (bool | None, ""),
        "spare_bytes": (int | None, ""),
    },
    RecipeComparison: {
        **_HEADS,
        "difference_bytes": (tuple[int, ...], "Bytes that each needs more than the first."),
    },
    Plan: {
        **_HEADS,
        "fits": (bool, ""),
        "tight": (bool, ""),
        "nearest_miss": (Choice | None, "When nothing fits: the recipe that comes nearest."),
        "timing": (PlannedTiming | None, "How long a step of the answer takes; null without rates."),
        "lengths": (LengthPlan, "With `--lengths` only: how to pad, under the best recipe."),
    },
    SeveralGpusPlan: {
        **_HEADS,
        "fewest": (int | None, "The fewest GPUs that fit; null where none do."),
        "fastest": (int | None, "The number of GPUs with the shortest step."),
        "cheapest": (int | None, "The number of GPUs with the fewest GPU seconds a step."),
    },
    GpuTable: {**_HEADS, "gpus": (tuple[Gpu, ...], "All GPUs, or those that were named.")},
    GpuPlans: {
        **_HEADS,
        "smallest": (str | None, "The key of the smallest GPU that trains it."),
        "fastest": (str | None, "The key of the fastest."),
        "run": (RunCosts, "What a run costs."),
    },
    CardPlans: {
        **_HEADS,
        "fewest": (str | None, "The key of the kind of which the fewest are needed."),
        "run": (CardsRun, "What a run costs."),
    },
    CardsOfKind: {
        "fewest": (int | None, "The fewest GPUs that fit; null where none do."),
        "cheapest": (int | None, "The number of GPUs with the fewest GPU seconds a step."),
    },
    CardsRun: {
        "currency": (str, "Of all prices: `USD`."),
        "steps": (int | None, "Optimizer steps of the run; null where that was not said."),
        "cheapest": (CheapestCards | None, "Null without prices."),
        "costs": (tuple[CardsCost, ...], "Of each answer that fits."),
    },
    CheapestCards: {
        "key": (str, "The kind's key in the table."),
        "gpus": (int, "How many train together."),
    },
    OnGpu: {"timing": (StepSpeed | None, "How long a step takes; null where that is not known.")},
    RunCosts: {
        "currency": (str, "Of all prices: `USD`."),
        "steps": (int | None, "Optimizer steps of the run; null where that was not said."),
        "cheapest": (str | None, "The key of the cheapest GPU; null without prices."),
        "costs": (tuple[Cost, ...], "Of each GPU that trains it."),
    },
    Measurement: _HEADS,
    Comparison: {**_HEADS, "errors": (Mapping[str, float], "predicted / measured - 1, by figure.")},
    LengthPlan: {
        **_HEADS,
        "fits": (
            bool | None,
            "Whether the longest batch fits in at least one way; null where no memory was named or there are "
            "no ways.",
        ),
        "best": (Way | None, ""),
        "assumed": (bool, "Whether the best is better only by an assumed cost of unaligned rows."),
    },
    Way: {
        "fits": (
            bool | None,
            "In `ways` of the document: whether the longest batch fits; null where no memory was named.",
        )
    },
    Model: {"config": (Mapping[str, Any], "The keys of its config.json that matter; empty for a module.")},
    Lengths: {
        "samples": (int, ""),
        "tokens": (int, ""),
        "shortest": (int, ""),
        "median": (int, ""),
        "mean": (float, ""),
        "longest": (int, ""),
        "histogram": (Mapping[str, int], "Samples by their tokens."),
    },
    Moment: {"counted_from": (int, "From which number steps count: 1. Documents without it count from 0.")},
}
"""Keys that `to_json` writes beside the fields. An empty sentence stands for the property's own."""

LEFT_OUT: dict[type, set[str]] = {
    Job: {"mixes_samples", "unclear_cut"},
    Comparison: {"lines", "pace"},
    Model: {"facts", "module", "example", "batch_dims"},
    Lengths: {"counts"},
}
"""Fields that `to_json` omits."""

SENTENCES = {
    "anatomy": "Where the bytes are at the peak, and which kernels the step runs.",
    "bytes": "How many bytes that is.",
    "count": "How many tensors those are.",
    "curve": "Live and reserved bytes through the steady step.",
    "device": "The device that it ran on.",
    "driver": "The driver's version.",
    "flops": "Their floating-point operations; a multiplication with its addition counts as two.",
    "footprint": "Bytes at the peak.",
    "gpu": "The GPU that it is predicted for.",
    "gradients": "Bytes a parameter.",
    "job": "What is trained.",
    "kernels": "How many kernels those are.",
    "kind": "What the bytes are for, one of the kinds in [words](words.md).",
    "kinds": "Bytes by kind at the peak.",
    "largest": "The largest tensors at the peak, the largest first.",
    "live_bytes": "What is alive then.",
    "loop": "The training loop: `plain`, `accelerate` or `trainer`.",
    "losses": "The loss of each step; null where it is no number.",
    "machine": "The GPU of the published figure, or the machine.",
    "measured": "Bytes as measured here.",
    "measurement": "What was measured.",
    "model": "The model's name.",
    "name": "The name that it has for itself.",
    "operator": "The operator that allocated them, by torch's name.",
    "operators": "Kernels of the steady step, by phase and operator group.",
    "phase": "`build`, `load`, `forward`, `backward`, `clip` or `update`.",
    "prediction": "What was predicted.",
    "published": "A published figure.",
    "reason": "Why they are there.",
    "recipe": "In the notation of recipes.",
    "reserved_bytes": "What the allocator has reserved then.",
    "samples_per_second": "As published.",
    "smi_nvml_bytes": "NVML's reading at that moment.",
    "states": "Of the optimizer, in bytes a parameter.",
    "timing": "Seconds of a step.",
    "uuid": "The GPU's, by NVML; null on a CPU.",
    "versions": "Packages that it was made with.",
}
"""Sentences for fields without one of their own, because the code's readers understand their names."""

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
"""Units by the end of a number's name."""


@cache
def keys(owner: type) -> dict[str, tuple[Any, str]]:
    """Return every key of an object with its type and its sentences."""
    own: dict[str, Any] = {}
    names: list[str] = []
    docs: dict[str, str] = {}
    if is_dataclass(owner):
        own = typing.get_type_hints(owner, localns={"nn": types.SimpleNamespace(Module=Any)})
        names, docs = [entry.name for entry in fields(owner)], SENTENCES | field_docs(owner)
    is_document = owner in documents().values()
    left_out, added = LEFT_OUT.get(owner, set()), ADDED.get(owner, _HEADS if is_document else {})
    written = {name: (own[name], docs.get(name, "")) for name in names if name not in left_out | set(added)}
    more = {name: (kind, text or getdoc(getattr(owner, name)) or "") for name, (kind, text) in added.items()}
    heads = {name: more.pop(name) for name in ("schema", "what") if name in more}
    return {**heads, **written, **more}


def parts(kind: Any) -> tuple[Any, ...]:
    """Return the types within a type: those of the members of a list, of values, of either."""
    return tuple(one for one in typing.get_args(kind) if one not in (type(None), Ellipsis))


def described_class(kind: Any) -> type | None:
    """Return the dataclass of a value of this type, or of its list. Return None for plain values."""
    if isinstance(kind, type) and kind is not Recipe and (is_dataclass(kind) or kind in ADDED):
        return kind
    inner = parts(kind)
    return described_class(inner[-1]) if inner else None


def type_words(kind: Any) -> str:
    """Return a type in JSON's terms."""
    origin, inner = typing.get_origin(kind), parts(kind)
    if origin in (types.UnionType, typing.Union):
        return f"{type_words(inner[0])} or null"
    if origin is tuple:
        several = typing.get_args(kind)[-1] is Ellipsis
        return (
            f"list of {type_words(inner[0])}" if several else f"list of {len(inner)}: {type_words(inner[0])}"
        )
    if origin in (Mapping, dict):
        return f"object of {type_words(inner[1])} by name"
    if described_class(kind):
        return f"[{title(kind)}](#{title(kind)})"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(f"`{one.value}`" for one in kind)
    return {int: "whole number", float: "number", bool: "true or false", Any: "any"}.get(kind, "text")


def title(owner: type) -> str:
    """Return a section's heading: the name of its class in small letters, words joined by dashes."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", owner.__name__).lower()


def unit(name: str, kind: Any) -> str:
    """Return the unit of a number by its name, or an empty text."""
    numbers = {int, float} & {kind, *parts(kind), *(one for part in parts(kind) for one in parts(part))}
    ending = next((end for end in UNITS if name == end or (end[0] == "_" and name.endswith(end))), "")
    return UNITS.get(ending, "") if numbers else ""


def objects(roots: Iterable[type]) -> Iterator[type]:
    """Yield every object of these documents once, in the order of first occurrence."""
    waiting, seen = list(roots), set[type]()
    while waiting:
        owner = waiting.pop(0)
        if owner not in seen:
            seen.add(owner)
            yield owner
            waiting += [one for kind, _ in keys(owner).values() if (one := described_class(kind))]


def cell(text: str) -> str:
    """Return words in a cell of a table, in one line."""
    return " ".join(text.split()).replace("|", "\\|")


def json_words(sentence: str) -> str:
    """Return a sentence with JSON's values in place of Python's."""
    for python, name in {"None": "null", "True": "true", "False": "false"}.items():
        sentence = re.sub(rf"\b{python}\b", name, sentence)
    return sentence


def json_page() -> str:
    """Return the page about JSON."""
    lines = [
        "# The JSON of the answers",
        "",
        "Written by `python lab/write_docs.py` from the classes that the commands print; a test holds"
        " it to real answers. Every command takes `--json` and prints one document. In Python"
        " `answer.to_json()` is the same. New keys may come; one that is here keeps its name and meaning."
        " Keys that kept an older word are explained in [words](words.md). A share is a number from 0 to 1,"
        " an error may be negative.",
        "",
        "| command | document |",
        "| --- | --- |",
        *(
            f"| `snugfit {command}` | [{title(owner)}](#{title(owner)}) |"
            for command, owner in documents().items()
        ),
    ]
    for owner in objects(documents().values()):
        lines += ["", f"## {title(owner)}", "", cell((getdoc(owner) or "").split("\n\n")[0]), ""]
        lines += ["| key | type | unit | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | {type_words(kind)} | {unit(name, kind)} | {cell(json_words(text))} |"
            for name, (kind, text) in keys(owner).items()
        ]
    return "\n".join(lines) + "\n"


MEMORY_AND_SPEED = {
    "adapters": ("weights' gradients and optimizer states", "less to update"),
    "attention": ("the score matrix", "fused kernels are faster"),
    "precision": ("weights, activations, gradients", "tensor cores"),
    "matmul": ("nothing", "tensor cores for fp32"),
    "head": ("logits of a language model, their softmax and its gradient", "a head more often read"),
    "checkpointing": ("activations", "computes layers again"),
    "batching": ("activations", "more and smaller kernels"),
    "optimizer": ("optimizer states, temporaries of the update", "the update"),
    "allocator": ("memory lost in pieces", "nothing"),
    "loading": ("host memory", "waiting for batches"),
}
"""Changes by a slot's techniques: of the memory, and of the speed."""


def techniques_page() -> str:
    """Return the page of all techniques."""
    lines = [
        "# Techniques",
        "",
        "Written by `python lab/write_docs.py` from the roster, which `snugfit techniques` prints too."
        " A recipe names at most one technique of each slot: `bf16 + every_layer + micro_batches(4)`. What it"
        " does not name is the slot's default, which is plain PyTorch.",
        "",
        "**Fidelity**: `same` computes the same sums, `rounds` rounds differently, `learns` is another"
        " algorithm that also learns. `snugfit plan --fidelity` says how far a plan may go.",
        "",
        "| slot | its techniques change in memory | in speed |",
        "| --- | --- | --- |",
        *(
            f"| [{slot}](#{slot}) | {memory} | {speed} |"
            for slot, (memory, speed) in MEMORY_AND_SPEED.items()
        ),
    ]
    slot = ""
    for technique in techniques():
        if technique.slot != slot:
            slot = str(technique.slot)
            heads = ("technique", "what it does", "fidelity", "settings", "needs", "elsewhere")
            lines += ["", f"## {slot}", "", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        default = " (default)" if technique.plain else ""
        row = (
            f"`{technique.name}`{default}",
            technique.summary(),
            str(technique.fidelity),
            "<br>".join(setting_words(technique, line) for line in setting_lines(technique)),
            "<br>".join(needs(technique)),
            "<br>".join(elsewhere(technique)),
        )
        lines.append(f"| {' | '.join(map(cell, row))} |")
    lines += [
        "",
        "*elsewhere*: the argument of transformers' `TrainingArguments` (or of peft) that means the same, and"
        " words of other libraries that a recipe understands.",
    ]
    return "\n".join(lines) + "\n"


def setting_words(technique: type[Technique], line: SettingLine) -> str:
    """Return a setting with its type, range, default and sentence."""
    metadata = next(entry.metadata for entry in fields(technique) if entry.name == line.name)
    bounds = f" from {metadata['low']:,} to {metadata['high']:,}" if metadata else ""
    default = "must be given" if line.default is None else f"default {line.default}"
    return f"`{line.name}`: {line.kind}{bounds}, {default}. {line.sentence}"


def needs(technique: type[Technique]) -> Iterator[str]:
    """Return the required packages and the required abilities of the GPU."""
    if technique.needs:
        yield f'{", ".join(technique.needs)}: `pip install "snugfit[{technique.extra}]"`'
    if capability := technique.least_capability:
        yield f"compute capability {capability[0]}.{capability[1]}"


def elsewhere(technique: type[Technique]) -> Iterator[str]:
    """Return its names in transformers and other libraries."""
    for counterpart in technique.counterparts:
        if counterpart.used == "to read":  # these names are our own
            continue
        pairs = (f"{name}={argument_words(value)}" for name, value in counterpart.arguments.items())
        if words := ", ".join(pairs):
            yield f"`{words}`{' (' + counterpart.note + ')' if counterpart.note else ''}"
    if technique.elsewhere:
        yield ", ".join(f"`{word}`" for word in technique.elsewhere)


def argument_words(value: Any) -> str:
    """Return an argument's value in Python's notation, or the name of the technique's setting."""
    return value.name if isinstance(value, Setting) else repr(value)


CUT = "...\n"
"""The last line of a shown output that is cut."""

CONSOLE = re.compile(r"^```console\n\$ ((?:[^\n]*\\\n)*[^\n]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shown_answers() -> dict[str, str]:
    """Return the answers in README and docs, by their command."""
    return {command: shown for page in PAGES for command, shown in CONSOLE.findall(page.read_text())}


def answer(command: str, shown: str) -> str:
    """Return the output of a shown command: all of it, or as many lines as are `shown` before `...`."""
    words = [sys.executable, "-m", *shlex.split(command.replace("\\\n", " "))]
    with TemporaryDirectory() as folder:
        places = os.environ | {"XDG_CACHE_HOME": folder, "SNUGFIT_RATES": folder, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=places, cwd=ROOT, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{command}: {done.stderr}")
    return as_shown(done.stdout, shown)


def as_shown(output: str, shown: str) -> str:
    """Return an output without spaces at line ends, cut where the `shown` text is."""
    lines = [line.rstrip() for line in output.splitlines()]
    if shown.endswith(CUT):
        lines = [*lines[: shown.count("\n") - 1], CUT.strip()]
    return "\n".join(lines).strip("\n") + "\n"


def main() -> None:
    """Write the pages."""
    if sys.argv[1:] == ["answers"]:
        new = {command: answer(command, shown) for command, shown in shown_answers().items()}
        for page in PAGES:
            text = CONSOLE.sub(lambda one: f"```console\n$ {one[1]}\n{new[one[1]]}```", page.read_text())
            page.write_text(text)
    (ROOT / "docs" / "techniques.md").write_text(techniques_page())
    (ROOT / "docs" / "json.md").write_text(json_page())


if __name__ == "__main__":
    main()
