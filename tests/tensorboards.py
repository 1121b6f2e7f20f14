"""Read a folder of logs with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def logs_under(folder: Path) -> list[Path]:
    """Return the folders that hold event files."""
    return sorted({file.parent for file in folder.rglob("events.out.tfevents.*")})


def scalars_in(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Return each figure's steps and values, as TensorBoard shows them."""
    found = EventAccumulator(str(log)).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
