"""Adds the changes of a recipe with which a step fits to predictions, plans and errors.

The core calls this module (`Feature.changes_that_fit`). After an out-of-memory error, changes are computed
for the job of the run and the memory of its GPU, without use of the GPU. The original error is never lost:
without an answer it is raised as it is.

**Sentences.** Sentences on the changes with which a step fits, for reports and for errors.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from snugfit.errors import OutOfMemory
from snugfit.job.gpu import find_gpu
from snugfit.report.text.answer import show_gib
from snugfit.report.text.facts import LABEL, Facts
from snugfit.report.text.pace import roughly
from snugfit.report.text.page import Sentence
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut
from snugfit.units import show_bytes, show_seconds

if TYPE_CHECKING:
    import torch

    from snugfit.cli.request import Request
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan
    from snugfit.results.measurement import Measurement
    from snugfit.results.prediction import Prediction
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Fidelity, Slot, Technique
    from snugfit.training.journal import Event


__all__ = (
    "about_ways_out",
    "end_with_ways_out",
    "in_short",
    "prepare_search",
    "show_after_measurement",
    "with_ways_out",
    "with_ways_out_of_plan",
)
"""Functions of this feature that the core calls."""

ON_GPU = "oom:"
"""Prefix of recorded causes of a failure that mean exhausted GPU memory."""

SEARCH_MESSAGE = "Memory ran out. Changes of the recipe that fit are looked for; nothing trains meanwhile."

MEMORY_SHARE = 0.9
"""Memory limit for suggested changes, as a share of the predicted need. It applies if a step that was
predicted to fit did not fit.
"""

# ---- answers -----------------------------------------------------------------------------------------------


def prepare_search(request: Request) -> None:
    """Prepare a search for changes before the prediction, which costs milliseconds if none follows."""
    from snugfit.frontends.one_of_several import OWN_PROCESS

    limited = request.gpu is not None or request.memory_bytes is not None
    searched = limited and request.gpus == 1 and request.job.added_phase is None and not _is_refused(request)
    # A copy of a test's or notebook's process would occupy its memory until that process ends.
    if searched and OWN_PROCESS.get():
        from snugfit.features.ways_out.early_server import start_as_copy
        from snugfit.planning.request import workers_of

        start_as_copy(request.job, workers_of(None))


def with_ways_out(request: Request, predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions; if none of them fits, the first one has the changes with which the step would
    fit.

    For several GPUs there are none, and the report names the command of a plan instead.
    """
    first, *further = predictions
    # The search compares training steps, and does not support other phases.
    if any(prediction.fits is not False for prediction in predictions) or first.job.added_phase is not None:
        return [*predictions]
    if _is_refused(request):
        return [*predictions]
    if first.gpus > 1:
        return [replace(first, ways_out=WaysOut()), *further]
    named = {
        **{prediction.slot: prediction for prediction in first.recipe if not prediction.plain},
        **request.named,
    }
    return [replace(first, ways_out=_ways_out(request, first, named)), *further]


def with_ways_out_of_plan(request: Request, plan: Plan) -> Plan:
    """Return the plan; if nothing fits, it has the changes with which its nearest miss would fit."""
    if plan.fits or plan.gpu is None or _is_refused(request):
        return plan
    from snugfit.prediction.predict import predict
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Fidelity

    nearest = predict(plan.job, Recipe.parse(plan.nearest.recipe), gpu=plan.gpu)
    limited = replace(nearest, memory_bytes=plan.memory_bytes, headroom_bytes=plan.headroom_bytes)
    fixed = {slot.slot for slot in plan.kept}
    named = {technique.slot: technique for technique in limited.recipe if technique.slot in fixed}
    return replace(plan, ways_out=_ways_out(request, limited, named, beyond=Fidelity(plan.fidelity)))


def _is_refused(request: Request) -> bool:
    """Return True if the command's options turn off the search for changes that fit (`--no-ways-out`)."""
    # `--quiet` prints only the first line, in which no change appears.
    return any(request.flags.get(name) for name in ("no_ways_out", "quiet"))


def _ways_out(
    request: Request,
    prediction: Prediction,
    named: Mapping[Slot, Technique],
    *,
    beyond: Fidelity | None = None,
) -> WaysOut:
    """Return the changes of a recipe with which a step would fit, from the cache or by a search."""
    from snugfit.cli.plan_cache import answer

    def compute(tell: Callable[[str], None]) -> WaysOut:
        from snugfit.features.ways_out.search import ways_out
        from snugfit.planning.request import workers_of

        # With two workers, changes for an 8B model are found within 20 seconds on two cores.
        return ways_out(prediction, keep=named, beyond=beyond, workers=workers_of(None), tell=tell)

    arguments: dict[str, Any] = {
        "memory_bytes": prediction.memory_bytes,
        "headroom_bytes": prediction.headroom_bytes,
        "loop": prediction.loop,
        "software": prediction.software,
    }
    return answer(
        WaysOut.from_json,
        compute,
        prediction.job,
        prediction.gpu,
        fresh=request.flags.get("fresh", False),
        first=f"searching changes of '{prediction.recipe}' that fit",
        what="ways out",
        recipe=str(prediction.recipe),
        named=sorted(map(str, named)),
        beyond=beyond,
        gpus=[prediction.gpus],
        **arguments,
    )


# ---- out of memory -----------------------------------------------------------------------------------------


def show_after_measurement(measured: Measurement, request: Request, gpu: str | None) -> None:
    """Print the changes with which a step fits on stderr, after a run on one GPU ran out of memory.

    `gpu` is the name of this machine's GPU; None without one.
    """
    if not measured.outcome.startswith("oom") or measured.gpus > 1 or gpu is None:
        return
    typer.echo("snugfit: searching changes of the recipe that fit ...", err=True)
    total, reserve = measured.device.total_bytes, measured.device.reserve_bytes
    memory = total - (reserve or 0) if total else None
    if text := ways_out_of(request.job, request.recipe, gpu, memory, loop=request.loop):
        typer.echo(text, err=True)


