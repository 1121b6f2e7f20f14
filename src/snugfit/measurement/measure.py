"""Measuring: one experiment, in a process of its own, on a GPU that is proven clean.

    the parent                                  the child (child.py)
    finds the GPU by NVML, waits until clean
    writes the request                 ----->   builds the Step, warms up, runs the steady steps
    sleeps; a thread samples NVML               reads the allocator's peaks; nvidia-smi once
    judges how it ended                <-----   writes its findings
    waits until the GPU is clean again

The parent never touches CUDA, uses no CPU while it waits (but for NVML's readings), and believes nothing that
it cannot check: a run that died has a cause, a GPU that was shared has a reason, a result is a file that came
whole. Models that live only in this Python process are refused here: a fresh process could get them only by
pickle, which runs whatever it finds; `snugfit.watch()` measures those in place.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import JobError, UsageError, did_you_mean
from snugfit.job.job import Job, refuse_what_is_no_job
from snugfit.measurement import causes, contamination
from snugfit.measurement import ledger as ledger_files
from snugfit.measurement.child import HISTORY_STEP
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.environment import child_environment
from snugfit.measurement.process import Child, ChildExit
from snugfit.measurement.sampler import Sampler
from snugfit.measurement.stopwatch import timing_of
from snugfit.measurement.target import Target, open_target
from snugfit.results.footprint import Footprint
from snugfit.results.measurement import Measurement
from snugfit.step.step import LOOPS
from snugfit.techniques.recipe import Recipe

LARGEST_STEPS = 100_000

_LAST_LINES = 20
"""Of a dead child's words, kept in the measurement; the ledger keeps all that was kept."""


@dataclass(frozen=True, kw_only=True)
class MeasurementRequest:
    """What is to be measured, and how long."""

    job: Job
    recipe: Recipe
    loop: str
    warmup: int
    """Steps before the steady ones, not timed; their bytes count."""
    steps: int
    """Steady steps."""
    deadline_seconds: float
    history: Path | None
    """Where the allocator's recorded history goes, when it is wanted."""


def measure(
    job: Job,
    recipe: Recipe | str = "plain",
    *,
    loop: str = "plain",
    device: str | None = None,
    gpu_index: int = 0,
    warmup: int = 3,
    steps: int = 10,
    deadline_seconds: float = 600.0,
    ledger: Path | str | None = Path("snugfit-runs"),
    record_history: Path | str | None = None,
) -> Measurement:
    """Runs the job under the recipe (which may be text) in a fresh process and gives what it took.

    `device` is `cpu`, `cuda`, or None for a GPU if there is one; `gpu_index` counts as CUDA does. A run that
    dies is a measurement too: its `outcome` is the cause. `ledger` is the folder where it is kept, or None.
    `record_history` writes torch's recorded allocations of the first three steps to that file (for
    pytorch.org/memory_viz; recording slows the steps down). Raises `UsageError` for what cannot be measured.
    """
    refuse_what_is_no_job(job)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    experiment = MeasurementRequest(
        job=job,
        recipe=recipe,
        loop=loop,
        warmup=warmup,
        steps=steps,
        deadline_seconds=deadline_seconds,
        history=_path_of("record_history", record_history),
    )
    root = _path_of("ledger", ledger)
    _refuse(experiment)
    with open_target(device, gpu_index, environment=os.environ) as place:
        recipe.check(job, place.card.capability() if place.card else None)
        if record_history is not None and place.type != "cuda":
            raise UsageError("A memory history is recorded by the CUDA allocator; there is no GPU here.")
        if root is None:
            return perform(experiment, place)[0]
        with ledger_files.prepared(root):
            measurement, words = perform(experiment, place)
            ledger_files.write(root, measurement, words)
    return measurement


