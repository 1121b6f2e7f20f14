"""The long report of a prediction for a terminal: memory by category, seconds, and whether the step fits in
the memory.

**The curve.** The curve of live bytes through a step, drawn with block characters, with the phases under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.report.items import BOUND_BY
from snugfit.report.plan.ways_out import of_prediction
from snugfit.report.short import about_build, about_clock, about_rates, note, show_phases, verdict
from snugfit.report.text.job import job_line
from snugfit.report.text.pace import pace
from snugfit.report.text.page import STYLES, Page, with_commands
from snugfit.report.text.passages import micro_batch_passages, phase_passages
from snugfit.report.text.table import PlainTable, table
from snugfit.report.text.terminal import words
from snugfit.results.footprint import Footprint
from snugfit.results.prediction import Anatomy, CurvePoint, Prediction
from snugfit.results.step_seconds import PhaseSeconds, StepSeconds
from snugfit.units import show_bytes, show_mib, show_seconds

LARGEST_SHOWN = 12

_PHASE_ORDER = ("build", "load", "forward", "backward", "clip", "update")


def render(prediction: Prediction, *, operators: bool = False) -> RenderableType:
    """Return the whole report of one prediction."""
    anatomy = prediction.anatomy
    answer = verdict(prediction)
    recipe = Text(str(prediction.recipe), no_wrap=True, overflow="ignore")
    parts: list[RenderableType] = [words(answer.text, STYLES[answer.role]), recipe, heading(prediction)]
    parts += map(words, note(prediction))
    parts += [words(f"{label}: {text}.") for label, text in show_phases(prediction)]
    parts += [footprint_table(prediction.footprint)]
    parts += [ranks_table(prediction)] if prediction.ranks else []
    parts += [
        *about_pace(prediction),
        *_startup(prediction),
        Text(),
        *_peak(prediction),
    ]
    parts += [kinds_table(prediction)]
    parts += [_largest_table(anatomy)] if anatomy.largest else []
    if anatomy.curve:
        parts += draw_curve(
            anatomy.curve, micro_batches=prediction.recipe.pieces, turn=prediction.job.words.turn
        )
    parts += [operators_table(anatomy, prediction.timing)] if operators else []
    parts += [words(f"Uncertain: {doubt}", "yellow") for doubt in prediction.doubts]
    parts += [Page(with_commands(of_prediction(prediction)))]
    return Group(*parts)


def heading(prediction: Prediction) -> Text:
    """Return the title of a prediction: the job, then loop and GPU on a second line."""
    device = prediction.gpu.name if prediction.gpu else "no GPU named"
    if prediction.gpus > 1:
        device = (
            f"{prediction.gpus} x {device}" if prediction.gpu else f"{prediction.gpus} GPUs without a name"
        )
    text = words(job_line(prediction.job), "bold").append("\n")
    text.append(words(f"{prediction.loop} loop · {device}"))
    return text.append("" if prediction.software == "installed" else f" · software {prediction.software}")


def footprint_table(footprint: Footprint) -> PlainTable:
    """Return a table of a step's memory figures, each with its meaning; missing figures are left out."""
    also = ", managed memory" if footprint.managed_bytes else ""
    lines = (
        ("requested", footprint.requested_bytes, "requested by tensors and kernels"),
        ("allocated", footprint.allocated_bytes, "the same, rounded up by the allocator"),
        ("reserved", footprint.reserved_bytes, "reserved by the allocator on the GPU"),
        ("on the GPU", footprint.nvml_bytes, f"reserved{also} and the CUDA context: what NVML counts"),
        ("NCCL", footprint.communication_bytes or None, "of the above: to exchange tensors with other GPUs"),
        (
            "managed",
            footprint.managed_bytes or None,
            "of the above: paged optimizer states, which the driver moves to the host if memory is short",
        ),
        ("CUDA context", footprint.context_bytes, "of the above: CUDA and its loaded libraries"),
        ("host", footprint.host_bytes, "resident memory of the process"),
        ("page-locked", footprint.pinned_bytes or None, "of the host's: buffers of the GPU's copies"),
    )
    known = [(name, show_mib(size), reason) for name, size, reason in lines if size is not None]
    return table(("At the peak", "MiB>", "Meaning"), known)


