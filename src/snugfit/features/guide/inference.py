"""Predictions of the guide's `torch.compile` backends for inference, and of its six categories of GPU memory.

Engines were measured on a CPU. `lab/engine_speed.py --guide` copies their ratios from a file under `results/`
to `measured_engines.json`, since a wheel has no such files.

The backends are predicted on an evaluation of the guide's own job. The kinds of memory are those of a
training step of that job, and of text generation with one beam and with several. The cache and the logits of
the generation are the guide's functionality-specific memory.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.errors import JobError, RecipeError
from snugfit.features.guide.predictions import PredictionRequest, predict_all
from snugfit.features.guide.suite import VANILLA, inference, job_of, suite, without_figures
from snugfit.job.job import Phase
from snugfit.prediction.profile import installed_versions
from snugfit.report.text.job import job_line
from snugfit.results.footprint import Kind
from snugfit.results.speed import StepSpeed
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import first_sentence

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "model weights": (Kind.WEIGHTS, Kind.GATHERED),
    "optimizer states": (Kind.OPTIMIZER_STATES,),
    "gradients": (Kind.GRADIENTS,),
    "forward activations": (Kind.ACTIVATIONS,),
    "temporary buffers": (Kind.TEMPORARIES, Kind.CACHES, Kind.WORKSPACES, Kind.INPUTS, Kind.COMMUNICATION),
    "functionality-specific memory": (Kind.KEY_VALUES, Kind.LOGITS),
}
"""The guide's six kinds of memory, with the kinds of a predicted footprint that each one comprises."""


@dataclass(frozen=True, kw_only=True)
class BackendRow:
    """One `torch.compile` backend from the guide: its availability in the installed torch, and its predicted
    memory and time.
    """

    name: str
    """Name of the inference backend in Hugging Face's guide."""
    guide: str
    """The guide's claim about the backend; empty if the guide does not name it."""
    state: str
    """Availability in the installed torch: `registered`, `gone`, or `needs` with a package."""
    today: str
    """The backend's present replacement, or a remark."""
    recipe: str = ""
    """The recipe that runs this backend; empty without one."""
    needed_bytes: int | None = None
    """Predicted GPU memory of an evaluation, in bytes; None without a prediction."""
    speed: StepSpeed | None = None
    """Predicted speed of an evaluation; None without a prediction."""
    refused: str = ""
    """Reason for a missing prediction; empty for none."""
    measured_engine: str = ""
    """Name of the same engine in `MeasuredEngines`; empty if the backend was not measured."""


@dataclass(frozen=True, kw_only=True)
class EngineRatio:
    """One engine on one job, compared with eager torch."""

    job: str
    """Model, phase and batch of the measurement, in words."""
    engine: str
    """Recipe of the engine, or torch's own `eager` and `fastpath`."""
    times_faster_cpu: float
    """Median CPU seconds of eager torch divided by those of the engine."""
    times_faster_wall: float
    """Median wall seconds of eager torch divided by those of the engine."""
    largest_error: float | None = None
    """Largest absolute difference to eager torch's outputs in fp32; None for eager torch itself."""
    ids_equal: bool | None = None
    """True if the engine chose the same tokens or classes as eager torch; None if they were not compared."""


@dataclass(frozen=True, kw_only=True)
class MeasuredEngines:
    """Measured speeds of inference engines, which ran in turns on one machine."""

    source: str
    """File of snugfit's repository with all measured figures."""
    machine: str
    """Processor, its number of cores, and the number of threads in use."""
    date: str
    """Day of the measurement, as in 2026-11-30."""
    versions: Mapping[str, str]
    """Versions of the measured engines' packages, by package name."""
    rows: tuple[EngineRatio, ...]
    """Ratios of each engine on each of its jobs, with eager torch as 1."""

    def of(self, engine: str) -> Sequence[EngineRatio]:
        """Return the measured rows of one engine, one for each of its jobs."""
        return [row for row in self.rows if row.engine == engine]


@dataclass(frozen=True, kw_only=True)
class MemoryOfJob:
    """Predicted bytes at the peak of one job, by the guide's categories of memory."""

    name: str
    """Short name of the job in the table."""
    job: str
    """The job in words."""
    kinds: Mapping[str, int]
    """Predicted bytes by the guide's kind of memory; empty without a prediction."""
    refused: str = ""
    """Reason for a missing prediction; empty for none."""


