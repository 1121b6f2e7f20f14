"""The execution of one experiment: a process for each GPU, and their combined results.

The bytes are those of the rank (process) that needs the most, the seconds those of the slowest rank.
`Measurement.ranks` has the values of all ranks.

Processes that exchange tensors wait for each other. When one of them dies, the others would wait until NCCL's
time limit of ten minutes. Here the first failed process ends all of them. The others have a second to report
their own failure (all may have run out of memory), and are then killed. Some may fail only because of the
first, for example because a connection closes. Each process therefore reports the time of its failure, and
the earliest is the cause. A process that was killed from outside cannot report, and counts as the earliest.

One sleeping thread waits for each process (`process.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import UsageError
from snugfit.measurement import causes, contamination
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.clock import clock_between
from snugfit.measurement.contamination import GpuBaseline
from snugfit.measurement.experiment.request import MeasurementRequest
from snugfit.measurement.process import Child, ChildExit
from snugfit.measurement.sampler import Sampler
from snugfit.measurement.stopwatch import timing_of
from snugfit.measurement.target import Target, child_environment
from snugfit.results.footprint import Footprint, Timing
from snugfit.results.measurement import GpuClock, Measurement, RankMeasured
from snugfit.step.applier import group_bytes
from snugfit.step.host_link import managed_on_gpu

_MESSAGE_LINES = 20
"""Number of output lines of a failed process that a measurement contains. The folder of results stores up to
64 KiB of output."""


def run_experiment(request: MeasurementRequest, targets: Sequence[Target]) -> tuple[Measurement, str]:
    """Run a requested measurement in one process per GPU. Return its result, and the last output of the
    processes.
    """
    baselines = _baselines(targets)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="snugfit-") as folder:
        folders = [Path(folder) / f"rank{rank}" for rank in range(len(targets))]
        # The ranks of one host connect through this file instead of a network address.
        store = Path(folder) / "store" if len(targets) > 1 else None
        for rank, (own, target, baseline) in enumerate(zip(folders, targets, baselines, strict=True)):
            own.mkdir()
            document = request.document(target, baseline, rank=rank, store=store)
            write_document(own / "request.json", document)
        commands = [child_command(own / "request.json", own / "result.json") for own in folders]
        with Children(commands, _environments(request, targets)) as children:
            with ExitStack() as sampling:
                samplers = [
                    sampling.enter_context(Sampler(target.card, belongs=children.owns))
                    if target.card
                    else None
                    for target in targets
                ]
                exits = children.wait(request.deadline_seconds)
        results = [
            read_result(exited, own / "result.json") for exited, own in zip(exits, folders, strict=True)
        ]
        # The file is moved out of the temporary folder, which is deleted at the end of this block.
        history = folders[0] / "history.pickle"
        if request.history is not None and history.is_file():
            shutil.move(history, request.history)
    quiet = quiet_on_all(results)
    runs = [
        RankRun(
            request=request,
            target=targets[rank],
            baseline=baselines[rank],
            sampler=samplers[rank],
            result=results[rank],
            exited=exits[rank],
            quiet=quiet,
        )
        for rank in range(len(targets))
    ]
    cause = _first_cause(children, runs)
    if runs[cause].result.outcome == causes.REFUSED:
        raise UsageError(runs[cause].result.message)
    return _measurement(request, runs, cause, when), _output(exits)


def child_command(request: Path, result: Path) -> list[str]:
    """Return the command of the measured process. With `-P` no file of the working directory shadows a
    module."""
    return [sys.executable, "-P", "-m", "snugfit.measurement.child", str(request), str(result)]


def read_result(exited: ChildExit, file: Path) -> ChildResult:
    """Return the result that the child process wrote, with the outcome of the whole process. Without a valid
    file, all other values are empty.
    """
    try:
        result = ChildResult.from_json(read_document(file))
    except FileNotFoundError:
        result = ChildResult(outcome=causes.NO_RESULT)
    except BadDocument as fault:
        result = ChildResult(outcome=causes.BAD_RESULT, message=str(fault))
    if result.outcome == causes.OK and not result.seconds:
        result = ChildResult(outcome=causes.BAD_RESULT, message="a result without a single timed step")
    return replace(result, outcome=causes.cause_of_exit(exited, result.outcome))


def rank_environment(inherited: Mapping[str, str], rank: int, ranks: int) -> dict[str, str]:
    """Return the environment variables of one of several processes: those of torchrun except the address,
    which a file replaces. Each process also gets an equal number of the host's cores, unless the user set
    `OMP_NUM_THREADS`.
    """
    if ranks == 1:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS") or str(max(1, cores // ranks)),
    }
    if sys.platform == "linux":  # gloo would look up the host's name, which may fail in a container
        variables["GLOO_SOCKET_IFNAME"] = inherited.get("GLOO_SOCKET_IFNAME") or "lo"
    return variables


def _baselines(targets: Sequence[Target]) -> list[GpuBaseline | None]:
    """Wait until no other process uses the GPUs, and return the memory and processes of each GPU. The time
    limit applies to all of them together.
    """
    deadline = time.monotonic() + contamination.MAX_WAIT_SECONDS
    return [
        contamination.before(target.card, patience=max(0.0, deadline - time.monotonic()))
        if target.card
        else None
        for target in targets
    ]


def _environments(request: MeasurementRequest, targets: Sequence[Target]) -> list[dict[str, str]]:
    # Waiting OpenMP threads occupy cores by default. On a busy host a step then takes minutes.
    inherited = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ} if targets[0].type == "cpu" else os.environ
    return [
        child_environment(inherited, request.setup, visibility=target.visibility)
        | rank_environment(os.environ, rank, len(targets))
        for rank, target in enumerate(targets)
    ]


def _first_cause(children: Children, runs: Sequence[RankRun]) -> int:
    """Return the rank that decides the outcome: the first that failed, or any if none did."""
    cause = children.first_cause(lambda rank: runs[rank].result.failed_at)
    if cause is not None:
        return cause
    bad = (rank for rank, run in enumerate(runs) if run.result.outcome != causes.OK)
    return next(bad, 0)


def _measurement(
    request: MeasurementRequest, runs: Sequence[RankRun], failed_rank: int, date: str
) -> Measurement:
    """Return the measurement of all ranks together, with the outcome of the rank `failed_rank`."""
    footprints = [run.footprint() for run in runs]
    reasons = [run.contamination() for run in runs]
    worst, outcome = worst_of(footprints), runs[failed_rank].result.outcome
    slowest = slowest_of(runs) if outcome == causes.OK else failed_rank
    decisive, result = runs[worst].result, runs[slowest].result
    several = len(runs) > 1
    return Measurement(
        job=request.job,
        recipe=request.recipe,
        loop=request.loop,
        device=runs[worst].target.describe(decisive.device_name, decisive.total_bytes),
        outcome=outcome,
        footprint=footprints[worst],
        timing=runs[slowest].timing() if outcome == causes.OK or not several else None,
        versions=result.versions,
        when=date,
        startup=result.startup if outcome == causes.OK or not several else None,
        first_context_bytes=decisive.first_context_bytes,
        smi_bytes=decisive.smi_bytes,
        smi_nvml_bytes=decisive.smi_nvml_bytes,
        contaminated=_of_ranks(reasons, runs),
        crowded=result.crowded,
        disturbed=result.disturbed,
        clock=runs[slowest].clock() if outcome == causes.OK else None,
        host_loop_seconds=result.host_loop_seconds,
        losses=runs[0].result.losses,
        results=runs[0].result.results,
        message=_message(runs, failed_rank),
        gpus=len(runs),
        ranks=tuple(run.to_measured(rank, footprints[rank], reasons[rank]) for rank, run in enumerate(runs))
        if several
        else (),
        fabric_seconds=runs[0].result.fabric_seconds,
        exposed_fabric_seconds=runs[0].result.exposed_fabric_seconds,
    )


def _of_ranks(reasons: Sequence[str | None], runs: Sequence[RankRun]) -> str | None:
    """Return the first reason why the GPU of a rank was shared, with the GPU's index if there are several.
    None without any.
    """
    if len(runs) == 1:
        return reasons[0]
    return next(
        (f"GPU {runs[rank].target.index}: {reason}" for rank, reason in enumerate(reasons) if reason), None
    )


def _message(runs: Sequence[RankRun], cause: int) -> str:
    """Return the exception of a failed measurement, or its last output; empty for a successful run."""
    run = runs[cause]
    if run.result.outcome == causes.OK:
        return ""
    output = "\n".join(run.exited.tail.strip().splitlines()[-_MESSAGE_LINES:])[-4000:]
    if run.result.outcome == causes.TIMEOUT:
        return f"Still running after {run.request.deadline_seconds:g} s, so it was stopped.\n{output}".strip()
    message = run.result.message or output
    if len(runs) == 1:
        return message
    return f"Rank {cause} of {len(runs)}{f': {message}' if message else ' ended first, without a message.'}"


def _output(exits: Sequence[ChildExit]) -> str:
    """Return the last output of each measured process, one after the other."""
    if len(exits) == 1:
        return exits[0].tail
    return "\n".join(f"--- rank {rank} ---\n{exited.tail}" for rank, exited in enumerate(exits))


# ---- child processes --------------------------------------------------------------------------------------


GRACE_SECONDS = 1.0
"""Seconds between the first failed process and the kill of all others (chosen)."""


class Children:
    """Child processes of one experiment that end together, as a context manager that leaves no process
    behind."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
        self._children = [
            Child(command, environment=environment)
            for command, environment in zip(commands, environments, strict=True)
        ]
        self._open = ExitStack()
        self._change = threading.Condition()
        self.failed: list[int] = []
        """Indices of the child processes that failed by themselves, in the order of detection."""
        self._ended, self._killing = 0, False

    def __enter__(self) -> Self:
        # If a child cannot start, the stack ends those that were started before.
        with ExitStack() as opened:
            for child in self._children:
                opened.enter_context(child)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def owns(self, pid: int) -> bool:
        """Return True if the process `pid` is in the session of one of the child processes."""
        return any(child.owns(pid) for child in self._children)

    def wait(self, deadline_seconds: float) -> list[ChildExit]:
        """Sleep until all child processes have exited, one has failed, or the deadline has passed. Return the
        exit of each; no child is alive afterwards.
        """
        if len(self._children) == 1:
            return [self._children[0].wait(deadline_seconds)]
        with ThreadPoolExecutor(len(self._children)) as threads:
            waits = [
                threads.submit(self._wait_for, number, deadline_seconds)
                for number in range(len(self._children))
            ]
            try:
                return [wait.result() for wait in waits]
            except BaseException:  # Ctrl-C as well: the threads must stop waiting
                self._kill()
                raise

    def first_cause(self, failed_at: Callable[[int], float | None]) -> int | None:
        """Return the number of the child process that failed first, by the times of `failed_at`; None without
        a failure.
        """
        return min(self.failed, key=lambda number: failed_at(number) or 0.0, default=None)

    def _wait_for(self, number: int, deadline_seconds: float) -> ChildExit:
        exited = self._children[number].wait(deadline_seconds)
        with self._change:
            # A negative exit code is a signal. A child that was killed here did not fail by itself.
            killed = self._killing and exited.returncode < 0
            self._ended += 1
            self._change.notify_all()
            if exited.returncode == 0 or killed:
                return exited
            if not exited.timed_out:
                self.failed.append(number)
                self._change.wait_for(lambda: self._ended == len(self._children), GRACE_SECONDS)
        self._kill()
        return exited

    def _kill(self) -> None:
        with self._change:
            self._killing = True
        for child in self._children:
            child.kill()


