"""The measured process: `python -m snugfit.measurement.child REQUEST RESULT`.

It reads one request, runs one experiment, writes one result and exits. The allocator's memory peaks are those
of the training step alone. A tiny tensor creates the CUDA context and is freed, and then the peaks are reset.
NVML and nvidia-smi are compared only after the last step, when the device is idle.

Start-up times are measured in wall-clock time from the moment at which the parent process started this one.
The model's code is imported before the CUDA context is created, and not while the model is built. Each part
of the start-up is therefore measured separately.

With several ranks (processes that train together), each rank is such a process. The process group is created
right after the context. On a GPU, all values are read before a few more steps, which the first rank profiles.

An exception becomes a cause of failure in the result, with the memory peaks so far, and exit code 1.

DeepSpeed resets these peaks each time it empties the allocator's cache (`empty_cache` of
`deepspeed.runtime.utils`). It does so for each group of parameters while it builds its engine. The earlier
peaks of the run would be lost. A ViT on an H100 (results/accuracy-seed2511.json, run 37) reported 3.3 GB of
the predicted 4.2. NVML agreed with the prediction within 3 %.

**Evaluations.** Comparison of an evaluation's outputs with those of the plain model in fp32, after its bytes
and seconds were read.

The plain model has the same random weights, because both models are built with the same seed. 16-bit weights
are copied to fp32, so that the error of the recipe and that of the weights' dtype are measured together.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.documents import read_document, write_document
from snugfit.errors import one_line
from snugfit.measurement import causes
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.host import HostLoad, crowding, host_load, peak_resident_bytes
from snugfit.measurement.nvml import NvmlUnavailable, open_nvml
from snugfit.measurement.process import die_with_parent
from snugfit.techniques.registry import hooks
from snugfit.units import MIB
from snugfit.versions import versions

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.measurement.stopwatch import Stopwatch
    from snugfit.step.step import Outputs, Step
    from snugfit.techniques.setup import Setup


SEED = 0
"""Random seed of weights and data, the same in every run."""

HISTORY_STEP = 2
"""Index of the step after which the recorded allocations are saved: the first step that is like all later
ones."""

HISTORY_ENTRIES = 1_000_000
"""Largest number of allocations and frees to record (chosen, not measured)."""


def main() -> None:
    """Run the measurement that the parent process requests, write the result, and end without freeing the
    heap.
    """
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = read_document(request_path)
    die_with_parent(request["parent"])
    result = run(request, result_path.with_name("history.pickle"))
    write_document(result_path, result.to_json())
    sys.stdout.flush()
    sys.stderr.flush()
    # Without `os._exit`, the interpreter would free the heap object by object.
    os._exit(0 if result.outcome == causes.OK else 1)


def run(request: Mapping[str, Any], history: Path) -> ChildResult:
    """Run the requested experiment and return its result; an exception of the experiment becomes
    its outcome.
    """
    try:
        return _run_steps(request, history)
    except Exception as error:
        # The parent process compares this time across ranks, so it is taken before the traceback is printed.
        failed = time.monotonic()
        traceback.print_exc()
        cause = causes.cause_of_exception(error)
        text = str(error) if cause == causes.REFUSED else f"{type(error).__name__}: {error}"
    return replace(_peaks(), outcome=cause, message=text[:4000], failed_at=failed, versions=_versions())


def _run_steps(request: Mapping[str, Any], history: Path) -> ChildResult:
    import torch

    from snugfit.job.job import Job
    from snugfit.measurement.quiet_core import QuietCore
    from snugfit.measurement.stopwatch import Stopwatch
    from snugfit.step.open_step import open_step
    from snugfit.techniques.setup import Setup

    job, setup = Job.from_json(request["job"]), Setup.from_json(request["setup"])
    device = torch.device(request["device"])
    _import_code_of(job, setup)
    imported = time.monotonic()
    on_gpu = device.type == "cuda"
    context = _make_context(device, request) if on_gpu else _on_cpu(device, request, imported)
    torch.manual_seed(SEED)
    records = bool(request["history"])
    if records:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    family = request["parent"] if context.group else None  # ancestor of all ranks' processes
    loads: list[HostLoad | None] = [host_load(family)]
    steps = request["warmup"] + request["steps"]
    core = QuietCore((request["rank"], request["ranks"])) if on_gpu else None

    def after_step(index: int) -> None:
        if index in (request["warmup"] - 1, steps - 1):  # before the first timed step, after the last
            loads.append(host_load(family))
        if records:
            _dump_history(index, history)

    stopwatch = Stopwatch(device, request["warmup"], after_step=after_step, core=core)
    # Stored losses would need GPU memory that the predictions do not contain.
    step = open_step(job, setup, request["loop"], device, keep_losses=not on_gpu)
    step.trainer_arguments = request.get("trainer_arguments", {})
    if context.group is not None and on_gpu:
        read = _run_with_further_steps(step, steps, stopwatch, request, context.group)
        losses: list[float] = []
    else:
        losses = step.run(steps, stopwatch)
        read = _read_idle(request, stopwatch)
    if context.group is not None:
        context.group.leave()
    return replace(
        read,
        outcome=causes.OK,
        quiet=tuple(stopwatch.quiet()),
        startup=stopwatch.startup(
            imports_seconds=max(0.0, imported - request["launched"]),
            context_seconds=context.ready - imported,
        ),
        losses=tuple(losses),
        results=results_of(step, SEED),  # evaluation needs memory, so it follows the reading of peaks
        crowded=crowding(loads[-2], loads[-1], os.cpu_count() or 1),
        disturbed=core.disturbed_share() if core else None,
        host_loop_seconds=core.loop_seconds() if core else None,
        first_context_bytes=context.growth_bytes,
        communication_bytes=context.communication_bytes,
        versions=_versions(),
    )


def _read_idle(request: Mapping[str, Any], stopwatch: Stopwatch) -> ChildResult:
    """Return the seconds of the steps and the memory peaks so far. They include the used bytes of NVML and
    nvidia-smi on the idle device.
    """
    seconds = tuple(stopwatch.seconds())
    peaks = replace(_peaks(), timed_from=stopwatch.timed_from, timed_until=time.monotonic())
    uuid = request["uuid"]
    nvml_bytes = _used_bytes(uuid) if request["device"] != "cpu" else None
    smi_bytes = smi_used_bytes(uuid) if uuid and nvml_bytes is not None else None
    return replace(
        peaks,
        seconds=seconds,
        cpu_seconds=tuple(stopwatch.cpu_seconds()),
        smi_bytes=smi_bytes,
        smi_nvml_bytes=nvml_bytes,
        # Later steps with a profiler, and the plain model of a comparison, have other memory peaks.
        peaks_at=time.monotonic(),
    )


def _run_with_further_steps(
    step: Step, steps: int, stopwatch: Stopwatch, request: Mapping[str, Any], group: Any
) -> ChildResult:
    """Run the timed steps and read their values, then run a few more steps. In these, the first rank measures
    the collectives with other ranks.
    """
    read: list[ChildResult] = []

    def when_timed() -> None:
        read.append(_read_idle(request, stopwatch))

    fabric = group.run_further(step, steps, stopwatch, when_timed)
    if fabric is None:
        return read[0]
    return replace(read[0], fabric_seconds=fabric.seconds, exposed_fabric_seconds=fabric.exposed_seconds)


def _import_code_of(job: Job, setup: Setup) -> None:
    """Import the code of the job's model and of its adapters.

    A model without a class in transformers is refused later, by the build. An import during a build on the
    GPU would place constants of modules there: torchaudio's (through transformers) 4 bytes, peft's (LoHa) 16.
    """
    from snugfit.job.architectures import class_of
    from snugfit.step.applier import import_code

    with contextlib.suppress(KeyError):
        class_of(job.task, job.config_to_read())
    import_code(setup)


class _Context(NamedTuple):
    """The result of creating a CUDA context in the measured process: its bytes, and the process group."""

    growth_bytes: int | None
    """Bytes by which the CUDA context increased the device's used memory. None on a CPU, or if NVML gives no
    data."""

    ready: float
    """Time at which the CUDA context and the process group existed, in seconds of the monotonic clock."""

    group: Any = None
    """The process group of all ranks; None for a single process."""

    communication_bytes: int | None = None
    """Bytes by which the first exchange of the process group increased the device's used memory. None without
    a group, and as for `growth_bytes`."""


def _open_group(request: Mapping[str, Any], device: torch.device) -> Any:
    """Return the process group of this run, created once all ranks have joined; None where one process
    trains.
    """
    return hooks("processes")[0]().join_measured(request, device) if request["ranks"] > 1 else None


def _on_cpu(device: torch.device, request: Mapping[str, Any], imported: float) -> _Context:
    """Return the `_Context` of a run on the CPU: no CUDA context, and the process group if there are several
    ranks.
    """
    group = _open_group(request, device)
    return _Context(None, time.monotonic() if group else imported, group)


def _make_context(device: torch.device, request: Mapping[str, Any]) -> _Context:
    """Create the CUDA context with one tiny tensor, then the process group if there are several ranks. Return
    both with their bytes.
    """
    import torch

    torch.cuda.set_device(device)
    tiny = torch.empty(1, device=device)
    torch.cuda.synchronize(device)
    ready = time.monotonic()
    used = _used_bytes(request["uuid"])
    group = _open_group(request, device)
    with_group = None
    if group is not None:
        ready = time.monotonic()
        with_group = _used_bytes(request["uuid"])
    del tiny
    # The allocator's segment for the tiny tensor would count in every peak of reserved bytes.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    keep_peaks()
    if used is None or request["baseline_bytes"] is None:
        return _Context(None, ready, group)
    communication = None if with_group is None else max(0, with_group - used)
    return _Context(max(0, used - int(request["baseline_bytes"])), ready, group, communication)


def _peaks() -> ChildResult:
    """Return the memory peaks so far: those of the host, and those of the allocator where CUDA is
    initialized.
    """
    host = ChildResult(outcome=causes.OK, host_bytes=peak_resident_bytes())
    # A run that fails before it imports torch has no memory peaks.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return host
    try:
        stats = with_run_peaks(torch.cuda.memory_stats())
        properties = torch.cuda.get_device_properties()
    except Exception as fault:  # after a device-side fault, each CUDA call fails
        print(f"The allocator's peaks were lost: {fault}", file=sys.stderr)
        return host
    return replace(
        host,
        paged_bytes=sum(count() for count in hooks("managed_bytes")),
        requested_bytes=stats.get("requested_bytes.all.peak"),
        allocated_bytes=stats.get("allocated_bytes.all.peak"),
        reserved_bytes=stats.get("reserved_bytes.all.peak"),
        retries=stats.get("num_alloc_retries"),
        device_name=properties.name,
        total_bytes=properties.total_memory,
    )


def _dump_history(index: int, history: Path) -> None:
    if index == HISTORY_STEP:
        import torch

        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(history))
        torch.cuda.memory._record_memory_history(None)


def _used_bytes(uuid: str | None) -> int | None:
    if uuid is None:
        return None
    try:
        with open_nvml() as nvml:
            return nvml.card(uuid).memory().used_bytes
    except NvmlUnavailable as reason:
        print(f"NVML: {reason}", file=sys.stderr)
        return None


def smi_used_bytes(uuid: str, command: str = "nvidia-smi") -> int | None:
    """Return the used bytes of this GPU by nvidia-smi (whole MiB); None where it is missing or returns no
    number."""
    try:
        answer = subprocess.run(
            [command, f"--id={uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout.strip()
    return int(text) * MIB if answer.returncode == 0 and text.isascii() and text.isdigit() else None


def _versions() -> dict[str, str]:
    """Return the versions of the packages, and of the CUDA libraries that torch loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.version.cuda:
        return versions()
    return versions() | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


