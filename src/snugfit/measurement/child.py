"""The measured process: `python -m snugfit.measurement.child REQUEST RESULT`.

It reads one request, runs one experiment, writes one result and ends. Everything before the Step is arranged
so that the allocator's peaks are the Step's own: the context is made by one tiny tensor whose memory is given
back, and the peaks count from there. After the last step the device is idle, and that is the one moment when
NVML and nvidia-smi are compared.

The start-up is timed by the wall clock, from the moment at which the parent launched this process. The
model's code, which building would import, is imported before the context is made, so that each stage of the
start-up is one thing.

Whatever is raised becomes a cause in the result, with the allocator's peaks so far, and exit code 1.
"""

from __future__ import annotations

import contextlib
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
from snugfit.measurement import causes
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.host import HostLoad, crowding, host_load, peak_resident_bytes
from snugfit.measurement.kept_peaks import keep_peaks, with_kept
from snugfit.measurement.nvml import NvmlUnavailable, open_nvml
from snugfit.measurement.process import die_with_parent
from snugfit.step.bitsandbytes_optimizers import paged_bytes
from snugfit.units import MIB
from snugfit.versions import versions

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

SEED = 0
"""Of the random weights and data, which are the same in every run."""

HISTORY_STEP = 2
"""The step after which a recorded history is written: the first steady one."""

HISTORY_ENTRIES = 1_000_000
"""Upper bound on the allocations and frees of a history: chosen, not measured."""


def main() -> None:
    """Runs the request, writes the result, and ends the process without freeing the heap."""
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = read_document(request_path)
    die_with_parent(request["parent"])
    result = run(request, result_path.with_name("history.pickle"))
    write_document(result_path, result.to_json())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result.outcome == causes.OK else 1)


def run(request: Mapping[str, Any], history: Path) -> ChildResult:
    """The result of one request; an exception of the experiment becomes its outcome."""
    try:
        return _run_steps(request, history)
    except Exception as error:
        traceback.print_exc()
        cause = causes.cause_of_exception(error)
        text = str(error) if cause == causes.REFUSED else f"{type(error).__name__}: {error}"
    return replace(_peaks(), outcome=cause, message=text[:4000], versions=_versions())


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
    context = _make_context(device, request) if on_gpu else _Context(growth_bytes=None, ready=imported)
    torch.manual_seed(SEED)
    records = bool(request["history"])
    if records:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    loads: list[HostLoad | None] = [host_load()]
    last = request["warmup"] + request["steps"] - 1
    core = QuietCore() if on_gpu else None

    def after_step(index: int) -> None:
        if index in (request["warmup"] - 1, last):  # before the first steady step, after the last
            loads.append(host_load())
        if records:
            _dump_history(index, history)

    stopwatch = Stopwatch(device, request["warmup"], after_step=after_step, core=core)
    # Predictions are compared to the byte, so nothing of ours may stay on a GPU: kept losses would.
    step = open_step(job, setup, request["loop"], device, keep_losses=not on_gpu)
    step.trainer_arguments = request.get("trainer_arguments", {})
    losses = step.run(request["warmup"] + request["steps"], stopwatch)
    seconds = stopwatch.seconds()
    peaks = _peaks()
    uuid = request["uuid"]
    nvml_bytes = _used_bytes(uuid) if on_gpu else None
    smi_bytes = smi_used_bytes(uuid) if uuid and nvml_bytes is not None else None
    return replace(
        peaks,
        outcome=causes.OK,
        seconds=tuple(seconds),
        quiet=tuple(stopwatch.quiet()),
        startup=stopwatch.startup(
            imports_seconds=max(0.0, imported - request["launched"]),
            context_seconds=context.ready - imported,
        ),
        losses=tuple(losses),
        crowded=crowding(loads[-2], loads[-1], os.cpu_count() or 1),
        disturbed=core.disturbed_share() if core else None,
        host_loop_seconds=core.loop_seconds() if core else None,
        first_context_bytes=context.growth_bytes,
        smi_bytes=smi_bytes,
        smi_nvml_bytes=nvml_bytes,
        versions=_versions(),
    )


def _import_code_of(job: Job, setup: Setup) -> None:
    """Imports the code of the job's model and of its adapters; a model that transformers has no class for is
    refused when it is built. Imported while a model is built on the GPU, modules would put their constants
    there: torchaudio's (by way of transformers) 4 bytes, peft's (LoHa) 16."""
    from snugfit.job.architectures import class_of
    from snugfit.step.applier import import_code

    with contextlib.suppress(KeyError):
        class_of(job.task, job.transformers_config())
    import_code(setup)


class _Context(NamedTuple):
    """The CUDA context of this process."""

    growth_bytes: int | None
    """What the device's used bytes grew by; None on a CPU, and where NVML does not answer."""

    ready: float
    """The moment at which it was there, by the monotonic clock."""


def _make_context(device: torch.device, request: Mapping[str, Any]) -> _Context:
    """Makes the CUDA context with one tiny tensor."""
    import torch

    torch.cuda.set_device(device)
    tiny = torch.empty(1, device=device)
    torch.cuda.synchronize(device)
    ready = time.monotonic()
    used = _used_bytes(request["uuid"])
    del tiny
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    keep_peaks()
    if used is None or request["baseline_bytes"] is None:
        return _Context(None, ready)
    return _Context(max(0, used - int(request["baseline_bytes"])), ready)


def _peaks() -> ChildResult:
    """The peaks so far, of the allocator where there is one and of the host."""
    host = ChildResult(outcome=causes.OK, host_bytes=peak_resident_bytes())
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return host
    try:
        stats = with_kept(torch.cuda.memory_stats())
        properties = torch.cuda.get_device_properties()
    except Exception as fault:  # after a device-side fault the context answers nothing any more
        print(f"The allocator's peaks were lost: {fault}", file=sys.stderr)
        return host
    return replace(
        host,
        paged_bytes=paged_bytes(),
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
    """Used bytes of this GPU by nvidia-smi (whole MiB); None where it is missing or gives no number."""
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
    """Versions of the packages, and of the CUDA libraries that torch loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.version.cuda:
        return versions()
    return versions() | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


if __name__ == "__main__":
    main()
