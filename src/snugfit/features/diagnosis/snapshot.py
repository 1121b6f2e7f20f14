"""Reading of a memory snapshot (`torch.cuda.memory._dump_snapshot`): live tensors and the use of segments.

If the history has an out-of-memory event, the live tensors are those at the event. Otherwise they are those
at the end.

**Pickles.** A pickle of plain data, read without running any of its code.

A snapshot has dicts, lists, tuples, text, bytes, numbers, booleans and None. The reader has only the
instructions for these. A pickle that names a class or a function is refused at that name. Instructions with
an index into the memo table are refused too. In the interpreter's C reader, such an instruction of nine bytes
can allocate gigabytes. `pickle.dump` writes none of them since Python 3.8.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from snugfit.errors import UsageError
from snugfit.features.diagnosis.result import Ledger, LiveTensors, SegmentUse

MOST_ENTRIES = 5_000_000
"""Largest number of blocks and events that are read from a snapshot. A malicious small file may refer to one
list many times."""

MOST_FRAMES = 200
"""Largest number of stack frames that are searched for code outside of PyTorch."""

LARGEST = 1 << 60
"""Largest size in bytes that a snapshot may give for a block."""

SHOWN = 8
"""Number of lines of code in the table of the largest live tensors."""

_SEGMENTS = {"segment_alloc": -1, "segment_map": -1, "segment_free": 1, "segment_unmap": 1}
"""Sign of each event for computing earlier reserved bytes: an allocation is subtracted, a free added."""

_OF_TORCH = ("/torch/", "torch/nn/", "<eval_with_key>", "??")


class LiveBlock(NamedTuple):
    """A live block of the allocator: its size, and the code that allocated it."""

    nbytes: int
    code: str


class SnapshotFacts(NamedTuple):
    """The state of one GPU in a snapshot: live tensors, segments and the failed request."""

    device: int
    ledger: Ledger
    segments: SegmentUse
    live: tuple[LiveTensors, ...]
    requested: int | None
    """Bytes of the last failed request; None if none failed."""
    failures: int
    traceback: str
    """The line of code that made the failed request."""
    notes: tuple[str, ...]


def read_snapshot(content: bytes, location: str) -> SnapshotFacts:
    """Read a memory snapshot and return the state of the GPU that ran out of memory, or else of the fullest
    one. Raises `UsageError` for other content.
    """
    document = read_plain_pickle(content, location)
    segments, traces = _parts(document, location)
    try:
        return _facts(segments, traces, document.get("allocator_settings"))
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError):
        raise UsageError(
            f"{location}: this snapshot has another form than torch 2.1 to 2.15 write. Write it with "
            "torch.cuda.memory._dump_snapshot."
        ) from None


def _parts(document: Any, location: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the segments and the event histories of a memory snapshot. Raises `UsageError` for another
    pickle, and for too many entries.
    """
    segments = document if isinstance(document, list) else None
    traces: Any = []
    if isinstance(document, dict):
        segments, traces = document.get("segments"), document.get("device_traces") or []
    if isinstance(document, list) or not isinstance(segments, list) or not isinstance(traces, list):
        raise UsageError(
            f"{location}: this pickle is not a memory snapshot: it has no list of segments. Write one with "
            "torch.cuda.memory._dump_snapshot."
        )
    entries = len(segments)
    for part in segments:
        entries += (
            len(part["blocks"]) if isinstance(part, dict) and isinstance(part.get("blocks"), list) else 0
        )
        _refuse_many(entries, location)
    for trace in traces:
        entries += len(trace) if isinstance(trace, list) else 0
        _refuse_many(entries, location)
    return segments, traces


def _refuse_many(entries: int, location: str) -> None:
    if entries > MOST_ENTRIES:
        raise UsageError(
            f"{location}: this snapshot has more than {MOST_ENTRIES:,} blocks and events. Record fewer: "
            "torch.cuda.memory._record_memory_history(max_entries=100000)."
        )


