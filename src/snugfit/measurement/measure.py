"""Measures one experiment in a process of its own, on a GPU without other processes.

- The parent (experiment/run.py) finds the GPU by NVML, waits until it is clean, and writes the request.
- The child (child.py) builds the Step, warms up, and runs the steady steps. The parent sleeps meanwhile; a
  thread samples NVML.
- The child reads the allocator's peaks, reads nvidia-smi once, and writes its result.
- The parent determines the outcome, and waits until the GPU is clean again.

The parent never touches CUDA, and uses no CPU while it waits, except for NVML's readings. It accepts only
results that it can check. Each failed run has a cause, and each shared GPU a reason. Each result is a
complete file. Models that exist only in this Python process are refused. A new process could get them only by
pickle, which executes code; `snugfit.watch()` measures them in place.

Several GPUs that train together have a child each. The children find each other by a file in a temporary
folder, so that no port has to be free.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snugfit.errors import JobError, UsageError, did_you_mean, require_packages
from snugfit.job.job import Job, refuse_what_is_no_job
from snugfit.measurement import ledger as ledger_files
from snugfit.measurement.child import HISTORY_STEP
from snugfit.measurement.experiment.request import MeasurementRequest
from snugfit.measurement.experiment.run import run_experiment
from snugfit.measurement.target import open_targets
from snugfit.results.measurement import Measurement
from snugfit.step.applier import refuse_unsupported
from snugfit.step.step import LOOPS
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import ranks_of

MAX_STEPS = 100_000

PACKAGES = ("psutil", "pynvml")
"""Packages that the process of a measurement imports. They are checked before it runs for seconds."""


def measure(
    job: Job,
    recipe: Recipe | str = "plain",
    *,
    loop: str = "plain",
    device: str | None = None,
    gpu_index: int = 0,
    gpus: int = 1,
    warmup: int = 3,
    steps: int = 10,
    deadline_seconds: float = 600.0,
    ledger: Path | str | None = Path("snugfit-runs"),
    record_history: Path | str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
) -> Measurement:
    """Run the job under the recipe (also as text) in a new process and return its measurement.

    `device` is `cpu`, `cuda`, or None for a GPU if there is one; `gpu_index` is CUDA's index. `gpus` is the
    number of GPUs that train together from that index on, one process (a rank) each. The measurement then
    has the bytes of the largest rank, the seconds of the slowest, and those of all in `ranks`.

    A run that dies is a measurement too: its `outcome` is the cause. `ledger` is the folder for results, or
    None. `record_history` is a file for torch's recorded allocations of the first three steps (for
    pytorch.org/memory_viz; recording slows the steps down). `trainer_arguments` extend the
    `TrainingArguments` of the `trainer` loop; a ledger stores no such run.

    Raises `UsageError` for a job, recipe or argument that cannot be measured.
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
        gpus=gpus,
    )
    root = _path_of("ledger", ledger)
    if request.trainer_arguments and (loop != "trainer" or root is not None):
        raise UsageError("trainer_arguments need loop='trainer' and ledger=None.")
    _refuse_invalid(request)
    with open_targets(device, gpu_index, gpus, environment=os.environ) as targets:
        card = targets[0].card
        recipe.check(request.rank_job, card.capability() if card else None)
        if record_history is not None and targets[0].type != "cuda":
            raise UsageError(
                "A memory history is recorded by the CUDA allocator, but this machine has no GPU. "
                "Leave history out, or use a machine with a GPU."
            )
        if root is None:
            return run_experiment(request, targets)[0]
        with ledger_files.open_ledger(root):
            measurement, output = run_experiment(request, targets)
            ledger_files.write(root, measurement, output)
    return measurement


def _refuse_invalid(request: MeasurementRequest) -> None:
    """Raise `UsageError` for a job, recipe or option that cannot be measured, and for missing packages."""
    require_packages("A measurement", *PACKAGES)
    job, loop = request.job, request.loop
    if job.model.module is not None:
        raise JobError(
            f"The model {job.model.name!r} exists only in this Python process, but a measurement starts a "
            "new one. Measure it here, `with snugfit.watch() as seen:`, or give a config."
        )
    if loop not in LOOPS:
        raise UsageError(f"Unknown loop {loop!r}.{did_you_mean(loop, LOOPS)} Loops: {', '.join(LOOPS)}.")
    for setting, value, least in (("warm-up steps", request.warmup, 0), ("steps", request.steps, 1)):
        if type(value) is not int or not least <= value <= MAX_STEPS:
            raise UsageError(
                f"{setting} is {value!r}; allowed are whole numbers from {least} to {MAX_STEPS}."
            )
    if ranks_of(request.setup) > 1:
        refuse_unsupported(loop, request.setup)
        # This property raises an error if the ranks cannot share the batch.
        request.rank_job  # noqa: B018
    deadline = request.deadline_seconds
    if type(deadline) not in (int, float) or not (math.isfinite(deadline) and deadline > 0):
        raise UsageError(f"The deadline is {deadline!r}; it must be a number of seconds above 0.")
    if request.history is not None:
        if request.warmup + request.steps <= HISTORY_STEP:
            raise UsageError(f"A memory history needs {HISTORY_STEP + 1} or more steps, warm-up included.")
        if not request.history.absolute().parent.is_dir():
            raise UsageError(
                f"The history cannot be written to {request.history}: the folder does not exist. Create "
                "it, or name another."
            )


def _path_of(argument: str, value: object) -> Path | None:
    """Return the path in an argument of `measure`, which may be text too. Raises `UsageError` for another
    type."""
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else Path(value)
    raise UsageError(f"{argument} is {value!r}; it must be a path, or None.")