# ---- peaks ------------------------------------------------------------------------------------------------


PEAKS = ("requested_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak")

_EARLIER_PEAKS: dict[str, int] = {}
"""The largest value of each memory peak of the allocator before its counters were reset."""


def keep_peaks() -> None:
    """Patch `torch.cuda.reset_peak_memory_stats` to store the peaks before each reset."""
    import torch

    set_back = torch.cuda.reset_peak_memory_stats
    _EARLIER_PEAKS.clear()

    def keep(device: torch.types.Device = None) -> None:
        stats = torch.cuda.memory_stats()
        _EARLIER_PEAKS.update({name: max(stats.get(name, 0), _EARLIER_PEAKS.get(name, 0)) for name in PEAKS})
        set_back(device)

    torch.cuda.reset_peak_memory_stats = keep


def with_run_peaks(stats: Mapping[str, int]) -> dict[str, int]:
    """Return the allocator's statistics with the peaks of the whole run, including those before resets by a
    library.
    """
    return {**stats, **{name: max(peak, stats.get(name, 0)) for name, peak in _EARLIER_PEAKS.items()}}


# ---- evaluations -------------------------------------------------------------------------------------------


def results_of(step: Step, seed: int) -> dict[str, Any]:
    """Return the results of an evaluation by name, with its largest error and whether its token ids are
    equal.

    A training step has no results, and an evaluation with the plain recipe is not compared.
    """
    from snugfit.step.plain_loop import PlainStep
    from snugfit.techniques.setup import Setup

    if step.job.trains or not isinstance(step, PlainStep) or step.setup == Setup():
        return step.results
    differences = _comparison(step, seed)
    # The first call of `outputs` can add results, such as an engine's own memory.
    return {**step.results, **differences}


