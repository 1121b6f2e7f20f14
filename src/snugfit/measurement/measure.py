"""Measures one experiment, in a process of its own, on a GPU that is proven clean.

    the parent                                  the child (child.py)
    finds the GPU by NVML, waits until clean
    writes the request                 ----->   builds the Step, warms up, runs the steady steps
    sleeps; a thread samples NVML               reads the allocator's peaks; nvidia-smi once
    decides how it ended               <-----   writes its result
    waits until the GPU is clean again

The parent never touches CUDA, uses no CPU while it waits (but for NVML's readings), and believes nothing that
it cannot check: a run that died has a cause, a GPU that was shared has a reason, a result is a complete file.
Models that live only in this Python process are refused: a fresh process could get them only by pickle, which
runs whatever it contains; `snugfit.watch()` measures those in target.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import JobError, UsageError, did_you_mean
from snugfit.job.job import Job, refuse_what_is_no_job
from snugfit.measurement import causes, contamination
from snugfit.measurement import ledger as ledger_files
from snugfit.measurement.child import HISTORY_STEP
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.contamination import GpuBaseline
from snugfit.measurement.process import Child, ChildExit
from snugfit.measurement.sampler import Sampler
from snugfit.measurement.stopwatch import timing_of
from snugfit.measurement.target import Target, child_environment, open_target
from snugfit.results.footprint import Footprint
from snugfit.results.measurement import Measurement
from snugfit.step.bitsandbytes_optimizers import on_gpu_bytes
from snugfit.step.step import LOOPS
from snugfit.step.wishes.engine_config import group_bytes
from snugfit.techniques.recipe import Recipe

MAX_STEPS = 100_000

_MESSAGE_LINES = 20
"""Lines of a dead child's output that the measurement keeps; the ledger keeps up to 64 KiB of it."""


@dataclass(frozen=True, kw_only=True)
class MeasurementRequest:
    """What is to be measured, and how long."""

    job: Job
    recipe: Recipe
    loop: str
    warmup: int
    """Steps before the steady ones, not timed; their bytes count."""
    steps: int
    """Number of steady steps."""
    deadline_seconds: float
    history: Path | None
    """Where the allocator's recorded history goes; None records none."""
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `TrainingArguments`, besides those that the recipe gives."""


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
    trainer_arguments: Mapping[str, Any] | None = None,
) -> Measurement:
    """Runs the job under the recipe (which may be text) in a fresh process and returns what it took.

    `device` is `cpu`, `cuda`, or None for a GPU if there is one; `gpu_index` counts as CUDA does. A run that
    dies is a measurement too: its `outcome` is the cause. `ledger` is the folder where it is kept, or None.
    `record_history` writes torch's recorded allocations of the first three steps to that file (for
    pytorch.org/memory_viz; recording slows the steps down). `trainer_arguments` of the `trainer` loop are
    given to `TrainingArguments` besides what the recipe says; a ledger keeps no such run. Raises `UsageError`
    for what cannot be measured.
    """
    refuse_what_is_no_job(job)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    request = MeasurementRequest(
        job=job,
        recipe=recipe,
        loop=loop,
        warmup=warmup,
        steps=steps,
        deadline_seconds=deadline_seconds,
        history=_path_of("record_history", record_history),
        trainer_arguments=trainer_arguments or {},
    )
    root = _path_of("ledger", ledger)
    if request.trainer_arguments and (loop != "trainer" or root is not None):
        raise UsageError("trainer_arguments need loop='trainer' and ledger=None.")
    _refuse_invalid(request)
    with open_target(device, gpu_index, environment=os.environ) as target:
        recipe.check(job, target.card.capability() if target.card else None)
        if record_history is not None and target.type != "cuda":
            raise UsageError(
                "A memory history is recorded by the CUDA allocator, but this machine has no GPU."
            )
        if root is None:
            return run_experiment(request, target)[0]
        with ledger_files.open_ledger(root):
            measurement, output = run_experiment(request, target)
            ledger_files.write(root, measurement, output)
    return measurement


def run_experiment(request: MeasurementRequest, target: Target) -> tuple[Measurement, str]:
    """The measurement of one request on one device, and the end of the measured process's output."""
    baseline = contamination.before(target.card, patience=contamination.PATIENCE) if target.card else None
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="snugfit-") as folder:
        request_file, result_file = Path(folder) / "request.json", Path(folder) / "result.json"
        write_document(request_file, _request_document(request, target, baseline))
        environment = child_environment(os.environ, request.recipe.setup(), visibility=target.visibility)
        with Child(child_command(request_file, result_file), environment=environment) as child:
            with _sampling(target, child) as sampler:
                exited = child.wait(request.deadline_seconds)
        result = read_result(exited, result_file)
        history = Path(folder) / "history.pickle"
        if request.history is not None and history.is_file():
            shutil.move(history, request.history)
    if result.outcome == causes.REFUSED:
        raise UsageError(result.message)
    measurement = Measurement(
        job=request.job,
        recipe=request.recipe,
        loop=request.loop,
        device=target.describe(result.device_name, result.total_bytes),
        outcome=result.outcome,
        footprint=measured_footprint(
            result, baseline.growth(sampler.peak_bytes) if baseline and sampler else None
        ),
        timing=timing_of(result.seconds, request.job.batch_size, result.quiet),
        versions=result.versions,
        when=when,
        startup=result.startup,
        first_context_bytes=result.first_context_bytes,
        smi_bytes=result.smi_bytes,
        smi_nvml_bytes=result.smi_nvml_bytes,
        contaminated=_contamination(target, baseline, sampler, result, request),
        crowded=result.crowded,
        disturbed=result.disturbed,
        host_loop_seconds=result.host_loop_seconds,
        losses=result.losses,
        message=_message(result, exited, request),
    )
    return measurement, exited.tail


