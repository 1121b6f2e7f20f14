"""The comparison of one job's predictions in two Python environments."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.errors import UsageError
from snugfit.features.environments.environment import PythonEnvironment, find_environment
from snugfit.features.environments.process import run_module
from snugfit.job.job import Job
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.cli.request import Request


@dataclass(frozen=True, kw_only=True)
class EnvironmentPrediction:
    """A job's prediction with the packages of one environment."""

    python: str
    """Path of the environment's interpreter."""
    versions: Mapping[str, str]
    """Versions of the packages with which the step was simulated."""
    needed_bytes: int
    """Bytes that must be free on the device (`Prediction.needed_bytes`)."""
    kinds: Mapping[str, int]
    """Bytes at the peak by category, such as weights."""
    step_seconds: float | None
    """Seconds of a steady step; None if they are not predicted."""
    kernels: Mapping[str, int]
    """Number of kernels of a step by group of operators."""
    arguments: Mapping[str, tuple[str, ...]]
    """Names of arguments by function or class that the job uses, such as `TrainingArguments`."""
    fits: bool | None = None
    """True if the step fits in the memory; None without a memory limit."""
    doubts: tuple[str, ...] = ()
    """Warnings about the less certain parts of this prediction, as sentences."""


@dataclass(frozen=True, kw_only=True)
class ValueChange:
    """A value that differs between the two environments."""

    name: str
    """Name of the value, such as `activations`."""
    unit: str
    """`bytes`, `seconds`, `kernels` or `version`."""
    before: float | str | None
    """The value before the upgrade; None without one."""
    after: float | str | None
    """The value after the upgrade; None without one."""


@dataclass(frozen=True, kw_only=True)
class ArgumentChange:
    """Arguments of one function or class that only one of the two environments has."""

    owner: str
    """Name of the function or class, such as `BertConfig`."""
    added: tuple[str, ...] = ()
    """Names that only the environment after the upgrade has."""
    removed: tuple[str, ...] = ()
    """Names that only the environment before the upgrade has."""


@dataclass(frozen=True, kw_only=True)
class UpgradeCheck(JsonDocument):
    """One job's predictions before and after an upgrade of packages, and their differences."""

    what: ClassVar = "upgrade-check"

    job: Job
    recipe: Recipe
    loop: str
    gpu: str | None
    """Name of the GPU model; None for none."""
    before: EnvironmentPrediction
    """Prediction in the environment before the upgrade."""
    after: EnvironmentPrediction
    """Prediction in the environment after the upgrade."""
    changes: tuple[ValueChange, ...] = field(default=())
    """Versions, bytes, seconds and kernels that differ, in this order."""
    argument_changes: tuple[ArgumentChange, ...] = field(default=())
    """Arguments that differ, by function or class."""


def check_upgrade(request: Request, before: str | None, after: str, *, install: bool) -> UpgradeCheck:
    """Return the comparison of the request's job in two environments. `before` is by default the present one.

    Raises `UsageError` for an unusable environment, or if the job cannot be predicted in one of them.
    """
    if request.job.model.module is not None or request.has_auto:
        raise UsageError(
            "upgrade-check compares one recipe of a model by name. Give a model or a job file, and a recipe "
            "without auto."
        )
    first = find_environment(before, install=install) if before else PythonEnvironment(Path(sys.executable))
    both = (first, find_environment(after, install=install))
    question = {
        "job": request.job.to_json(),
        "recipe": str(request.recipe),
        "gpu": request.gpu.key if request.gpu else None,
        "gpus": request.gpus,
        "memory_bytes": request.memory_bytes,
        "loop": request.loop,
    }
    # Each prediction is a process of its own, so two threads run them at once.
    with ThreadPoolExecutor(2) as executor:
        one, other = executor.map(lambda environment: _predict_in(environment, question), both)
    return UpgradeCheck(
        job=request.job,
        recipe=request.recipe,
        loop=request.loop,
        gpu=request.gpu.name if request.gpu else None,
        before=one,
        after=other,
        changes=tuple(_changes(one, other)),
        argument_changes=tuple(_argument_changes(one, other)),
    )


def _predict_in(environment: PythonEnvironment, question: Mapping[str, Any]) -> EnvironmentPrediction:
    """Return the prediction in another environment. Raises `UsageError` if there is none."""
    with tempfile.TemporaryDirectory(prefix="snugfit-upgrade-") as folder:
        request_file, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        request_file.write_text(json.dumps(question))
        code = run_module(
            environment, "snugfit.features.environments.worker", [str(request_file), str(answer)]
        )
        if not answer.exists():
            raise UsageError(
                f"The prediction in {environment.python} ended with exit code {code}. Run the job there with "
                f"snugfit predict --software {environment.python}."
            )
        document = json.loads(answer.read_text())
    if "error" in document:
        raise UsageError(f"In {environment.python}: {document['error']}")
    prediction = Prediction.from_json(document["prediction"])
    kernels = Counter[str]()
    for line in prediction.anatomy.operators:
        kernels[line.group] += line.kernels
    return EnvironmentPrediction(
        python=str(environment.python),
        versions=prediction.versions,
        needed_bytes=prediction.needed_bytes,
        kinds={str(line.kind): line.bytes for line in prediction.anatomy.kinds},
        step_seconds=prediction.timing.step_seconds if prediction.timing else None,
        kernels=dict(kernels),
        arguments={owner: tuple(names) for owner, names in document["arguments"].items()},
        fits=prediction.fits,
        doubts=prediction.doubts,
    )


def _changes(one: EnvironmentPrediction, other: EnvironmentPrediction) -> Iterator[ValueChange]:
    tables: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("version", one.versions, other.versions),
        ("bytes", {"needed": one.needed_bytes, **one.kinds}, {"needed": other.needed_bytes, **other.kinds}),
        ("seconds", {"step": one.step_seconds}, {"step": other.step_seconds}),
        ("kernels", one.kernels, other.kernels),
    )
    for unit, before, after in tables:
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                yield ValueChange(name=name, unit=unit, before=before.get(name), after=after.get(name))


def _argument_changes(one: EnvironmentPrediction, other: EnvironmentPrediction) -> Iterator[ArgumentChange]:
    for owner in dict.fromkeys((*one.arguments, *other.arguments)):
        before, after = one.arguments.get(owner, ()), other.arguments.get(owner, ())
        if set(before) != set(after):
            yield ArgumentChange(
                owner=owner,
                added=tuple(name for name in after if name not in before),
                removed=tuple(name for name in before if name not in after),
            )
