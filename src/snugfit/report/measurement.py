"""A measurement in a terminal: its outcome, its bytes and seconds, and its reliability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.job.phases import PhaseWords
from snugfit.report.prediction import footprint_table
from snugfit.report.text.answer import show_gib, subject
from snugfit.report.text.facts import LABEL, Facts
from snugfit.report.text.job import job_line
from snugfit.report.text.pace import show_rate
from snugfit.report.text.page import Page, Sentence
from snugfit.report.text.table import PlainTable, table
from snugfit.report.text.terminal import words
from snugfit.results.footprint import Footprint, Startup, Timing
from snugfit.results.measurement import HIGH_DISTURBANCE, Measurement
from snugfit.results.speed import speed_of
from snugfit.units import MIB, show_bytes, show_mib, show_seconds


def render(measurement: Measurement) -> RenderableType:
    """Return the whole report of one measurement."""
    parts: list[RenderableType] = [_heading(measurement)]
    if measurement.footprint:
        parts.append(footprint_table(measurement.footprint))
    if measurement.ranks and measurement.footprint:
        parts.append(ranks_table(measurement))
    if measurement.timing:
        parts.append(timing_table(measurement.timing, measurement.job.words, fabric_rows(measurement)))
    if measurement.startup and measurement.timing:
        parts.append(
            startup_table(measurement.startup, measurement.timing, several_ranks=measurement.gpus > 1)
        )
    if calls := list(_calls(measurement)):
        parts.append(Facts(tuple(calls)))
    parts += [words(note, style) for note, style in _notes(measurement)]
    return Group(*parts)


def short(measurement: Measurement) -> Page:
    """Return the report of a measurement on one screen: outcome, memory, seconds and notes."""
    footprint, timing = measurement.footprint, measurement.timing
    device = f"{measurement.gpus} x {measurement.device.name}" if measurement.gpus > 1 else None
    about = f"{subject(measurement.job, measurement.recipe, device or measurement.device.name)}: "
    size = (footprint.nvml_bytes or footprint.reserved_bytes or footprint.host_bytes) if footprint else None
    if not measurement.ok or not size:
        about += f"the run ended with {measurement.outcome}"
    else:
        about += f"measured {show_gib(size)}"
        about += f", {show_seconds(timing.step_seconds)} a {measurement.job.words.turn}" if timing else ""
    role = "good" if measurement.ok else "bad"
    return Page(
        [Sentence(about, role), Sentence(f"{'recipe':{LABEL}}  {measurement.recipe}", "recipe")],
        [Facts((*_bytes(footprint), *_seconds(measurement), *_calls(measurement)))],
        (
            Sentence(note, "uncertain" if style else "")
            # For a failed run, the first note is its outcome, which the first line of the report has already.
            for note, style in _notes(measurement)[not measurement.ok :]
        ),
    )


def _bytes(footprint: Footprint | None) -> Iterator[tuple[str, str]]:
    known = {
        "GPU memory": footprint and footprint.nvml_bytes,
        "reserved": footprint and footprint.reserved_bytes,
        "tensors": footprint and footprint.requested_bytes,
        "host memory": footprint and footprint.host_bytes,
    }
    yield from ((name, show_gib(size)) for name, size in known.items() if size)


def _seconds(measurement: Measurement) -> Iterator[tuple[str, str]]:
    timing, job = measurement.timing, measurement.job
    if timing:
        spread = f"spread {100 * timing.spread:.1f} % over {timing.steps} {job.words.turns}"
        yield f"{job.words.turn} time", f"{show_seconds(timing.step_seconds)}, {spread}"
        rate = show_rate(speed_of(timing.step_seconds, job, measured_rates=True), job.words)
        yield "throughput", f"{rate} {job.words.rate}/s"


def _calls(measurement: Measurement) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of measured times of evaluation calls; nothing for training."""
    calls = dict(measurement.calls or {})
    if not calls:
        return
    del calls["peak_bytes"]  # the peak has its own line already
    yield "set-up", show_seconds(calls.pop("setup_seconds"))
    yield "first call", show_seconds(calls.pop("first_call_seconds"))
    for label, name in (("median", "median"), ("90th perc.", "p90")):
        wall, cpu = calls.pop(f"{name}_seconds"), calls.pop(f"{name}_cpu_seconds", None)
        yield label, show_seconds(wall) + (f", {show_seconds(cpu)} of CPU" if cpu is not None else "")
    if "largest_error" in calls:
        equal = ("different", "equal")[calls.pop("ids_equal")]
        where = f" from new token {token} on" if (token := calls.pop("first_different_token", None)) else ""
        error = f"at most {calls.pop('largest_error'):.2g} from the plain model in fp32"
        yield "error", f"{error}, ids {equal}{where}"
    elif "not_compared" in calls:
        yield "error", f"not compared: {calls.pop('not_compared')}"
    for name, value in calls.items():
        first, _, unit = name.rpartition("_")
        if (show := {"seconds": show_seconds, "bytes": show_bytes}.get(unit)) is None:
            yield name, value
        else:
            yield "", f"{first.replace('_', ' ')} {show(value)}"


def _heading(measurement: Measurement) -> Text:
    job, device = measurement.job, measurement.device
    text = words(job_line(job), "bold")
    device_name = device.name
    if measurement.gpus > 1:
        device_name = f"{measurement.gpus} {'processes on' if device.type == 'cpu' else 'x'} {device_name}"
    text.append("\n").append(words(f"recipe {measurement.recipe} · {measurement.loop} loop · {device_name}"))
    if job.model.module is None:
        text.append(" · random weights")
    if device.type == "cpu":
        text.append("\nMeasured on the CPU: the figures of a GPU are missing.")
    return text


