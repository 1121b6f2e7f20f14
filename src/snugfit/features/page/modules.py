"""Charts of the memory by module at the peak, and of a step's phases on host and device."""

from __future__ import annotations

from collections.abc import Sequence

from snugfit.features.page.chart import Chart, ModuleMap, Timeline
from snugfit.results.prediction import ModuleLine
from snugfit.results.step_seconds import PhaseSpan
from snugfit.units import show_bytes, show_mib, show_seconds

LOOP = "(the loop)"
"""The name for tensors that no module allocated."""


def modules_at_peak(modules: Sequence[ModuleLine]) -> Chart:
    """Return the chart of the memory at the peak, by the module that allocated it and by category."""
    whole = sum(line.bytes for line in modules) or 1
    first = modules[0]
    return Chart(
        title=f"Bytes at the peak by module, {show_bytes(whole)} in all",
        about=(
            f"A map of {show_bytes(whole)} by module and kind. The largest area is {first.module or LOOP}: "
            f"{first.kind}, {show_bytes(first.bytes)}."
        ),
        drawing=ModuleMap(lines=modules),
        heads=("Module", "Kind", "MiB>", "Share>"),
        rows=[
            (
                line.module or LOOP,
                str(line.kind),
                show_mib(line.bytes),
                f"{100 * line.bytes / whole:.1f} %",
            )
            for line in modules
        ],
        note="A * means all layers of a stack. Tensors of the training loop have no module.",
    )


def timeline(spans: Sequence[PhaseSpan], step_seconds: float, turn: str = "step") -> Chart:
    """Return the chart of a steady step's phases in time: when the host launches them and when the device
    runs them.
    """
    return Chart(
        title=f"Host and GPU in one {turn}, {show_seconds(step_seconds)} from {turn} to {turn}",
        about=f"The times at which the host and the GPU work in one steady {turn}.",
        drawing=Timeline(spans=spans, end_seconds=max([step_seconds, *(span.end_seconds for span in spans)])),
        heads=("Where", "Phase", "From>", "To>", "Of that busy>"),
        rows=[
            (
                span.lane,
                span.phase,
                show_seconds(span.start_seconds),
                show_seconds(span.end_seconds),
                show_seconds(span.busy_seconds),
            )
            for span in spans
        ],
        note="The host launches kernels before the GPU runs them, also those of the next step; when about "
        "1,000 are waiting, it waits too.",
    )
