"""The guide's table of methods and its small tables, computed from the results of the experiments.

For each method, the guide states an effect on speed and memory. Here the effect on memory is the prediction's
difference to the baseline experiment. The speed is the measured one; without a measurement the published one,
otherwise the predicted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from snugfit.features.guide.result import GuideResult, GuideRow
from snugfit.features.guide.suite import VANILLA, Method, baselines, methods
from snugfit.results.footprint import Kind
from snugfit.units import MIB, show_mib

UNKNOWN = ""

EQUAL_WITHIN = 0.02
"""Largest relative change that counts as none, because measured steps vary by about as much."""


@dataclass(frozen=True, kw_only=True)
class MethodLine:
    """One row of the guide's table of methods: the effect of a method on speed and memory."""

    method: str
    """Name of the method in Hugging Face's guide."""

    experiment: str
    """Name of the experiment that uses the method; empty for none."""

    memory: float | None
    """Predicted change of memory as a share of the vanilla experiment's (without any method); negative if
    less.
    """

    speed: float | None
    """Change of samples per second as a share of the vanilla experiment's; None if unknown."""

    speed_from: str
    """Origin of `speed`: `measured`, `published` or `predicted`; empty if unknown."""

    guide_speed: str
    """The guide's statement on the method's speed."""

    guide_memory: str
    """The guide's statement on the method's memory."""


@dataclass(frozen=True, kw_only=True)
class StageLine:
    """GPU memory at one stage of the guide's first experiment, such as after loading the model."""

    stage: str
    """Stage of the run: `idle`, `context` (CUDA loaded), `weights` or `training`."""

    predicted_bytes: int | None
    """Predicted bytes of GPU memory at this stage; None if unknown."""

    published: tuple[tuple[str, int], ...]
    """Published bytes of GPU memory at this stage, by machine."""


def helps(change: float | None, *, less_is_better: bool) -> str:
    """Return `Yes` if a relative change of speed or memory is an improvement, `No` if it is not, `?` if it is
    unknown.
    """
    if change is None:
        return "?"
    gain = -change if less_is_better else change
    return "Yes" if gain > EQUAL_WITHIN else "No"


def method_lines(result: GuideResult) -> tuple[MethodLine, ...]:
    """Return the rows of the guide's table of methods, computed from the experiments."""
    rows = {row.name: row for row in result.rows}
    return tuple(
        _method_line(method, rows[name] if name else None, result.vanilla)
        for method in methods()
        for name in method.experiments or ("",)
    )


def _method_line(method: Method, row: GuideRow | None, vanilla: GuideRow) -> MethodLine:
    speed, origin = _speed(row, vanilla) if row else (None, "")
    return MethodLine(
        method=method.method,
        experiment=row.name if row else "",
        memory=change(row.predicted_bytes, vanilla.predicted_bytes) if row else None,
        speed=speed,
        speed_from=origin,
        guide_speed=method.speed,
        guide_memory=method.memory,
    )


def _speed(row: GuideRow, vanilla: GuideRow) -> tuple[float | None, str]:
    if row.timing and vanilla.timing:
        return change(row.timing.samples_per_second, vanilla.timing.samples_per_second), "measured"
    # A published speed is compared only with vanilla on the same machine.
    before = {then.published.machine: then.published.samples_per_second for then in vanilla.then}
    for then in row.then:
        printed = then.published
        if printed.samples_per_second and before.get(printed.machine):
            return change(printed.samples_per_second, before[printed.machine]), "published"
    speed_now, base = row.predicted_speed, vanilla.predicted_speed
    if speed_now and base:
        return change(speed_now.samples_per_second, base.samples_per_second), "predicted"
    return None, ""


def change(part: float | None, whole: float | None) -> float | None:
    """Return the relative change from the number `whole` to `part`; None when either is unknown."""
    return None if part is None or not whole else part / whole - 1


def stage_lines(result: GuideResult) -> Iterator[StageLine]:
    """Yield the predicted GPU memory at the guide's four stages: idle, CUDA context, weights loaded,
    training.
    """
    footprint = result.vanilla.predicted
    context = footprint.context_bytes if footprint else None
    weights = None
    if footprint and context is not None:
        weights = context + footprint.kinds.get(Kind.WEIGHTS, 0)
    for stage, size, published_as in (
        ("idle", 0, "idle"),
        ("context", context, "one tiny tensor on the GPU (context and kernels)"),
        ("weights", weights, "model weights loaded"),
    ):
        printed = tuple((line.machine, line.mib * MIB) for line in baselines() if line.what == published_as)
        yield StageLine(stage=stage, predicted_bytes=size, published=printed)
    trained = tuple((then.published.machine, then.published_bytes) for then in result.vanilla.then)
    yield StageLine(
        stage=f"training ({VANILLA})", predicted_bytes=result.vanilla.predicted_bytes, published=trained
    )


def show_rate(samples_per_second: float | None) -> str:
    """Return samples per second as text with two digits; empty if they are unknown."""
    return f"{samples_per_second:.2f}" if samples_per_second else UNKNOWN


def show_size(size: int | None) -> str:
    """Return a size in MiB as text; empty if it is unknown."""
    return UNKNOWN if size is None else show_mib(size)


def show_share(part: float | None, whole: float | None, places: int = 1) -> str:
    """Return the relative change from `whole` to `part` as text in percent."""
    return show_with_sign(change(part, whole), places)


def show_with_sign(share: float | None, places: int = 1) -> str:
    """Return a fraction as text in percent, with its sign; empty if it is unknown."""
    return UNKNOWN if share is None else f"{100 * share:+.{places}f} %"