def perform(experiment: MeasurementRequest, place: Target) -> tuple[Measurement, str]:
    """The experiment at its place: the measurement, and the last words of the measured process."""
    ground = contamination.before(place.card, patience=contamination.PATIENCE) if place.card else None
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="snugfit-") as room:
        request, result = Path(room) / "request.json", Path(room) / "result.json"
        write_document(request, _request(experiment, place, ground))
        with Child(child_command(request, result), environment=_environment(experiment, place)) as child:
            with _sampling(place, child) as sampler:
                ending = child.wait(experiment.deadline_seconds)
        findings, outcome = judge(ending, result)
        _keep_history(Path(room) / "history.pickle", experiment.history)
    if outcome == causes.REFUSED:
        raise UsageError(findings.message)
    measurement = Measurement(
        job=experiment.job,
        recipe=experiment.recipe,
        loop=experiment.loop,
        device=place.describe(findings.device_name, findings.total_bytes),
        outcome=outcome,
        footprint=_footprint(findings, _growth(sampler, ground)),
        timing=timing_of(findings.seconds, experiment.job.batch_size, findings.quiet),
        versions=findings.versions,
        when=when,
        startup=findings.startup,
        first_context_bytes=findings.first_context_bytes,
        smi_bytes=findings.smi_bytes,
        smi_nvml_bytes=findings.smi_nvml_bytes,
        contaminated=_contaminated(place, ground, sampler, findings),
        crowded=findings.crowded,
        disturbed=findings.disturbed,
        losses=findings.losses,
        message=_message(outcome, findings, ending, experiment),
    )
    return measurement, ending.tail


def child_command(request: Path, result: Path) -> list[str]:
    """`-P`: no file of the working directory takes a module's place."""
    return [sys.executable, "-P", "-m", "snugfit.measurement.child", str(request), str(result)]


def judge(ending: ChildExit, result: Path) -> tuple[ChildResult, str]:
    """What the child found, and the cause of its end. The result is empty where it left no result of
    ours."""
    try:
        findings = ChildResult.from_json(read_document(result))
    except FileNotFoundError:
        findings = ChildResult(outcome=causes.NO_RESULT)
    except BadDocument as fault:
        findings = ChildResult(outcome=causes.BAD_RESULT, message=str(fault))
    if findings.outcome == causes.OK and not findings.seconds:
        findings = ChildResult(outcome=causes.BAD_RESULT, message="a result without a single timed step")
    return findings, causes.cause_of_exit(ending, findings.outcome)


def _refuse(experiment: MeasurementRequest) -> None:
    """Raises `UsageError` for what no process could run."""
    job, loop = experiment.job, experiment.loop
    if job.model.module is not None:
        raise JobError(
            f"The model {job.model.name!r} lives only in this Python process, and a measurement runs in a"
            " fresh one. Measure it in place, `with snugfit.watch() as seen:`, or give a config."
        )
    if loop not in LOOPS:
        raise UsageError(f"Unknown loop {loop!r}.{did_you_mean(loop, LOOPS)} Loops: {', '.join(LOOPS)}.")
    for what, value, least in (("warm-up steps", experiment.warmup, 0), ("steps", experiment.steps, 1)):
        if type(value) is not int or not least <= value <= LARGEST_STEPS:
            raise UsageError(
                f"{what} is {value!r}; allowed are whole numbers from {least} to {LARGEST_STEPS}."
            )
    deadline = experiment.deadline_seconds
    if type(deadline) not in (int, float) or not (math.isfinite(deadline) and deadline > 0):
        raise UsageError(f"The deadline is {deadline!r}; it is a number of seconds above 0.")
    if experiment.history is not None:
        if experiment.warmup + experiment.steps <= HISTORY_STEP:
            raise UsageError(f"A memory history needs {HISTORY_STEP + 1} steps or more, warm-up included.")
        if not experiment.history.absolute().parent.is_dir():
            raise UsageError(f"The history cannot go to {experiment.history}: there is no such folder.")


def _path_of(what: str, given: object) -> Path | None:
    """A path from Python, which people write as text too."""
    if given is None or isinstance(given, str | os.PathLike):
        return None if given is None else Path(given)
    raise UsageError(f"{what} is {given!r}; it is a path, or None.")