def _comparison(step: Any, seed: int) -> dict[str, Any]:
    """Return the differences of a step's outputs from those of the fp32 model, or the reason why both could
    not be compared.

    The model of the step is deleted, because the fp32 model needs its memory.
    """
    try:
        own = _outputs(step, seed)
        step.model = None
        gc.collect()
        plain = _outputs(_plain_step(step, seed), seed)
    # The plain model's output may have another shape, and two models may not fit into memory.
    except Exception as error:
        return {"not_compared": f"{type(error).__name__}: {one_line(error, 300)}"}
    if own.values.shape != plain.values.shape:
        return {"not_compared": f"outputs {list(own.values.shape)}, plain {list(plain.values.shape)}"}
    return dict(step.differences(own, plain))


def _plain_step(step: Any, seed: int) -> Any:
    """Return a step of the same job without any technique, with the model built and its weights in fp32."""
    import torch

    from snugfit.step.open_step import open_step
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup

    torch.manual_seed(seed)
    plain: Any = open_step(step.job, Setup(), "plain", step.device)
    plain.run(0, Observer())
    plain.model.float()
    return plain


def _outputs(step: Any, seed: int) -> Outputs:
    """Return the outputs of a step, whose model is built, for its first batch, on the host and in fp32."""
    import torch

    torch.manual_seed(seed)
    own: Outputs = step.outputs()
    return own._replace(values=own.values.float().cpu(), ids=own.ids.cpu())


if __name__ == "__main__":
    main()
