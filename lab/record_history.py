"""Record every allocation, free and segment of a measured run on a GPU, as compact JSON.

    python lab/record_history.py OUT.json.gz bert-large-uncased sequence-classification "adamw_fused"

The run is `snugfit.measure` of three steps with torch's memory history on. Events are `["alloc", address,
size]`, `["free_requested", address, size]` and `["segment_alloc", address, size]` in their order, addresses
relative to the lowest. tests/test_addresses.py replays such files.
"""

from __future__ import annotations

import gzip
import json
import pickle
import sys
import tempfile
from pathlib import Path

import snugfit

ACTIONS = ("alloc", "free_requested", "segment_alloc", "segment_free")


def record(job: snugfit.Job, recipe: str, loop: str = "plain") -> dict[str, object]:
    """Return the run's allocator events and its measurement."""
    with tempfile.TemporaryDirectory() as room:
        history = Path(room) / "history.pickle"
        measurement = snugfit.measure(
            job, recipe, loop=loop, warmup=2, steps=1, ledger=None, record_history=history
        )
        with history.open("rb") as file:
            entries = pickle.load(file)["device_traces"][0]  # this pickle is of our own child
    events = [
        [entry["action"], entry["addr"], entry["size"]] for entry in entries if entry["action"] in ACTIONS
    ]
    return {"measurement": measurement.to_json(), "events": compact(events)}


def compact(events: list[list[object]]) -> list[list[object]]:
    """Return the events with addresses relative to the lowest."""
    lowest = min(address for _, address, _ in events)  # type: ignore[type-var]
    return [[action, address - lowest, size] for action, address, size in events]  # type: ignore[operator]


def main() -> None:
    """Record the run and write the output file."""
    out, model, task, recipe = sys.argv[1:5]
    job = snugfit.Job(model=snugfit.Model.find(model), task=snugfit.Task.parse(task))
    with gzip.open(out, "wt") as file:
        json.dump(record(job, recipe, *sys.argv[5:6]), file)


if __name__ == "__main__":
    main()
