"""Memory snapshots in the form of torch 2.13, and hostile pickles in place of snapshots."""

from __future__ import annotations

import io
import os
import pickle
import struct
import time
from collections.abc import Sequence
from typing import Any

import pytest

from snugfit.errors import UsageError
from snugfit.features.diagnosis.diagnose import diagnose
from snugfit.features.diagnosis.result import Diagnosis, FailureKind
from snugfit.units import MIB

MODEL = "/opt/lib/transformers/models/llama/modeling_llama.py"


def frames(name: str, line: int) -> list[dict[str, Any]]:
    """Return stack frames, the innermost first: the user's frame between torch's own and C++."""
    return [
        {"name": "c10::cuda::malloc", "filename": "??", "line": 0},
        {"name": "linear", "filename": "/opt/lib/torch/nn/functional.py", "line": 9},
        {"name": name, "filename": MODEL, "line": line},
        {"name": "<module>", "filename": "/srv/train.py", "line": 3},
    ]


def segment(address: int, blocks: Sequence[tuple[str, int, str]]) -> dict[str, Any]:
    laid_out, at = [], address
    for state, size, name in blocks:
        used = [] if state == "inactive" else frames(name, 7)
        laid_out.append({"address": at, "size": size, "requested_size": size, "state": state, "frames": used})
        at += size
    return {
        "device": 0, "address": address, "total_size": at - address, "stream": 0, "segment_type": "large",
        "allocated_size": 0, "active_size": 0, "requested_size": 0, "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": laid_out,
    }  # fmt: skip


def event(action: str, address: int, size: int, name: str = "forward", **more: Any) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": 5,
        "frames": frames(name, 7), **more,
    }  # fmt: skip


def snapshot(*trace: dict[str, Any]) -> bytes:
    """Return a snapshot of 300 MiB in two segments. Two lines of code use 120 MiB, and 180 MiB are free in
    blocks of at most 100.
    """
    segments = [
        segment(1000 * MIB, [("active_allocated", 40 * MIB, "attention"), ("inactive", 100 * MIB, "")]),
        segment(
            2000 * MIB,
            [
                ("active_allocated", 60 * MIB, "mlp"),
                ("inactive", 80 * MIB, ""),
                ("active_allocated", 20 * MIB, "mlp"),
            ],
        ),
    ]
    return pickle.dumps({
        "segments": segments, "device_traces": [list(trace)],
        "allocator_settings": {"expandable_segments": False}, "external_annotations": [],
    })  # fmt: skip


def read(content: bytes) -> Diagnosis:
    return diagnose(content, "snap.pickle")[0]


def failed_request(size: int) -> dict[str, Any]:
    return {**event("oom", 0, size, "head"), "device_free": 10 * MIB}


def test_the_end_of_a_snapshot_has_the_largest_tensors_by_line() -> None:
    found = read(snapshot())
    assert found.kind is FailureKind.NO_FAILURE
    assert [(one.code, one.bytes, one.count) for one in found.live] == [
        ("mlp (modeling_llama.py:7)", 80 * MIB, 2),
        ("attention (modeling_llama.py:7)", 40 * MIB, 1),
    ]
    assert found.segments is not None
    use = found.segments
    assert (use.segments, use.partly_used, use.largest_free_bytes) == (2, 2, 100 * MIB)
    assert use.unallocated_bytes == 180 * MIB


@pytest.mark.parametrize(("size", "kind"), [(160, FailureKind.FRAGMENTATION), (300, FailureKind.SHORTAGE)])
def test_a_failed_request_has_its_kind_and_its_code(size: int, kind: FailureKind) -> None:
    found = read(snapshot(failed_request(size * MIB)))
    assert (found.kind, found.requested_bytes) == (kind, size * MIB)
    assert found.traceback == "head (modeling_llama.py:7)"


def test_tensors_at_the_failure_are_those_of_that_moment() -> None:
    """After the out-of-memory error, 20 MiB were allocated, 30 MiB of another line freed, and a segment
    released.
    """
    freed, allocated = 2200 * MIB, 2140 * MIB
    found = read(
        snapshot(
            event("alloc", freed, 30 * MIB, "attention"),
            failed_request(160 * MIB),
            event("free_requested", freed, 30 * MIB),
            event("free_completed", freed, 30 * MIB),
            event("segment_free", freed, 50 * MIB),
            event("alloc", allocated, 20 * MIB, "mlp"),
        )
    )
    assert found.ledger is not None
    assert found.ledger.reserved_bytes == 350 * MIB
    assert {one.code.split()[0]: one.bytes for one in found.live} == {"attention": 70 * MIB, "mlp": 60 * MIB}


