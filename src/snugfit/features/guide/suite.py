"""The guide's experiments as data: training runs, published figures, and recipes in snugfit's notation.

The figures are those of Hugging Face's "Efficient training on a single GPU" (transformers v4.25 docs).
`guide.json` has them with the machines on which they were measured. A figure can only be predicted if the GPU
and package versions of its machine are known.

The chapters on DeepSpeed and on torch.compile (the page's next revision) give no figures. Their methods are
listed with their availability today, and with the reason if one is not predicted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from snugfit.job.job import Job, Task
from snugfit.job.model import Model

VANILLA = "vanilla"
"""Name of the experiment without any method, the baseline of all comparisons."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The computer on which some published figures were measured: its GPU and package versions, as far as
    known.
    """

    name: str
    """Name of the machine in `guide.json`."""
    gpu: str | None
    """GPU of the machine; None if the guide's authors do not name it."""
    note: str
    """Further facts about the machine."""
    software: str | None = None
    """Name of the software versions at that time; None for the installed ones."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published result of an experiment in the guide: memory and speed on a machine."""

    machine: str
    mib: int
    """GPU memory in use after training, in MiB, as NVML shows it."""
    seconds: float | None = None
    """Seconds of the whole training; None if not published."""
    samples_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class GuideExperiment:
    """One experiment of the guide: a name, a recipe (training techniques), and its published results."""

    name: str
    """The guide's name for the experiment."""
    recipe: str
    """Recipe of the experiment in the notation of recipes."""
    loop: str = "plain"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values of job fields that differ from the guide's basic job."""
    published: tuple[Published, ...] = ()
    """Published results, one for each machine."""

    def job(self) -> Job:
        """Return the guide's training job (model, task and batch), with this experiment's changes."""
        return job_of({**_guide()["job"], **self.changes})


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the guide's table of methods, in the guide's wording."""

    method: str
    experiments: tuple[str, ...]
    """Names of the experiments that use the method; empty if it is not predicted."""
    speed: str
    """The guide's wording on the method's effect on speed."""
    memory: str
    """The guide's wording on the method's effect on memory; brackets mean `hardly`."""


@dataclass(frozen=True, kw_only=True)
class WithoutFigure:
    """A method that the guide describes without a published figure of memory or speed."""

    chapter: str
    """Chapter of the guide: `torch.compile` or `DeepSpeed`."""
    name: str
    """The guide's name for the technique."""
    guide: str
    """The guide's claim about the technique."""
    status: str
    """`predicted`, `not predicted`, or `gone` if torch no longer has the technique."""
    today: str
    """Present state of the technique, and the reason for a missing prediction."""
    instead: str = ""
    """Recipes that replace the technique today; empty if it does not concern training."""
    experiment: str = ""
    """Name of the experiment that predicts the technique; empty for none."""


@dataclass(frozen=True, kw_only=True)
class LargeModel:
    """A model for which the guide recommends DeepSpeed, and a recipe with it, or without it today."""

    name: str
    """The model, and the method of training it."""
    job: Mapping[str, Any]
    """Fields of the job, in the form that `job_of` reads."""
    gpu: str
    """Name of the GPU on which the model should fit."""
    recipe: str
    """Recipe in the notation of recipes."""
    why: str
    """Tensors that the recipe offloads, or the reason why offloading is unnecessary."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Published GPU memory at a stage before any training, such as after loading the model."""

    machine: str
    what: str
    """Stage of the run at which memory was read, such as after loading the weights."""
    mib: int
    """GPU memory in MiB, as NVML reported it."""


def suite() -> tuple[GuideExperiment, ...]:
    """Return the guide's experiments, the baseline first."""
    return tuple(
        GuideExperiment(
            name=row["name"],
            recipe=row["recipe"],
            loop=row.get("loop", "plain"),
            changes=row.get("job", {}),
            published=tuple(Published(**printed) for printed in row["published"]),
        )
        for row in _guide()["experiments"]
    )


def machines() -> dict[str, Machine]:
    """Return the machines on which the guide's published numbers were measured, by name."""
    keys = ("gpu", "note", "software")
    return {
        name: Machine(name=name, **{key: facts[key] for key in keys if key in facts})
        for name, facts in _guide()["machines"].items()
    }


def source() -> str:
    """Return the address of the page with the published figures."""
    return str(_guide()["source"])


def baselines() -> tuple[Baseline, ...]:
    """Return the published GPU memory at each stage before training."""
    return tuple(Baseline(**line) for line in _guide()["baselines"])


def methods() -> tuple[Method, ...]:
    """Return the rows of the guide's table of methods."""
    return tuple(
        Method(**{**line, "experiments": tuple(line["experiments"])}) for line in _guide()["methods"]
    )


def without_figures() -> tuple[WithoutFigure, ...]:
    """Return the methods in the chapters on torch.compile and DeepSpeed."""
    return tuple(WithoutFigure(**line) for line in _guide()["without_figures"])


def large_models() -> tuple[LargeModel, ...]:
    """Return the large models that replace the guide's chapter on DeepSpeed."""
    return tuple(LargeModel(**line) for line in _guide()["large_models"])


def anatomy() -> Mapping[str, Any]:
    """Return the guide's rules for bytes per parameter, the jobs that test them, and reasons for the
    differences.
    """
    return dict(_guide()["anatomy"])


def inference() -> Mapping[str, Any]:
    """Return the data on the guide's `torch.compile` backends, and the text generation that shows its memory
    categories.
    """
    return dict(_guide()["inference"])


def own_gpu() -> str:
    """Return the GPU on which the guide's own figures were measured."""
    return next(machine.gpu for machine in machines().values() if machine.gpu)


def job_of(facts: Mapping[str, Any]) -> Job:
    """Return the training job that has these fields, such as the model's name.

    The guide builds its models in fp32.
    """
    return Job(
        **{"dtype": "float32", **facts, "model": Model.find(facts["model"]), "task": Task(facts["task"])}
    )


@cache
def _guide() -> dict[str, Any]:
    text = files("snugfit.features.guide").joinpath("guide.json").read_text(encoding="utf-8")
    guide: dict[str, Any] = json.loads(text)
    return guide