def child_command(request: Path, result: Path) -> list[str]:
    """The command of the measured process. `-P`: no file of the working directory shadows a module."""
    return [sys.executable, "-P", "-m", "snugfit.measurement.child", str(request), str(result)]


def read_result(exited: ChildExit, file: Path) -> ChildResult:
    """The child's result, empty where the file holds none; its outcome is that of the whole process."""
    try:
        result = ChildResult.from_json(read_document(file))
    except FileNotFoundError:
        result = ChildResult(outcome=causes.NO_RESULT)
    except BadDocument as fault:
        result = ChildResult(outcome=causes.BAD_RESULT, message=str(fault))
    if result.outcome == causes.OK and not result.seconds:
        result = ChildResult(outcome=causes.BAD_RESULT, message="a result without a single timed step")
    return replace(result, outcome=causes.cause_of_exit(exited, result.outcome))


def _refuse_invalid(request: MeasurementRequest) -> None:
    """Raises `UsageError` for what no process could run."""
    job, loop = request.job, request.loop
    if job.model.module is not None:
        raise JobError(
            f"The model {job.model.name!r} exists only in this Python process, but a measurement starts a "
            "new one. Measure it here, `with snugfit.watch() as seen:`, or give a config."
        )
    if loop not in LOOPS:
        raise UsageError(f"Unknown loop {loop!r}.{did_you_mean(loop, LOOPS)} Loops: {', '.join(LOOPS)}.")
    for what, value, least in (("warm-up steps", request.warmup, 0), ("steps", request.steps, 1)):
        if type(value) is not int or not least <= value <= MAX_STEPS:
            raise UsageError(f"{what} is {value!r}; allowed are whole numbers from {least} to {MAX_STEPS}.")
    deadline = request.deadline_seconds
    if type(deadline) not in (int, float) or not (math.isfinite(deadline) and deadline > 0):
        raise UsageError(f"The deadline is {deadline!r}; it must be a number of seconds above 0.")
    if request.history is not None:
        if request.warmup + request.steps <= HISTORY_STEP:
            raise UsageError(f"A memory history needs {HISTORY_STEP + 1} or more steps, warm-up included.")
        if not request.history.absolute().parent.is_dir():
            raise UsageError(
                f"The history cannot be written to {request.history}: the folder does not exist."
            )


def _path_of(argument: str, value: object) -> Path | None:
    """The path in an argument of `measure`, which may be text too."""
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else Path(value)
    raise UsageError(f"{argument} is {value!r}; it must be a path, or None.")


def _request_document(
    request: MeasurementRequest, target: Target, baseline: GpuBaseline | None
) -> dict[str, object]:
    """The request as the child reads it."""
    return {
        "parent": os.getpid(),
        "launched": time.monotonic(),
        "job": request.job.to_json(),
        "setup": request.recipe.setup().to_json(),
        "loop": request.loop,
        "device": target.torch_device,
        "uuid": target.card.uuid if target.card else None,
        "baseline_bytes": baseline.used_bytes if baseline else None,
        "warmup": request.warmup,
        "steps": request.steps,
        "history": request.history is not None,
        "trainer_arguments": dict(request.trainer_arguments),
    }


@contextmanager
def _sampling(target: Target, child: Child) -> Iterator[Sampler | None]:
    """Samples NVML while the child runs; None without a card."""
    if target.card is None:
        yield None
        return
    with Sampler(target.card, belongs=child.owns) as sampler:
        yield sampler


def measured_footprint(result: ChildResult, nvml_bytes: int | None) -> Footprint | None:
    """The measured bytes; None without a result.

    Managed memory and the context are what NVML counts beyond the allocator's segments, when both peaked
    together; pages are taken to be on the GPU as far as there is more than the first context. Without
    retries the allocator never gives a segment back, so they did.
    """
    if result.host_bytes is None:
        return None
    context, managed = result.first_context_bytes, 0
    if nvml_bytes is not None and result.reserved_bytes is not None and not result.retries:
        beyond = max(0, nvml_bytes - result.reserved_bytes)
        managed = min(on_gpu_bytes(result.paged_bytes or 0), max(0, beyond - (context or 0)))
        context = beyond - managed
    return Footprint(
        requested_bytes=result.requested_bytes,
        allocated_bytes=result.allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        nvml_bytes=nvml_bytes,
        context_bytes=context,
        managed_bytes=managed,
        host_bytes=result.host_bytes,
        retries=result.retries or 0,
    )


def _contamination(
    target: Target,
    baseline: GpuBaseline | None,
    sampler: Sampler | None,
    result: ChildResult,
    request: MeasurementRequest,
) -> str | None:
    """Why the GPU was not this run's alone, or could not be proven so; None when it was. The memory of a
    process group is the run's own."""
    if target.card is None or baseline is None or sampler is None:
        return (
            f"it is not known whether other processes used the GPU: {target.doubt}" if target.doubt else None
        )
    return contamination.first_reason(
        target.card,
        baseline,
        sampler,
        reserved_bytes=result.reserved_bytes,
        context_bytes=result.first_context_bytes,
        outside_bytes=group_bytes(request.recipe.setup(), request.loop)
        + on_gpu_bytes(result.paged_bytes or 0),
    )


def _message(result: ChildResult, exited: ChildExit, request: MeasurementRequest) -> str:
    """The end of a dead run's output, or its exception; empty for a run that did not die."""
    if result.outcome == causes.OK:
        return ""
    output = "\n".join(exited.tail.strip().splitlines()[-_MESSAGE_LINES:])[-4000:]
    if result.outcome == causes.TIMEOUT:
        return f"Still running after {request.deadline_seconds:g} s, so it was stopped.\n{output}".strip()
    return result.message or output