def ranks_table(measurement: Measurement) -> PlainTable:
    """Return a table with one line for each rank. The rank whose memory the measurement reports is marked."""
    on_gpu = measurement.device.type != "cpu"
    worst = next(
        (rank_run for rank_run in measurement.ranks if rank_run.footprint == measurement.footprint), None
    )
    rows = []
    for rank in measurement.ranks:
        shape = rank.footprint
        needs = (shape.reserved_bytes, shape.nvml_bytes) if shape else (None, None)
        rows.append(
            (
                str(rank.rank),
                *((f"{rank.gpu_index}", *map(_mib, needs)) if on_gpu else ()),
                _mib(shape.host_bytes if shape else None),
                "" if rank.step_seconds is None else show_seconds(rank.step_seconds),
                "the worst" if shape is not None and rank is worst else "",
            )
        )
    of_gpu = ("GPU>", "Reserved MiB>", "On the GPU MiB>") if on_gpu else ()
    return table(("Rank>", *of_gpu, "Host MiB>", "A step>", ""), rows)


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else show_mib(nbytes)


def fabric_rows(measurement: Measurement) -> list[tuple[str, str, str]]:
    """Return a table row for the seconds of NCCL's collectives in a step; none if they were not measured."""
    seconds, exposed = measurement.fabric_seconds, measurement.exposed_fabric_seconds
    if seconds is None or exposed is None:
        return []
    about = f"NCCL's kernels on rank 0; {show_seconds(exposed)} of it while no other kernel ran"
    return [("exchange", show_seconds(seconds), about)]


def timing_table(timing: Timing, terms: PhaseWords, more: Sequence[tuple[str, str, str]] = ()) -> PlainTable:
    """Return a table of the seconds of a step with the figures derived from them."""
    rows = [
        (terms.turn, show_seconds(timing.step_seconds), f"mean of {timing.steps} steady {terms.turns}"),
        *_with_disturbed(timing),
        ("spread", f"{100 * timing.spread:.1f} %", "(90th - 10th percentile) / mean"),
        (f"{terms.item}/s", f"{timing.samples_per_second:.2f}", ""),
        *more,
    ]
    return table(("Time", ">", ""), rows)


def _with_disturbed(timing: Timing) -> list[tuple[str, str, str]]:
    left_out = len(timing.seconds) - timing.steps
    if not left_out or timing.every_seconds is None:
        return []
    about = f"with {left_out} more steps, in which other processes disturbed the CPU core"
    return [("all steps", show_seconds(timing.every_seconds), about)]


def startup_table(startup: Startup, timing: Timing, *, several_ranks: bool) -> PlainTable:
    """Return a table of the stages of a run's start-up and their sum, in seconds; with `several_ranks` ranks
    those of the slowest.
    """
    group = ", and the group of all ranks" if several_ranks else ""
    rows = [
        ("imports", startup.imports_seconds, "from the start of the process: torch and the model's code"),
        ("context", startup.context_seconds, f"CUDA and the context on the GPU{group}"),
        ("build", startup.build_seconds, "model and optimizer"),
        ("first step", startup.first_step_seconds, "loads kernels, starts worker processes"),
    ]
    if startup.settling_steps:
        steps = f"{startup.settling_steps} more before the steady ones"
        rows.append(("further steps", startup.settling_seconds, steps))
    once = startup.total_seconds(timing.step_seconds)
    rows.append(("start-up", once, "the sum, minus the time of the same steps when steady"))
    return table(
        ("Start", ">", ""),
        [(label, show_seconds(seconds), about) for label, seconds, about in rows if seconds],
    )


def _notes(measurement: Measurement) -> list[tuple[str, str]]:
    notes = []
    if not measurement.ok:
        notes.append((f"The run ended with {measurement.outcome}. Its output has the cause.", "bold red"))
    if measurement.message:
        notes.append((measurement.message, ""))
    if measurement.timing and measurement.timing.unstable:
        notes.append(("Unstable: the steps vary too much to trust the mean. Measure again.", "yellow"))
    if measurement.disturbed and measurement.disturbed > HIGH_DISTURBANCE:
        share = f"{100 * measurement.disturbed:.0f} %"
        notes.append(
            (
                f"Other processes disturbed the CPU core that launches kernels, in {share} of the "
                "samples. Measure again when the machine is idle.",
                "yellow",
            )
        )
    if measurement.clock and measurement.clock.fall:
        notes.append(
            (
                f"The GPU lowered its clock: {measurement.clock.fall}. Check its cooling and power limit.",
                "yellow",
            )
        )
    if measurement.footprint and measurement.footprint.retries:
        times = measurement.footprint.retries
        notes.append(
            (
                f"It fits but thrashes: the allocator released its cache {times} times. A recipe that "
                "needs less is faster: snugfit plan finds one.",
                "yellow",
            )
        )
    if measurement.contaminated:
        notes.append(
            (
                f"Other processes used the GPU: {measurement.contaminated}. End them and measure again.",
                "yellow",
            )
        )
    if measurement.smi_bytes is not None and measurement.smi_nvml_bytes is not None:
        gap = measurement.smi_bytes - measurement.smi_nvml_bytes
        # nvidia-smi rounds to whole MiB.
        same = "agree" if abs(gap) <= 2 * MIB else f"differ by {show_bytes(abs(gap))}"
        notes.append((f"nvidia-smi and NVML {same}.", ""))
    return notes