def ranks_table(prediction: Prediction) -> PlainTable:
    """Return a table of the memory of each rank, if ranks differ. The rank whose figures the report shows is
    marked.
    """
    rows = [
        (
            f"{rank.rank}{' (shown)' if rank.rank == prediction.rank else ''}",
            f"{rank.stage + 1}",
            f"{rank.layers}",
            show_mib(rank.requested_bytes),
            show_mib(rank.reserved_bytes),
            "" if rank.nvml_bytes is None else show_mib(rank.nvml_bytes),
            "" if rank.idle_seconds is None else show_seconds(rank.idle_seconds),
        )
        for rank in prediction.ranks
    ]
    heads = ("Rank", "Stage>", "Layers>", "Requested MiB>", "Reserved MiB>", "On the GPU MiB>", "Waits>")
    return table(heads, rows)


def about_pace(prediction: Prediction) -> list[Text]:
    """Return sentences on the seconds of a step and on the hardware limit of its speed."""
    timing, speed, terms = prediction.timing, prediction.speed, prediction.job.words
    if timing is None or speed is None:
        return []
    roofline = sum(line.roofline_seconds for line in timing.phases)
    bound = BOUND_BY.get(timing.bound, timing.bound)
    travels = f", and copies of activations take {show_seconds(timing.link_seconds)}" * bool(
        timing.link_seconds
    )
    return [
        words(
            f"A {terms.turn} takes {pace(speed, terms)}. It is bound by {bound}: the GPU is busy for "
            f"{show_seconds(timing.device_seconds)} of it, and would need {show_seconds(roofline)} at the "
            f"rates of its data sheet{travels}{about_clock(timing)}{about_rates(timing)}."
        ),
        *_about_stages(timing),
        *_about_exchanges(timing),
    ]


def _about_stages(timing: StepSeconds) -> list[Text]:
    """Return a sentence on the seconds in which GPUs wait for other pipeline stages; empty without waits."""
    if not timing.bubble:
        return []
    return [
        words(
            f"This GPU waits {show_seconds(timing.idle_seconds)} of it for other stages. All GPUs spend "
            f"{100 * timing.bubble:.0f} % of their time so: the bubble. More micro-batches make it smaller."
        )
    ]


def _about_exchanges(timing: StepSeconds) -> list[Text]:
    """Return a sentence on the seconds of collectives between GPUs, and on the seconds that no computation
    hides; empty without collectives.
    """
    if (efficiency := timing.scaling_efficiency) is None:
        return []
    return [
        words(
            f"The GPUs exchange tensors for {show_seconds(timing.communication_seconds)}, of which "
            f"{show_seconds(timing.exposed_communication_seconds)} are not hidden behind the computation: "
            f"scaling efficiency {100 * efficiency:.0f} %."
        )
    ]


def _startup(prediction: Prediction) -> list[RenderableType]:
    """Return a sentence on the seconds of a run's start-up and its parts; empty if they are not predicted."""
    start, timing = prediction.startup, prediction.timing
    if start is None or timing is None:
        return []
    before = start.imports_seconds + start.context_seconds
    longer = start.first_step_seconds - timing.step_seconds
    return [
        words(
            f"Start-up takes about {show_seconds(start.total_seconds(timing.step_seconds))}: "
            f"{show_seconds(before)} for imports and the CUDA context, {show_seconds(start.build_seconds)} "
            f"to build the model, and {show_seconds(longer)} more in the first {prediction.job.words.turn}."
        )
    ]


def _peak(prediction: Prediction) -> list[RenderableType]:
    moment = prediction.footprint.at
    if moment is None:
        return []
    turn = prediction.job.words.turn
    when = f"in {turn} {moment.step}" if moment.step else f"before the first {turn}"
    return [words(f"The peak is {when}: {moment}."), *map(words, about_build(prediction))]


def kinds_table(prediction: Prediction) -> PlainTable:
    """Return a table of the bytes by category (weights, activations, ...) at the peak, each with its
    reason.
    """
    lines = prediction.anatomy.kinds
    total = sum(line.bytes for line in lines) or 1
    rows = [
        (line.kind, show_mib(line.bytes), f"{100 * line.bytes / total:.1f} %", line.reason)
        for line in sorted(lines, key=attrgetter("bytes"), reverse=True)
    ]
    return table(("At the peak, by kind", "MiB>", "Share>", "Reason"), rows)


def _largest_table(anatomy: Anatomy) -> PlainTable:
    rows = [
        (
            line.module or "(the loop)",
            line.operator,
            line.phase,
            line.kind,
            f"{line.count:,}",
            show_mib(line.bytes),
        )
        for line in anatomy.largest[:LARGEST_SHOWN]
    ]
    return table(
        ("Largest at the peak, by module", "Operator", "Allocated in", "Kind", "Tensors>", "MiB>"),
        rows,
    )