# ---- one process ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The request, device, result and exit of one rank's process."""

    request: MeasurementRequest
    target: Target
    baseline: GpuBaseline | None
    """Used memory and processes of the rank's GPU before the run; None on the CPU, and without NVML."""
    sampler: Sampler | None
    result: ChildResult
    exited: ChildExit
    quiet: Sequence[bool]
    """One flag per step: True if no other process disturbed it on any rank (`quiet_on_all`)."""

    def footprint(self) -> Footprint | None:
        """Return the bytes of the rank's process at their peak; None without a result."""
        peak = None
        if self.baseline and self.sampler:
            # After this time, ranks run further steps with a profiler and compare an evaluation.
            peak = self.baseline.growth(self.sampler.peak_until(self.result.peaks_at))
        return measured_footprint(self.result, peak)

    def timing(self) -> Timing | None:
        """Return the seconds of the rank's steps. In each step all ranks together process a global batch."""
        result = self.result
        return timing_of(result.seconds, self.request.job.batch_size, self.quiet, result.cpu_seconds)

    def clock(self) -> GpuClock | None:
        """Return the clock of the rank's GPU in the timed steps; None on a CPU, and where NVML does not
        report it.
        """
        if self.target.card is None or self.sampler is None:
            return None
        result = self.result
        return clock_between(self.sampler.clocks, self.target.card, result.timed_from, result.timed_until)

    def contamination(self) -> str | None:
        """Return the reason why the rank's GPU was shared, or could not be proven clean; None for a clean
        GPU. Memory of the process group belongs to the run.
        """
        target, result = self.target, self.result
        if target.card is None or self.baseline is None or self.sampler is None:
            doubt = target.doubt
            return f"it is not known whether other processes used the GPU: {doubt}" if doubt else None
        return contamination.first_reason(
            target.card,
            self.baseline,
            self.sampler,
            reserved_bytes=result.reserved_bytes,
            context_bytes=result.first_context_bytes,
            outside_bytes=group_bytes(self.request.setup, self.request.loop)
            + (result.communication_bytes or 0)
            + managed_on_gpu(result.paged_bytes or 0),
            until=result.peaks_at,
        )

    def to_measured(self, rank: int, footprint: Footprint | None, contaminated: str | None) -> RankMeasured:
        """Return this rank's memory, step time and disturbances, for the result of the whole measurement."""
        timing = self.timing()
        on_gpu = self.target.type != "cpu"
        return RankMeasured(
            rank=rank,
            gpu_index=self.target.index if on_gpu else None,
            uuid=self.target.card.uuid if self.target.card else None,
            footprint=footprint,
            step_seconds=timing.step_seconds if timing else None,
            contaminated=contaminated,
            crowded=self.result.crowded,
            disturbed=self.result.disturbed,
        )