@dataclass(frozen=True, kw_only=True)
class InferenceGuide(JsonDocument):
    """The guide's `torch.compile` backends and categories of memory, with predictions for one GPU."""

    what: ClassVar = "guide --inference"

    gpu: str
    """Name of the GPU that the predictions are for."""
    job: str
    """The evaluation that the backends run, in words."""
    backends: tuple[BackendRow, ...]
    """Rows of the inference backends: those of the guide in its order, then further ones."""
    memory: tuple[MemoryOfJob, ...]
    """Predicted memory by kind of a training step, and of generations with few and many beams."""
    measured: MeasuredEngines
    """Measured ratios of engines to eager torch on a CPU."""
    versions: Mapping[str, str]
    """Versions of the packages that predicted, by package name."""
    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of the predictions."""


def measured_engines() -> MeasuredEngines:
    """Return the measured ratios of engines to eager torch that snugfit contains."""
    text = files("snugfit.features.guide").joinpath("measured_engines.json").read_text(encoding="utf-8")
    facts = json.loads(text)
    return MeasuredEngines(**{**facts, "rows": tuple(EngineRatio(**row) for row in facts["rows"])})


def run_inference(
    gpu: Gpu, *, workers: int = 1, tell: Callable[[str], None] = lambda line: None
) -> InferenceGuide:
    """Return the backends and the categories of memory, predicted for this GPU by `workers` processes."""
    facts, measured = inference(), measured_engines()
    vanilla = next(experiment for experiment in suite() if experiment.name == VANILLA)
    job = replace(vanilla.job(), phase=Phase.EVALUATE)
    recipes = [recipe for line in facts["backends"] if (recipe := _known_recipe(line))]
    requests = [PredictionRequest(about=recipe, job=job, recipe=recipe, gpu=gpu) for recipe in recipes]
    memory: list[PredictionRequest | str] = [
        PredictionRequest(about="training", job=vanilla.job(), recipe=vanilla.recipe, gpu=gpu)
    ]
    for beams in facts["beams"]:
        settings = {"new_tokens": facts["new_tokens"], "beams": beams}
        try:
            generation = job_of({**facts["job"], "phase_settings": settings})
        except JobError as error:
            # The phase `generate` belongs to a feature that may be deleted.
            memory.append(f"generation: {error}")
            continue
        memory.append(
            PredictionRequest(about=f"generation, beams={beams}", job=generation, recipe="plain", gpu=gpu)
        )
    known = [prediction for prediction in memory if not isinstance(prediction, str)]
    answers = predict_all([*requests, *known], workers=workers, tell=tell)
    by_recipe = dict(zip(recipes, answers, strict=False))
    rest = iter(answers[len(recipes) :])
    jobs = [
        MemoryOfJob(name="generation", job="", kinds={}, refused=prediction)
        if isinstance(prediction, str)
        else _memory(prediction, next(rest))
        for prediction in memory
    ]
    doubts = (doubt for answer in answers if not isinstance(answer, str) for doubt in answer.doubts)
    return InferenceGuide(
        gpu=gpu.name,
        job=job_line(job),
        backends=tuple(_backends(facts["backends"], by_recipe, measured)),
        memory=tuple(jobs),
        measured=measured,
        versions=installed_versions(),
        doubts=tuple(dict.fromkeys(doubts)),
    )


def _known_recipe(line: Mapping[str, str]) -> str:
    """Return the recipe that uses a backend; empty if there is none, or if its technique belongs to a missing
    feature.
    """
    try:
        Recipe.parse(recipe := line.get("recipe", ""))
    except RecipeError:
        return ""
    return recipe


def _backends(
    lines: list[dict[str, Any]], answers: Mapping[str, Prediction | str], measured: MeasuredEngines
) -> Iterator[BackendRow]:
    """Yield a row for each `torch.compile` backend in the guide's data."""
    import torch._dynamo

    registered = torch._dynamo.list_backends(None)
    guide = {line.name: line.guide for line in without_figures()}
    for line in lines:
        package = line.get("package", "")
        lacks = package and importlib.util.find_spec(package) is None
        in_torch = "registered" if line["backend"] in registered else "gone"
        row = BackendRow(
            name=line["name"],
            guide=guide.get(line["name"], ""),
            state=f"{in_torch}; needs {package}" if lacks else in_torch,
            today=line["today"],
            recipe=_known_recipe(line),
            # The speed was measured with the recipe of this name, even if its feature is missing here.
            measured_engine=line["recipe"] if measured.of(line.get("recipe", "")) else "",
        )
        answer = answers.get(row.recipe)
        if isinstance(answer, str):
            # The error begins with the technique, which the row shows already.
            reason = answer.strip().rpartition("\n")[2].removeprefix(f"{row.recipe}: ")
            row = replace(row, refused=first_sentence(reason) or reason)
        elif answer is not None:
            row = replace(row, needed_bytes=answer.needed_bytes, speed=answer.speed)
        yield row


def _memory(request: PredictionRequest, answer: Prediction | str) -> MemoryOfJob:
    row = MemoryOfJob(name=request.about, job=job_line(request.job), kinds={})
    if isinstance(answer, str):
        return replace(row, refused=answer)
    nbytes = answer.footprint.kinds
    return replace(
        row, kinds={name: sum(nbytes.get(kind, 0) for kind in kinds) for name, kinds in KINDS.items()}
    )
