"""The result that a measured process writes for its parent process: one JSON document, whose fields are
checked one by one.

A single field of a wrong type makes the outcome `bad-result`. Only losses may be null, because a loss can be
NaN and JSON has no NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from snugfit.documents import BadDocument, decode_fields, finite_or_null, null_to_nan
from snugfit.results.footprint import Startup

_COUNTS = (
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "host_bytes",
    "retries",
    "first_context_bytes",
    "communication_bytes",
    "paged_bytes",
    "smi_bytes",
    "smi_nvml_bytes",
    "total_bytes",
)

_SECONDS = (
    "disturbed",
    "host_loop_seconds",
    "timed_from",
    "timed_until",
    "peaks_at",
    "failed_at",
    "fabric_seconds",
    "exposed_fabric_seconds",
)

_OUTCOME = re.compile(r"ok|refused|host-oom|oom:[a-z]+|exit:1")
"""Pattern of the outcomes that a child process can report itself (`causes.py`)."""


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """The values that a measured run returns from its process; None for a value without a measurement."""

    outcome: str
    """`ok`, or the cause of the failure as the process detected it."""

    message: str = ""
    """The exception in one line; empty for the outcome `ok`."""

    seconds: tuple[float, ...] = ()
    """Wall-clock seconds of each steady step (a step like all later ones)."""

    cpu_seconds: tuple[float, ...] = ()
    """CPU seconds of each steady step (a step like all later ones)."""

    results: Mapping[str, Any] = field(default_factory=dict)
    """Results of an evaluation besides its bytes and seconds (`Measurement.results`)."""

    startup: Startup | None = None
    """Seconds of each part of the start-up, from the start of the process to the steady steps."""

    losses: tuple[float, ...] = ()
    """Loss of each step, including warm-up steps."""

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    """Peak bytes that the CUDA allocator reserved (`reserved_bytes.all.peak`). The two fields above are its
    peaks of requested and allocated bytes."""

    retries: int | None = None
    """Number of times that the CUDA allocator freed its cache and retried (`num_alloc_retries`)."""

    host_bytes: int | None = None
    """Peak resident memory of the process on the host, in bytes."""

    first_context_bytes: int | None = None
    """Bytes by which the first tiny tensor (and so the CUDA context) increased the device's used memory."""

    communication_bytes: int | None = None
    """Bytes by which the process group and its first exchange increased the device's used memory."""

    paged_bytes: int | None = None
    """Bytes of the optimizer's CUDA managed memory, on the GPU or the host."""

    smi_bytes: int | None = None
    """Used bytes of the idle device from nvidia-smi, read once."""

    smi_nvml_bytes: int | None = None
    """Used bytes of the device from NVML, read just before `smi_bytes`."""

    device_name: str | None = None
    """Name of the device, as torch reports it."""

    total_bytes: int | None = None
    """Total memory of the GPU in bytes, as torch reports it."""

    crowded: str | None = None
    """Description of other processes that used the host's cores while steps were timed; None without any."""

    quiet: tuple[bool, ...] = ()
    """One flag per entry of `seconds`: True if no other process slowed down the core that launches kernels.
    """

    disturbed: float | None = None
    """Share of the checks in which other processes slowed down that core (`QuietCore.disturbed_share`)."""

    host_loop_seconds: float | None = None
    """Seconds of a short Python loop on that core (`QuietCore.loop_seconds`)."""

    timed_from: float | None = None
    """Time at which the host started the first steady step, in seconds of the monotonic clock."""

    timed_until: float | None = None
    """A time after the last timed step had ended on the device, in seconds of the monotonic clock."""

    peaks_at: float | None = None
    """Time at which the memory peaks were read, in seconds of the monotonic clock. None for a failed run."""

    failed_at: float | None = None
    """Time of the exception that ended the run, in seconds of the monotonic clock; None without one."""

    fabric_seconds: float | None = None
    """Seconds of NCCL's kernels in one step, measured in further steps after the timed ones."""

    exposed_fabric_seconds: float | None = None
    """Part of `fabric_seconds` in which no other kernel ran."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python packages and CUDA libraries, by name."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without NaN for `ChildResult.from_json`."""
        return asdict(self) | {"losses": finite_or_null(self.losses)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the result of a measured run from the JSON object of `to_json`. Raises `BadDocument` for
        another document.
        """
        names = {field.name for field in fields(cls)}
        if set(document) != names:
            odd = ", ".join(sorted(set(document) ^ names))
            raise BadDocument(f"a result with unknown or missing fields: {odd[:200]}")
        for name, is_valid in _CHECKS.items():
            if not is_valid(document[name]):
                raise BadDocument(f"a result with {name} = {str(document[name])[:80]}")
        return decode_fields(cls, {**document, "losses": null_to_nan(document["losses"])})


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count_or_none(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _is_list_of(value: Any, *types: type) -> bool:
    # Compares exact types, because a bool is also an int in Python.
    return isinstance(value, list) and all(type(entry) in types for entry in value)


def _are_durations(value: Any) -> bool:
    return _is_list_of(value, int, float) and all(entry >= 0 for entry in value)


def _is_startup_or_none(value: Any) -> bool:
    if value is None:
        return True
    names = {field.name for field in fields(Startup)}
    return isinstance(value, dict) and set(value) == names and _are_durations(list(value.values()))


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "message": lambda value: isinstance(value, str),
    "outcome": lambda value: isinstance(value, str) and _OUTCOME.fullmatch(value) is not None,
    "device_name": _is_text_or_none,
    "crowded": _is_text_or_none,
    **dict.fromkeys(_COUNTS, _is_count_or_none),
    **dict.fromkeys(_SECONDS, lambda value: value is None or _are_durations([value])),
    "seconds": _are_durations,
    "cpu_seconds": _are_durations,
    "results": lambda value: isinstance(value, dict),
    "quiet": lambda value: _is_list_of(value, bool),
    "losses": lambda value: _is_list_of(value, int, float, type(None)),
    "versions": lambda value: isinstance(value, dict) and _is_list_of(list(value.values()), str),
    "startup": _is_startup_or_none,
}
"""Function for each field that returns True if its value is valid, for results read from a child process's
file."""