def quiet_on_all(results: Sequence[ChildResult]) -> list[bool]:
    """Return True for each step in which no other process disturbed the cores that launch kernels, in any
    rank. Ranks wait for each other, so a disturbance of one lengthens the step in all.
    """
    # A failed rank has fewer steps than the others.
    return [all(calm) for calm in zip(*(result.quiet for result in results), strict=False)]


def worst_of(footprints: Sequence[Footprint | None]) -> int:
    """Return the index of the process with the largest footprint: by NVML's bytes, else reserved bytes, else
    host bytes.
    """

    def needs(number: int) -> tuple[int, int, int]:
        footprint = footprints[number]
        if footprint is None:
            return (-1, -1, -1)
        return (footprint.nvml_bytes or 0, footprint.reserved_bytes or 0, footprint.host_bytes or 0)

    return max(range(len(footprints)), key=needs)


def slowest_of(runs: Sequence[RankRun]) -> int:
    """Return the index of the rank with the longest steps. The ranks' times differ little, because they wait
    for each other.
    """
    timings = [run.timing() for run in runs]
    return max(range(len(runs)), key=lambda number: getattr(timings[number], "step_seconds", 0.0))


def measured_footprint(result: ChildResult, nvml_bytes: int | None) -> Footprint | None:
    """Return the measured peak bytes of a process; None without a result.

    Context and managed memory are NVML's bytes beyond the allocator's segments and the process group, if all
    of them peaked together. They did without retries: the allocator then never returns a segment. Managed
    memory counts as on the GPU as far as these bytes exceed the first context.
    """
    if result.host_bytes is None:
        return None
    context, managed = result.first_context_bytes, 0
    communication = result.communication_bytes or 0
    if nvml_bytes is not None and result.reserved_bytes is not None and not result.retries:
        beyond = max(0, nvml_bytes - result.reserved_bytes - communication)
        managed = min(managed_on_gpu(result.paged_bytes or 0), max(0, beyond - (context or 0)))
        context = beyond - managed
    return Footprint(
        requested_bytes=result.requested_bytes,
        allocated_bytes=result.allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        nvml_bytes=nvml_bytes,
        context_bytes=context,
        communication_bytes=communication,
        managed_bytes=managed,
        host_bytes=result.host_bytes,
        retries=result.retries or 0,
    )
