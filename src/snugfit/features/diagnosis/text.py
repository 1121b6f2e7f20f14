"""Reading of a log: the out-of-memory error that ended the run, and the sizes in its message."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from snugfit.errors import UsageError
from snugfit.features.diagnosis.result import FailureKind, Ledger
from snugfit.features.diagnosis.signs import (
    CPU_REQUEST,
    FIRST_WORDS,
    FOREIGN,
    KERNEL_LIMIT,
    KILLED_BYTES,
    REQUEST,
    SIGNS,
    Sign,
)
from snugfit.units import KIB, show_bytes

MESSAGE = 1600
"""Largest number of characters of an allocator's error message, including its advice."""

TRACEBACK_LINES = 400
"""Number of lines before an error that are read as its traceback."""

AMOUNT = r"([\d.]{1,20} ?(?:bytes|[KMGT]?i?B))"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"^(?:\[?(?:rank|default|worker)[ =_]?(\d+)\]?[:\s]|\[1,(\d+)\]<std\w+>:| {0,3}(\d{1,4}): "
    r"|\([^()\n]{0,60}\brank[ =](\d+)[^()\n]{0,60}\))[ ]?",
    re.IGNORECASE,
)
_LATER_PREFIX = re.compile(r"^.{1,120}?\[rank(\d+)\]:[ ]?")
"""Pattern of a rank in a log line after the launcher's own prefix, such as a host name or a date."""

_QUOTES = re.compile(r"^(?:> ?)+")
_RAISED = re.compile(r"^\s*[\w.]{0,200}(?:Error|Exception)\b")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)\s*$')
_NOTEBOOK_FRAME = re.compile(
    r"^(?:(Cell In ?\[\d+\]), line \d+(?:, in ([\w.]+))?|File (\S{1,4000}?):\d+, in ([\w.]+)"
    r"|((?:/|<ipython-input)\S{1,4000}) in ([\w.]+|<[^>\n]{1,60}>))"
)
_NOTEBOOK_LINE = re.compile(r"^-{1,8}> *(\d+) (.*)$")
_HEADS = ("MPS backend out of memory", "Allocation on device")
_FIELDS = {
    "total_bytes": rf"{AMOUNT} total capacity|total capac\w+ of {AMOUNT}|max allowed: {AMOUNT}"
    rf"|Device limit : {AMOUNT}",
    "free_bytes": rf"{AMOUNT} free[;,)]|of which {AMOUNT} is free|Free \(according to CUDA\): {AMOUNT}",
    "allocated_bytes": rf"{AMOUNT} already allocated|memory {AMOUNT} is allocated by PyTorch"
    rf"|MPS allocated: {AMOUNT}|Currently allocated : {AMOUNT}",
    "unallocated_bytes": rf"{AMOUNT} is reserved by PyTorch but unallocated",
    "graphs_bytes": rf"with {AMOUNT} allocated in private pools",
    "process_bytes": rf"this process has {AMOUNT} memory in use",
    "allowed_bytes": rf"{AMOUNT} allowed;",
    "others_bytes": rf"other allocations: {AMOUNT}",
}
_RESERVED = re.compile(rf"{AMOUNT} (?:reserved in total|cached\))")
_PROCESS = re.compile(rf"Process \d+ has {AMOUNT} memory in use")
_DEVICE = re.compile(r"(?:GPU|on device) (\d+)[; ]")

RENAMED_PROCESS = (
    "The log names no process as this one, as in containers. "
    "The process with at least PyTorch's reserved memory was taken."
)


@dataclass(frozen=True, kw_only=True)
class LoggedError:
    """An out-of-memory error of a log, with the sizes in its message."""

    sign: Sign
    wording: str
    """The part of the line that the pattern of the error matches."""
    line: int
    rank: int | None
    requested: tuple[int, int] | None = None
    """The smallest and largest size in bytes of the failed request that its rounded figure allows."""
    ledger: Ledger | None = None
    device: int | None = None
    traceback: str = ""
    phase: str = ""
    further: int = 0
    notes: tuple[str, ...] = ()