def _facts(segments: Sequence[Any], traces: Sequence[Any], settings: Any) -> SnapshotFacts:
    failures = [
        (device, index)
        for device, trace in enumerate(traces)
        for index, entry in enumerate(trace)
        if entry["action"] == "oom"
    ]
    places = _CodeLines()
    sizes: Counter[int] = Counter()
    for part in segments:
        sizes[_size(part.get("device", 0))] += _size(part["total_size"])
    fullest = sizes.most_common(1)[0][0] if sizes else 0
    device, index = failures[-1] if failures else (fullest, -1)
    own = [part for part in segments if part.get("device", 0) == device]
    trace = traces[device] if device < len(traces) else []
    alive, reserved, free_bytes = _alive(own, places), sizes[device], None
    failure: Mapping[str, Any] = {}
    notes: list[str] = []
    if failures:
        failure = trace[index]
        # An `oom` event has the free bytes in the field for the address.
        free_bytes = _size(failure.get("device_free", failure.get("addr", 0)))
        alive = _rewind(alive, trace, index, places)
        reserved += sum(_SEGMENTS.get(entry["action"], 0) * _size(entry["size"]) for entry in trace[index:])
        if len(trace) > index + 1:
            notes.append("The snapshot was written after the failure. The segments are those of its end.")
    if alive and all(block.code == UNKNOWN for block in alive.values()):
        notes.append(
            "The snapshot has no stack frames. Record with "
            "torch.cuda.memory._record_memory_history(max_entries=100000) before the run."
        )
    allocated = sum(block.nbytes for block in alive.values())
    use = _segment_use(own, settings)
    return SnapshotFacts(
        device=device,
        ledger=Ledger(
            allocated_bytes=allocated, unallocated_bytes=max(0, reserved - allocated), free_bytes=free_bytes
        ),
        segments=use,
        live=tuple(_by_place(alive.values())),
        requested=_size(failure["size"]) if failures else None,
        failures=len(failures),
        traceback=places.of(failure.get("frames")) if failures else "",
        notes=tuple(notes),
    )


def _alive(segments: Sequence[Any], places: _CodeLines) -> dict[int, LiveBlock]:
    """Return the live blocks at the end of the snapshot, by address. A freed block that waits for another
    stream counts as live.
    """
    return {
        address: LiveBlock(_size(block.get("requested_size") or block["size"]), places.of(_frames_of(block)))
        for part in segments
        for address, block in _blocks(part)
        if block["state"].startswith("active")
    }


def _blocks(segment: Any) -> Iterator[tuple[int, Any]]:
    """Yield the address and the block of each entry in a snapshot's segment. Early versions of PyTorch write
    no addresses of blocks.
    """
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block
        address += _size(block["size"])


def _frames_of(block: Any) -> Any:
    """Return the stack frames that allocated a block; torch 2.0 wrote them in the block's history."""
    history = block.get("history") or ()
    return block.get("frames") or (history[0].get("frames") if history else ())


def _rewind(
    alive: dict[int, LiveBlock], trace: Sequence[Any], index: int, places: _CodeLines
) -> dict[int, LiveBlock]:
    """Return the live memory blocks before event `index` of a snapshot's history, computed back from those at
    its end.
    """
    # A block that was freed after the failure has its stack frames only in its allocation event.
    sources = (
        {entry["addr"]: entry for entry in trace[:index] if entry["action"] == "alloc"}
        if len(trace) > index + 1
        else {}
    )
    alive = dict(alive)
    for entry in reversed(trace[index + 1 :]):
        address = entry.get("addr", 0)
        if entry["action"] == "alloc":
            alive.pop(address, None)
        # A requested free may wait for another stream, and only a completed one frees the block.
        elif entry["action"] == "free_completed":
            frames = sources.get(address, {}).get("frames")
            alive[address] = LiveBlock(_size(entry["size"]), places.of(frames))
    return alive


UNKNOWN = "(no stack frames)"