def _request(
    experiment: MeasurementRequest, place: Target, ground: contamination.GpuBaseline | None
) -> dict[str, object]:
    return {
        "parent": os.getpid(),
        "launched": time.monotonic(),
        "job": experiment.job.to_json(),
        "setup": experiment.recipe.setup().to_json(),
        "loop": experiment.loop,
        "device": place.torch_device,
        "uuid": place.card.uuid if place.card else None,
        "ground_bytes": ground.used_bytes if ground else None,
        "warmup": experiment.warmup,
        "steps": experiment.steps,
        "history": experiment.history is not None,
    }


def _environment(experiment: MeasurementRequest, place: Target) -> dict[str, str]:
    expandable = experiment.recipe.setup().expandable_segments
    return child_environment(os.environ, visibility=place.visibility, expandable_segments=expandable)


@contextmanager
def _sampling(place: Target, child: Child) -> Iterator[Sampler | None]:
    """NVML, sampled for as long as the child runs; nothing without a card."""
    if place.card is None:
        yield None
        return
    with Sampler(place.card, belongs=child.owns) as sampler:
        yield sampler


def _growth(sampler: Sampler | None, ground: contamination.GpuBaseline | None) -> int | None:
    """What the device's used bytes grew by at their peak: this run's NVML bytes."""
    if sampler is None or sampler.peak_bytes is None or ground is None or ground.used_bytes is None:
        return None
    return max(0, sampler.peak_bytes - ground.used_bytes)


def _footprint(findings: ChildResult, nvml_bytes: int | None) -> Footprint | None:
    """The context is what NVML counts beyond the allocator's segments, when both peaked together: without
    retries the allocator never gives a segment back, so they did."""
    if findings.host_bytes is None:  # no result
        return None
    context = findings.first_context_bytes
    if nvml_bytes is not None and findings.reserved_bytes is not None and not findings.retries:
        context = max(0, nvml_bytes - findings.reserved_bytes)
    return Footprint(
        requested_bytes=findings.requested_bytes,
        allocated_bytes=findings.allocated_bytes,
        reserved_bytes=findings.reserved_bytes,
        nvml_bytes=nvml_bytes,
        context_bytes=context,
        host_bytes=findings.host_bytes,
        retries=findings.retries or 0,
    )


def _contaminated(
    place: Target, ground: contamination.GpuBaseline | None, sampler: Sampler | None, findings: ChildResult
) -> str | None:
    """The first reason why the GPU was not this run's alone, or could not be proven so."""
    if place.card is None or ground is None or sampler is None:
        return f"not proven clean: {place.doubt}" if place.doubt else None
    reasons = [ground.reason, contamination.during(sampler.censuses.values(), ground)]
    grown, reserved, context = _growth(sampler, ground), findings.reserved_bytes, findings.first_context_bytes
    if grown is not None and reserved is not None and context is not None:
        reasons.append(
            contamination.unexplained(grown_bytes=grown, reserved_bytes=reserved, first_context_bytes=context)
        )
    if sampler.refusal is not None:
        reasons.append(f"not proven clean: {sampler.refusal}")
    reasons.append(contamination.after(place.card, ground, patience=contamination.PATIENCE))
    return next((reason for reason in reasons if reason), None)


def _message(outcome: str, findings: ChildResult, ending: ChildExit, experiment: MeasurementRequest) -> str:
    """For a run that died: what it said last."""
    if outcome == causes.OK:
        return ""
    last = "\n".join(ending.tail.strip().splitlines()[-_LAST_LINES:])[-4000:]
    if outcome == causes.TIMEOUT:
        return f"Still running after {experiment.deadline_seconds:g} s, and ended.\n{last}".strip()
    return findings.message or last


def _keep_history(made: Path, wanted: Path | None) -> None:
    if wanted is not None and made.is_file():
        shutil.move(made, wanted)