def read_log(text: str) -> LoggedError:
    """Return the first out-of-memory error of the lowest rank. Raises `UsageError` for a log without one."""
    # Progress bars return to the begin of their line with `\r`; each of their states becomes a line.
    lines = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    ranks, plain = _without_prefixes(lines)
    joined = "\n".join(plain)
    if not joined.strip():
        raise UsageError("The log is empty. Give the text of the error, with the lines before it.")
    matches = _errors(joined, certain=True) or _errors(joined, certain=False)
    if not matches:
        _refuse(joined)
    starts = _line_starts(plain)
    numbered = [(sign, match, _line_of(match.start(), starts)) for sign, match in matches]
    lowest = min((rank for *_, line in numbered if (rank := ranks[line]) is not None), default=None)
    of_rank = [entry for entry in numbered if lowest is None or ranks[entry[2]] == lowest]
    sign, match, line = _ending(of_rank, plain)
    error = LoggedError(
        sign=sign,
        wording=" ".join(match[0].split()),
        line=line + 1,
        rank=ranks[line],
        further=len({entry for *_, entry in numbered}) - 1,
    )
    error = _with_figures(error, joined, match)
    if line > of_rank[0][2]:
        caught = f"Line {of_rank[0][2] + 1:,} has an earlier error, and the run continued after it."
        error = replace(error, notes=(caught, *error.notes))
    # Other ranks' lines may be mixed with the traceback of this one, so more lines are searched.
    before = range(max(0, line - 16 * TRACEBACK_LINES), line)
    own = [plain[entry] for entry in before if error.rank is None or ranks[entry] == error.rank]
    return _with_traceback(error, own)


def _ending(
    errors: Sequence[tuple[Sign, re.Match[str], int]], lines: Sequence[str]
) -> tuple[Sign, re.Match[str], int]:
    """Return the first out-of-memory error, which ended the run. A raised error takes precedence over one
    that the program only printed.
    """
    first = errors[0]
    if first[1].re is not REQUEST or _RAISED.match(lines[first[2]]):
        return first
    raised = (error for error in errors if error[1].re is REQUEST and _RAISED.match(lines[error[2]]))
    return next(raised, first)


def _without_prefixes(lines: Sequence[str]) -> tuple[list[int | None], list[str]]:
    """Return the rank of each line, and the lines without the launcher's prefixes."""
    ranks: list[int | None] = []
    plain: list[str] = []
    for text in lines:
        line = _QUOTES.sub("", text) if text.startswith(">") else text
        prefix = _PREFIX.match(line) or ("[rank" in line and _LATER_PREFIX.match(line)) or None
        # A log has millions of lines, so one pattern with several groups is used. At most one group matches.
        ranks.append(int(prefix[prefix.lastindex]) if prefix and prefix.lastindex else None)
        plain.append(line[prefix.end() :] if prefix else line)
    return ranks, plain


def _line_starts(lines: Sequence[str]) -> list[int]:
    starts, position = [], 0
    for line in lines:
        starts.append(position)
        position += len(line) + 1
    return starts


def _line_of(position: int, starts: Sequence[int]) -> int:
    return bisect_right(starts, position) - 1


def _errors(text: str, *, certain: bool) -> list[tuple[Sign, re.Match[str]]]:
    """Return the out-of-memory errors in a log, in order: the certain ones, or else the possible ones. A
    message with sizes counts once, where the memory was requested.
    """
    starts = [at for word in FIRST_WORDS for at in _places(text, word)] if certain else []
    # The wording `you tried to allocate` is that of the CPU's allocator, which has its own sign.
    possible = (REQUEST.match(text, at) for at in starts if not text.endswith("you ", 0, at))
    matches = [(SIGNS[0], match) for match in possible if match]
    for sign in [candidate for candidate in SIGNS if candidate.certain is certain]:
        for match in _matches(sign, text):
            if sign is not SIGNS[0] or not REQUEST.search(text, match.start(), match.end() + 200):
                matches.append((sign, match))
    return sorted(matches, key=lambda candidate: candidate[1].start())


