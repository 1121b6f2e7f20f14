"""Report of a verified plan (its best recipes measured) for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from snugfit.features.accuracy.order import gap_line, order_line, recipes_grid
from snugfit.features.accuracy.verify import Verification
from snugfit.planning.plan import Plan
from snugfit.report.text.grid import Grid
from snugfit.report.text.page import Page, Sentence
from snugfit.results.footprint import Footprint
from snugfit.units import show_bytes, show_mib


def render(verified: Verification) -> Page:
    """Return the terminal report of a verified plan: a table of predicted and measured recipes, with
    conclusions.
    """
    return Page(
        [grid(verified), *_peers_grid(verified)],
        conclusions(verified),
        (Sentence(text, "fault") for text in _complaints(verified)),
    )


def document(plan: Plan, verified: Verification) -> dict[str, Any]:
    """Return the JSON document of a plan together with every measured run."""
    return {**verified.to_json(), "plan": plan.to_json()}


def grid(verified: Verification) -> Grid:
    """Return a table of a plan's measured recipes in the plan's order, with predictions and measurements."""
    device = verified.device or "not measured"
    return recipes_grid(
        verified.runs, f"The plan's best, predicted for {verified.gpu} and measured on {device}"
    )


def conclusions(verified: Verification) -> Iterator[str]:
    """Yield sentences on the measured recipes of a plan: their order, the fastest, and large errors."""
    yield from filter(None, (order_line(verified.runs), gap_line(verified.runs), peer_line(verified)))
    for run in verified.runs:
        spoilt = run.contaminated or run.crowded
        if spoilt and run.outcome == "ok":
            yield f"{run.recipe} was disturbed while it was measured: {spoilt}."
        if run.clock and run.clock.fall:
            yield f"The GPU lowered its clock while {run.recipe} was measured: {run.clock.fall}."


def _peers_grid(verified: Verification) -> Iterator[Grid]:
    """Yield a table with one row for each measured run of the plain Trainer; none without such runs."""
    rows = tuple(
        (
            peer.name,
            peer.run.outcome if peer.run.outcome != "ok" else _mib(peer.run.measured),
            f"{1e3 * peer.run.step_seconds:,.1f}" if peer.run.step_seconds else "",
        )
        for peer in verified.peers.runs
    )
    if rows:
        yield Grid(
            title="Usual runs of the plain Trainer, measured",
            heads=("Peer", "NVML MiB>", "ms a step>"),
            rows=tuple((name, str(size or ""), seconds) for name, size, seconds in rows),
        )


def peer_line(verified: Verification) -> str:
    """Return a sentence that compares the plan's first choice with the fastest plain Trainer. Return an empty
    text if the Trainer was not requested.
    """
    if verified.peers.why_none:
        return f"The plain Trainer was not measured: {verified.peers.why_none}"
    peer, times = verified.peers.best, verified.faster_than_peer
    if peer is None and verified.peers.runs:
        return "No run of the plain Trainer reached its end, so there is nothing to compare with."
    if peer is None or times is None:
        return ""
    first = verified.runs[0]
    faster = f"{times:.2f} times as fast as" if times >= 1 else f"{100 * (1 / times - 1):.1f} % slower than"
    text = f"The first choice is {faster} the best of the plain Trainer ({peer.name})"
    sizes = [run.measured.nvml_bytes if run.measured else None for run in (first, peer.run)]
    if sizes[0] is None or sizes[1] is None:
        return f"{text}."
    less = sizes[1] - sizes[0]
    return f"{text}, and takes {show_bytes(abs(less))} {'less' if less >= 0 else 'more'}."


def _mib(footprint: Footprint | None) -> str:
    return show_mib(footprint.nvml_bytes) if footprint and footprint.nvml_bytes is not None else ""


def _complaints(verified: Verification) -> Iterator[str]:
    for run in verified.outside:
        yield f"{run.recipe}: {run.complaint}"
        if run.message:
            yield run.message.strip().splitlines()[-1]