def test_a_snapshot_of_our_own_prediction_is_read() -> None:
    """`predict --trace FILE.pickle` writes a snapshot of a prediction."""
    from small_models import small_job
    from snugfit.features.diagnosis.snapshot import read_snapshot
    from snugfit.prediction.predict import predict, rehearse_again

    memory_snapshot = pytest.importorskip("snugfit.features.traces.export_trace").memory_snapshot

    predicted = predict(small_job("gpt2", 2), "plain")
    found = read_snapshot(pickle.dumps(memory_snapshot(rehearse_again(predicted))), "own")
    assert found.ledger.reserved_bytes == predicted.footprint.reserved_bytes


def test_names_of_a_hostile_snapshot_are_shown_as_data() -> None:
    """A name that is not text is ignored, and escapes of a terminal stay without effect."""
    from snugfit.features.diagnosis.report import render
    from snugfit.report.text.terminal import as_text

    blocks: Any = segment(0, [("active_allocated", MIB, "a\x1b[2J")] * 2)
    blocks["blocks"][0]["frames"] = [{"name": [[[]]], "filename": {}, "line": "x"}]
    found = read(pickle.dumps({"segments": [blocks]}))
    assert {one.code for one in found.live} == {"(no stack frames)", "a\x1b[2J (modeling_llama.py:7)"}
    assert "\x1b" not in as_text(render(found))


# ---- hostile pickles ---------------------------------------------------------------------------------------


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/snugfit-was-attacked",)


def nested(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


HOSTILE = {
    "a command": pickle.dumps({"segments": [Attack()]}),
    "a command of protocol 2": pickle.dumps(Attack(), protocol=2),
    "a class": pickle.dumps({"segments": [pickle.Pickler]}),
    "a persistent id": b"\x80\x04\x8c\x01aQ.",
    "an extension": b"\x80\x04\x82\x01.",
    "a memo of 32 GiB": b"\x80\x04]r\xff\xff\xff\x7f.",
    "a byte array of 1 TiB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "text of 1 TiB": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc.",
    "bytes of 1 TiB": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a frame of 1 TiB": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"].",
    "text with a wrong length": b"\x80\x04\x8c\xffab.",
    "text that is not UTF-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "an unhashable key": b"\x80\x04}]K\x01s.",
    "a mark without an end": b"\x80\x04((((.",
    "an empty stack": b"\x80\x04a.",
    "nothing but a head": b"\x80\x04",
    "unknown instructions": b"\x80\x04\x00\x01\x02.",
    "a deep list": nested(200_000),
    "another object": pickle.dumps([1, 2, 3]),
    "a number": pickle.dumps(7),
    "segments of text": pickle.dumps({"segments": "abc"}),
    "segments of numbers": pickle.dumps({"segments": [1]}),
    "blocks of text": pickle.dumps({"segments": [{"address": 0, "total_size": 5, "blocks": "ab"}]}),
    "infinite sizes": pickle.dumps({"segments": [{"address": 0, "total_size": float("inf"), "blocks": []}]}),
    "huge sizes": pickle.dumps({"segments": [{"address": 0, "total_size": 1 << 2000, "blocks": []}]}),
    "negative sizes": pickle.dumps({"segments": [{"address": 0, "total_size": -1, "blocks": []}]}),
    "events of text": pickle.dumps({"segments": [], "device_traces": ["oom"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_in_one_line(name: str) -> None:
    start = time.process_time()
    with pytest.raises(UsageError, match=r"^snap\.pickle: ") as refusal:
        read(HOSTILE[name])
    assert "\n" not in str(refusal.value)
    assert time.process_time() - start < 2
    assert not os.path.exists("/tmp/snugfit-was-attacked")


def test_a_truncated_snapshot_is_refused_at_every_length() -> None:
    whole = snapshot(failed_request(160 * MIB))
    for end in range(2, len(whole), 97):
        with pytest.raises(UsageError):
            read(whole[:end])


def test_a_small_file_that_unfolds_is_refused() -> None:
    """One segment of 3,000 blocks is repeated 3,000 times by reference: nine million blocks in 40 kB."""
    shared = segment(0, [("inactive", MIB, "")] * 3000)
    with pytest.raises(UsageError, match="more than 5,000,000 blocks"):
        read(pickle.dumps({"segments": [shared] * 3000}))


def test_code_of_a_pickle_never_runs_in_the_reader() -> None:
    """The reader knows no instruction that names, calls or builds an object."""
    from snugfit.features.diagnosis.snapshot import _PlainReader

    calls = {"REDUCE", "GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "PERSID",
             "BINPERSID", "EXT1", "EXT2", "EXT4"}  # fmt: skip
    assert not {getattr(pickle, name)[0] for name in calls} & set(_PlainReader.dispatch)
    assert _PlainReader(io.BytesIO(pickle.dumps((1, {"a": [None, 2.5, b"x"]})))).load() == (
        1,
        {"a": [None, 2.5, b"x"]},
    )