def _places(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


def _matches(sign: Sign, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a sign's regular expression, searched only in lines that contain one of its
    words.
    """
    lines: set[tuple[int, int]] = set()
    for word in sign.words:
        at = text.find(word)
        while at >= 0:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            lines.add((text.rfind("\n", 0, at) + 1, end))
            at = text.find(word, end)
    for start, end in sorted(lines):
        yield from sign.pattern.finditer(text, start, end)


def _refuse(text: str) -> None:
    """Raise `UsageError` for a log without an out-of-memory error of PyTorch or the host."""
    if FOREIGN.search(text):
        raise UsageError(
            "This is an error of JAX or TensorFlow. snugfit reads errors of PyTorch and of the host only. "
            "Give such a log."
        )
    if KERNEL_LIMIT.search(text):
        raise UsageError(
            "A Triton kernel needs more shared memory or registers of one multiprocessor than this GPU has. "
            "The GPU's memory is not short. Try smaller blocks, or another kernel."
        )
    raise UsageError(
        "No out-of-memory error in this text: no 'out of memory', 'Killed', 'oom-kill' or similar. Give "
        "the whole log, or a snapshot of torch.cuda.memory._dump_snapshot."
    )


# ---- the figures of a message ------------------------------------------------------------------------------


def _with_figures(error: LoggedError, text: str, match: re.Match[str]) -> LoggedError:
    """Return a logged out-of-memory error with the sizes in its message parsed to bytes."""
    if match.re is not REQUEST:
        return _with_host_figures(error, text, match)
    message = _message(text, match)
    device = _DEVICE.search(message)
    ledger, notes = read_ledger(message)
    return replace(
        error,
        requested=span_of(" ".join(match["size"].split())),
        device=int(device[1]) if device else None,
        ledger=ledger,
        notes=notes,
    )


def _message(text: str, match: re.Match[str]) -> str:
    """Return the text of an out-of-memory message as one line, up to the next message.

    Messages of MPS and of `cudaMallocAsync` begin before the match.
    """
    before = max(0, match.start() - 200)
    start = max(text.rfind(head, before, match.start()) for head in _HEADS)
    start = match.start() if start < 0 else start
    rest = text[start : match.end() + MESSAGE]
    following = REQUEST.search(rest, match.end() - start)
    return " ".join(rest[: following.start() if following else None].split())


def _with_host_figures(error: LoggedError, text: str, match: re.Match[str]) -> LoggedError:
    """Return the error with the bytes of host memory, where the message has them."""
    message = text[match.start() : match.end() + 400]
    if request := CPU_REQUEST.search(message):
        return replace(error, requested=(int(request[1]),) * 2)
    if error.sign.kind is FailureKind.HOST and (resident := KILLED_BYTES.search(message.split("\n")[0])):
        nbytes = int(resident[1]) * KIB
        return replace(error, notes=(f"The killed process had {show_bytes(nbytes)} of its own memory.",))
    return error


def read_ledger(message: str) -> tuple[Ledger | None, tuple[str, ...]]:
    """Return the GPU memory by owner from an error message on one line, and notes on the values."""
    figures = {name: _amount(pattern, message) for name, pattern in _FIELDS.items()}
    if all(figure is None for figure in figures.values()):
        return None, ()
    ledger = Ledger(**figures)
    reserved = _RESERVED.search(message)
    if ledger.allocated_bytes is not None and reserved:
        rest = max(0, parse_amount(reserved[1]) - ledger.allocated_bytes)
        # Until torch 1.3, the figure `cached` excludes allocated memory.
        rest = parse_amount(reserved[1]) if "cached" in reserved[0] else rest
        ledger = replace(ledger, unallocated_bytes=rest)
    return _with_processes(ledger, [parse_amount(figure) for figure in _PROCESS.findall(message)])


def _with_processes(ledger: Ledger, processes: list[int]) -> tuple[Ledger, tuple[str, ...]]:
    """Return the memory ledger with the bytes of this process and of other processes.

    If the message does not mark this process, it is the smallest one that has at least the reserved memory.
    """
    notes: tuple[str, ...] = ()
    if ledger.process_bytes is None and processes and ledger.reserved_bytes is not None:
        # The figures in a message are rounded, so a process may seem to use less than it reserved.
        own = min(
            (nbytes for nbytes in processes if nbytes >= 0.98 * (ledger.reserved_bytes or 0)), default=None
        )
        if own is not None:
            processes.remove(own)
            ledger, notes = replace(ledger, process_bytes=own), (RENAMED_PROCESS,)
    if processes or ledger.process_bytes is not None:
        ledger = replace(ledger, others_bytes=sum(processes))
    return ledger, notes


def _amount(pattern: str, message: str) -> int | None:
    match = re.search(pattern, message)
    return parse_amount(next(group for group in match.groups() if group)) if match else None


def parse_amount(text: str) -> int:
    """Return the bytes of an amount such as `20.00 MiB` or `0 bytes`."""
    return span_of(text)[0] if text.endswith("bytes") else round(_number(text)[0] * _number(text)[1])


def span_of(text: str) -> tuple[int, int]:
    """Return the smallest and largest number of bytes that round to an amount such as `20.00 MiB`."""
    number, unit, decimals = _number(text)
    if unit == 1:
        return int(number), int(number)
    half = 0.5 * 10.0**-decimals * unit
    return int(number * unit - half), int(number * unit + half) + 1


def _number(text: str) -> tuple[float, int, int]:
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzKMGTB ").rstrip(".")
    unit = text[len(digits) :].strip(" .")
    power = "KMGT".find(unit[:1]) + 1 if unit != "bytes" else 0
    decimals = len(digits.partition(".")[2])
    try:
        return float(digits), 1024**power, decimals
    except ValueError:
        raise UsageError(
            f"{text[:40]!r} is not a size. Give the error's text as PyTorch printed it."
        ) from None


# ---- the traceback -----------------------------------------------------------------------------------------

_PHASES = (
    ("update", ("torch/optim/", "/optim/", "optimizer.py")),
    ("backward", ("torch/autograd/__init__", "autograd/graph.py")),
    ("build", ("modeling_utils.py", "core_model_loading.py")),
)


def _with_traceback(error: LoggedError, lines: Sequence[str]) -> LoggedError:
    """Return the error with the last line of code in the traceback before it. That line also gives the phase
    of the step (such as backward).
    """
    frames = _frames(lines[-TRACEBACK_LINES:])
    if not frames:
        return error
    files = [file.replace("\\", "/") for file, *_ in frames]
    phase = next((name for name, parts in _PHASES if any(p in file for p in parts for file in files)), "")
    if not phase and any("/torch/nn/modules/" in file or "modeling_" in file for file in files):
        phase = "forward"
    own = [frame for frame, file in zip(frames, files, strict=True) if "/torch/" not in file]
    file, line, function, code = (own or frames)[-1]
    name = file.replace("\\", "/").rpartition("/")[2]
    position = f"{function} ({name}:{line})"
    return replace(error, traceback=f"{position}: {code}" if code else position, phase=phase)


def _frames(lines: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return file, line, function and code of each frame in a log's last traceback, Python's or a notebook's.
    Both lines of a frame may have a prefix of equal length.
    """
    frames: list[tuple[str, str, str, str]] = []
    file, function = "", ""
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if "Traceback (most recent call last)" in line:
            frames, file = [], ""
        elif frame := _FRAME.search(line):
            # If the source line is missing, the next frame follows directly.
            code = "" if _FRAME.search(following) else following[max(0, frame.start() - 2) :].strip()
            frames.append((frame[1], frame[2], frame[3], code))
        elif head := _NOTEBOOK_FRAME.match(line):
            file, function = head[1] or head[3] or head[5], head[2] or head[4] or head[6] or "<module>"
        elif file and (arrow := _NOTEBOOK_LINE.match(line)):
            frames.append((file, arrow[1], function, arrow[2].strip()))
    return frames