def operators_table(anatomy: Anatomy, timing: StepSeconds | None = None) -> PlainTable:
    """Return a table of FLOPs, bytes and kernels of each operator group in each phase, with shares of the
    step's totals. With `timing` the table has milliseconds too."""
    known = {(line.group, line.phase): line for line in timing.phases} if timing else {}
    flops = sum(line.flops for line in anatomy.operators) or 1
    moved = sum(line.bytes for line in anatomy.operators) or 1
    rows = [
        (
            line.group,
            line.phase,
            f"{line.kernels:,}",
            f"{line.flops / 1e9:,.1f}",
            f"{100 * line.flops / flops:.1f} %",
            show_mib(line.bytes),
            f"{100 * line.bytes / moved:.1f} %",
            *(f"{1000 * seconds:.2f}" for seconds in _device_and_host(known.get((line.group, line.phase)))),
        )
        for line in sorted(anatomy.operators, key=lambda line: (_place(line.phase), -line.flops, -line.bytes))
    ]
    heads = ["Operator group", "Phase", "Kernels>", "GFLOP>", "Share>", "MiB moved>", "Share>"]
    heads += ["GPU ms>", "host ms>"] if timing else []
    return table(heads, rows, title=f"One steady step; {anatomy.syncs:,} synchronizations")


def _device_and_host(line: PhaseSeconds | None) -> tuple[float, ...]:
    return (line.device_seconds, line.host_seconds) if line else ()


def _place(phase: str) -> int:
    return _PHASE_ORDER.index(phase) if phase in _PHASE_ORDER else len(_PHASE_ORDER)


# ---- the curve ---------------------------------------------------------------------------------------------


COLUMNS = 72
NARROWEST_NUMBER = 3
"""Smallest width of a micro-batch in columns of the chart at which it gets its number."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw_curve(
    curve: Sequence[CurvePoint], *, micro_batches: int = 1, turn: str = "step"
) -> list[RenderableType]:
    """Return the live bytes during one `turn` (a step or a call) as lines of text, with the phases below.

    Micro-batches get numbers if they are too short for names.
    """
    top = max(point.live_bytes for point in curve) or 1
    heights = sample([(point.position, point.live_bytes / top) for point in curve], COLUMNS)
    passages, note = phase_passages(curve), ""
    rounds = micro_batch_passages(curve, micro_batches, NARROWEST_NUMBER / COLUMNS)
    forward = min(
        (passage.end - passage.start for passage in passages if passage.name == "forward"), default=1.0
    )
    # If forward passes are narrow on the chart, numbers of micro-batches replace the names of phases.
    if rounds and forward * COLUMNS < len("└forward"):
        passages = [*rounds, *(passage for passage in passages if passage.start >= rounds[-1].end)]
        note = ", the numbers are micro-batches" if len(rounds) > 1 else ""
    spans = [
        (passage.name, round(passage.start * COLUMNS), round(passage.end * COLUMNS)) for passage in passages
    ]
    head = words(f"Live bytes through one steady {turn} (top {show_bytes(top)}{note})", "bold")
    return [head, words("\n".join([*bars(heights), legend(spans, COLUMNS)])), Text()]


def bars(heights: Sequence[float], *, rows: int = 4) -> list[str]:
    """Return bars of the given heights (0 to 1) as `rows` lines of block characters, the highest
    line first.
    """
    # Each character of `_EIGHTHS` represents one of eight levels.
    levels = [round(max(0.0, min(1.0, height)) * rows * 8) for height in heights]
    return [
        "".join(_EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels)
        for row in reversed(range(rows))
    ]


def sample(points: Sequence[tuple[float, float]], columns: int) -> list[float]:
    """Return the largest value in each of `columns` equal parts of [0, 1]; an empty part repeats the one
    before it.

    A part shows its maximum and not its mean, because the curve is there for its peaks.
    """
    largest: list[float | None] = [None] * columns
    for position, value in points:
        part = min(columns - 1, max(0, int(position * columns)))
        largest[part] = max(value, largest[part] or 0.0)
    samples, current = [], 0.0
    for maximum in largest:
        current = current if maximum is None else maximum
        samples.append(current)
    return samples


def legend(spans: Sequence[tuple[str, int, int]], columns: int) -> str:
    """Return a line of names under the columns that they cover, each truncated to its columns."""
    line = [" "] * columns
    for name, start, end in spans:
        width = end - start
        text = ("└" + name)[:width] if width > 1 else "└"[:width]
        line[start : start + len(text)] = text
    return "".join(line).rstrip()
