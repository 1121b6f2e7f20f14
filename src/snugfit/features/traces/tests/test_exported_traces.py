"""`predict --trace`: torch's own functions read the snapshot, and the Chrome trace has a valid format."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.cli.main import run
from snugfit.features.traces.export_trace import export_trace
from snugfit.prediction.predict import predict
from snugfit.results.prediction import Prediction


@pytest.fixture(scope="module")
def one() -> Prediction:
    return predict(small_job("bert", layers=2), "micro_batches(2)", gpu="rtx 4090")


def snapshot_of(prediction: Prediction) -> dict[str, Any]:
    snapshot = pickle.loads(export_trace(prediction, ".pickle"))
    assert isinstance(snapshot, dict)
    return snapshot


@pytest.mark.parametrize("recipe", ["micro_batches(2)", "expandable"])
def test_torch_reads_the_snapshot(one: Prediction, recipe: str) -> None:
    """`segsum` raises an error if blocks do not fill their segments."""
    from torch.cuda import _memory_viz as viz

    prediction = one if str(one.recipe) == recipe else predict(one.job, recipe, gpu="rtx 4090")
    snapshot = snapshot_of(prediction)
    assert "total_reserved" in viz.segsum(snapshot)
    assert (
        sum(segment["total_size"] for segment in snapshot["segments"]) == prediction.footprint.reserved_bytes
    )
    assert "entries" in viz.trace(snapshot)
    assert "Active Memory Timeline" in viz.trace_plot(snapshot)
    live = peak = 0
    for entry in snapshot["device_traces"][0]:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, live)
    assert peak == prediction.footprint.requested_bytes
    lines = []
    viz.compare(snapshot["segments"], [], format_flamegraph=lines.append)
    assert "aten::" in lines[0]
    assert "only_before" in lines[0]


def test_a_chrome_trace_holds_the_step(one: Prediction) -> None:
    """All events are complete and have no negative time. The device's events add up, and no track's events
    overlap."""
    events = json.loads(export_trace(one, ".json"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} > {"host", "device"}
    kernels = [event for event in events if event["ph"] == "X" and event["cat"] == "device"]
    assert one.timing is not None
    assert sum(event["dur"] for event in kernels) == pytest.approx(1e6 * one.timing.device_seconds)
    for category in ("host", "device"):
        track = [event for event in events if event["ph"] == "X" and event["cat"] == category]
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in track)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(track))
    counters = [event for event in events if event["ph"] == "C"]
    assert counters == sorted(counters, key=lambda event: event["ts"])
    highest = max(sum(event["args"].values()) for event in counters)
    assert highest == max(point.live_bytes for point in one.anatomy.curve)


def test_a_chrome_trace_keeps_to_the_format(one: Prediction) -> None:
    """Check the rules of the Trace Event Format, which Perfetto reads.

    Each kind of event has its fields and types. Each track has a name, and its slices do not overlap.
    """
    document = json.loads(export_trace(one, ".json"))
    assert document.keys() == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    needed = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "C": {"ts", "args"}}
    named, used = set(), set()
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid", *needed[event["ph"]]} <= event.keys()
        assert isinstance(event["name"], str)
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        assert all(isinstance(event.get(key, 0.0), int | float) for key in ("ts", "dur"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            used.add((event["pid"], event["tid"]))
        else:
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
    assert used <= named
    for track in used:
        slices = [
            event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == track[1]
        ]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(slices))


@pytest.mark.parametrize(("asked", "why"), [
    (["--trace", "a.txt"], "for PyTorch's memory viewer"),
    (["--trace", "a.json"], "Add --gpu NAME"),
    (["--trace", "a.pickle", "--compare", "bf16"], "writes one recipe"),
])  # fmt: skip
def test_a_trace_that_cannot_be_is_refused_before_the_work(
    asked: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("snugfit.prediction.predict.predict", None)  # no work begins
    assert run(["predict", "bert-base-uncased", "--task", "masked-lm", *asked]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
