"""Report of an upgrade's changes for a terminal and Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from snugfit.features.environments.changes import UpgradeCheck, ValueChange
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.page import Page, Sentence
from snugfit.units import show_bytes, show_per_cent, show_seconds


def render(check: UpgradeCheck) -> Page:
    """Return the report: the bytes and seconds after the upgrade, then tables of all differences."""
    return Page(
        [_verdict(check)],
        [f"{job_line(check.job)} · {check.recipe}{f' · {check.gpu}' if check.gpu else ''}"],
        _tables(check),
        (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in _new_doubts(check)),
    )


def _verdict(check: UpgradeCheck) -> Sentence:
    before, after = check.before, check.after
    text = _change_of("memory", before.needed_bytes, after.needed_bytes, show_bytes)
    if before.step_seconds and after.step_seconds:
        text += f", {_change_of('step', before.step_seconds, after.step_seconds, show_seconds)}"
    if after.fits is False:
        return Sentence(f"After the upgrade the step does not fit: {text}.", "bad")
    return Sentence(
        f"After the upgrade: {text}.", "good" if after.needed_bytes <= before.needed_bytes else "tight"
    )


def _change_of(name: str, before: float, after: float, show: object) -> str:
    assert callable(show)
    if before == after:
        return f"{name} stays at {show(after)}"
    return f"{name} changes from {show(before)} to {show(after)} ({show_per_cent(after, before)})"


def _tables(check: UpgradeCheck) -> Iterator[Grid]:
    if rows := tuple(
        (one.unit, one.name, _value(one, one.before), _value(one, one.after)) for one in check.changes
    ):
        yield Grid(title="Differences", heads=("what", "name", "before >", "after >"), rows=rows)
    if changes := check.argument_changes:
        yield Grid(
            title="Arguments",
            heads=("of", "added", "removed"),
            rows=tuple((one.owner, ", ".join(one.added), ", ".join(one.removed)) for one in changes),
        )


def _value(change: ValueChange, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "none"
    if change.unit == "bytes":
        return show_bytes(int(value))
    return show_seconds(value) if change.unit == "seconds" else f"{value:,}"


def _new_doubts(check: UpgradeCheck) -> list[str]:
    return [doubt for doubt in check.after.doubts if doubt not in check.before.doubts]