class _CodeLines(dict[int, str]):
    """Cache of the code line of each stack trace. Blocks and events of a snapshot share traces, so the key is
    the object's identity.
    """

    def of(self, frames: Any) -> str:
        """Return the function, file and line of the innermost stack frame outside of PyTorch."""
        if not isinstance(frames, list | tuple) or not frames:
            return UNKNOWN
        if id(frames) not in self:
            self[id(frames)] = _place(frames[:MOST_FRAMES])
        return self[id(frames)]


def _place(frames: Sequence[Any]) -> str:
    named = [
        (frame["name"], frame["filename"].replace("\\", "/"), frame.get("line"))
        for frame in frames
        if isinstance(frame, dict) and isinstance(frame.get("name"), str) and frame["name"]
        if isinstance(frame.get("filename"), str)
    ]
    if not named:
        return UNKNOWN
    # torch also records C++ frames, unless `stacks="python"` is set.
    python = [frame for frame in named if frame[1].endswith(".py")] or named
    own = [frame for frame in python if not any(part in frame[1] for part in _OF_TORCH)]
    name, file, line = (own or python)[0]
    number = f":{line}" if type(line) is int and 0 < line < LARGEST else ""
    return f"{name[:80]} ({file[-4000:].rpartition('/')[2][:80]}{number})"


def _size(value: Any) -> int:
    """Return the value if it is a number of bytes. Raises `TypeError` for any other value."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise TypeError("not a number of bytes")
    return value


def _by_place(blocks: Any) -> Iterator[LiveTensors]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for block in blocks:
        sizes[block.code] += block.nbytes
        counts[block.code] += 1
    for code, nbytes in sizes.most_common(SHOWN):
        yield LiveTensors(code=code, bytes=nbytes, count=counts[code])


def _segment_use(segments: Sequence[Any], settings: Any) -> SegmentUse:
    free = [
        [_size(block["size"]) for _, block in _blocks(part) if block["state"] == "inactive"]
        for part in segments
    ]
    grows = isinstance(settings, dict) and bool(settings.get("expandable_segments"))
    return SegmentUse(
        segments=len(segments),
        partly_used=sum(bool(sizes) and sum(sizes) < p["total_size"] for sizes, p in zip(free, segments)),
        unallocated_bytes=sum(map(sum, free)),
        largest_free_bytes=max((size for sizes in free for size in sizes), default=0),
        expandable=grows or any(bool(part.get("is_expandable")) for part in segments),
    )


# ---- pickles -----------------------------------------------------------------------------------------------


PLAIN = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
    pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.DICT, pickle.LIST, pickle.TUPLE,
    pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS,
    pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
"""Pickle instructions that the reader executes. It refuses all others, which could run code."""

_PYTHON_READER: Any = vars(pickle)["_Unpickler"]
"""The standard library's unpickler in Python, whose table of instructions can be replaced, unlike in C."""


class _PlainReader(_PYTHON_READER):  # type: ignore[misc]
    """Subclass of the standard library's unpickler that executes only the instructions for plain data."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: _PYTHON_READER.dispatch[code[0]] for code in PLAIN}


def read_plain_pickle(content: bytes, location: str) -> Any:
    """Return the object in a pickle of plain data. Raises `UsageError`, with `location` as the file's name,
    for any other pickle.
    """
    try:
        return _PlainReader(io.BytesIO(content)).load()
    # The unpickler looks up each instruction in `dispatch`, which has only the allowed ones.
    except KeyError as unknown:
        code = unknown.args[0] if unknown.args else None
        if type(code) is int and code in _PYTHON_READER.dispatch and code not in _PlainReader.dispatch:
            raise UsageError(
                f"{location}: this pickle has the instruction {chr(code)!r}, which no snapshot has, so it "
                "was not read. Write a snapshot with torch.cuda.memory._dump_snapshot."
            ) from None
        raise _damage(location) from None
    except (EOFError, MemoryError, RecursionError, OverflowError):
        raise _damage(location) from None
    except (pickle.UnpicklingError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
        raise _damage(location) from None


def _damage(location: str) -> UsageError:
    return UsageError(f"{location}: this pickle is damaged or cut off. Copy the whole snapshot again.")