@contextmanager
def end_with_ways_out(
    job: Job,
    recipe: Recipe,
    device: torch.device,
    gpus: int = 1,
    watch: Callable[[Event], None] = lambda event: None,
) -> Iterator[None]:
    """Context that adds changes that fit to the message of a GPU's `OutOfMemory`. `watch` receives a note
    before the search.

    Errors after which a run starts again, and those of a run on several GPUs, stay as they are.
    """
    try:
        yield
    except OutOfMemory as error:
        if type(error) is not OutOfMemory or ON_GPU not in str(error):
            raise
        if device.type != "cuda" or gpus > 1:
            raise
        import torch

        watch({"event": "note", "text": SEARCH_MESSAGE})
        total = torch.cuda.mem_get_info(device)[1]
        if not (text := ways_out_of(job, recipe, torch.cuda.get_device_name(device), total)):
            raise
        raise OutOfMemory(f"{error}\n{text}") from error


def ways_out_of(
    job: Job, recipe: Recipe, gpu: Gpu | str, memory_bytes: int | None = None, *, loop: str = "plain"
) -> str:
    """Return lines with the changes of a recipe with which the step fits a GPU of this memory; empty if none
    can be computed.
    """
    try:
        return "\n".join(_lines(job, recipe, gpu, memory_bytes, loop))
    except Exception:  # the caller raises an error of its own, which another one must not hide
        return ""


def _lines(job: Job, recipe: Recipe, gpu: Gpu | str, memory_bytes: int | None, loop: str) -> list[str]:
    from snugfit.features.ways_out.search import ways_out
    from snugfit.prediction.predict import predict
    from snugfit.report.plan.ways_out import of_prediction

    limited = _too_large(predict(job, recipe, gpu=gpu, loop=loop), memory_bytes)
    return of_prediction(replace(limited, ways_out=ways_out(limited)))


def _too_large(prediction: Prediction, memory_bytes: int | None) -> Prediction:
    """Return the prediction with a memory limit that it exceeds: the given limit, or one below its predicted
    need.
    """
    limit = min(filter(None, (memory_bytes, prediction.memory_bytes)), default=prediction.needed_bytes)
    limit = (
        min(limit, int(MEMORY_SHARE * prediction.needed_bytes)) if prediction.needed_bytes <= limit else limit
    )
    return replace(prediction, memory_bytes=limit)


# ---- sentences ---------------------------------------------------------------------------------------------


MAX_SUGGESTED = 3
"""Number of suggested changes from which no further command is suggested."""

NO_SLOWDOWN = 0.0005
"""Relative slowdown of a step below which it is not shown."""

FIDELITY = {"same": "exact", "rounds": "rounds differently", "learns": "another algorithm"}
"""Description of each fidelity (agreement with the unchanged training) of a suggested change."""


def about_ways_out(ways: WaysOut, command: str, of: str = "the recipe", turn: str = "step") -> Iterator[str]:
    """Yield a heading, a line for each change and the first one as an option.

    With few changes, a further `command` follows. `of` is the name of the recipe that they change. `turn` is
    the noun for a step.
    """
    if ways.ways:
        yield f"Changes of {of} that fit, the cheapest first (predicted):"
        for number, way in enumerate(ways.ways, 1):
            yield f"{number}. {_about(way, turn)}"
        yield f"The first one: --recipe {shlex.quote(ways.ways[0].recipe)}"
    elif ways.larger_gpu:
        yield f"No change of {of} was found that fits. {_about_larger(ways.larger_gpu, turn)}"
    if len(ways.ways) < MAX_SUGGESTED and command:
        yield f"A plan searches all techniques: {command}"


def in_short(ways: WaysOut, turn: str = "step") -> Iterator[Facts | Sentence]:
    """Yield lines of a report: each change that fits, then the option `--recipe` for the first one. Without a
    change, a larger GPU is named. `turn` is the noun for a step.
    """
    changes = [_about(way, turn) for way in ways.ways] or [_about_larger(ways.larger_gpu, turn)]
    if rows := tuple(("" if number else "fits with", text) for number, text in enumerate(changes) if text):
        yield Facts(rows)
    if ways.ways:
        option = f"--recipe {shlex.quote(ways.ways[0].recipe)}"
        yield Sentence(f"{'':{LABEL}}  {option}", "recipe")


def _about(way: WayOut, turn: str) -> str:
    figures = [show_gib(way.needed_bytes)]
    if way.step_seconds is not None:
        figures += [f"{roughly(way.step_seconds)} a {turn}{_slowdown(way.slowdown)}"]
    figures += [FIDELITY[way.fidelity]]
    figures += [f"tight: {show_bytes(way.spare_bytes)} to spare"] if way.tight else []
    return f"{' + '.join(way.changes)}: {', '.join(figures)}."


def _slowdown(share: float | None) -> str:
    if share is None:
        return ""
    return " (no slower)" if abs(share) < NO_SLOWDOWN else f" ({100 * share:+.1f} %)"


def _about_larger(larger: LargerGpu | None, turn: str) -> str:
    if larger is None:
        return ""
    figures = show_bytes(larger.needed_bytes)
    figures += f", {show_seconds(larger.step_seconds)} a {turn}" if larger.step_seconds is not None else ""
    return (
        f"The smallest GPU that fits is {find_gpu(larger.gpu, exact=True).name}, with "
        f"{show_bytes(larger.memory_bytes)}: {larger.recipe} takes {figures}."
    )
