"""The result that a measured child writes for its parent: one typed document, checked field by field.

The parent believes nothing that has the wrong type: a number that is no number makes the whole result a
`bad-result`. Only a loss may be missing (null): a loss can be NaN, and JSON has no NaN.
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
"""The outcomes that a child can report itself; see causes.py."""


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """What one run measured of itself; None is what it could not measure."""

    outcome: str
    """`ok`, or the cause of death, as far as the child knows it."""

    message: str = ""
    """For a cause other than `ok`: the exception in one line."""

    seconds: tuple[float, ...] = ()
    """Of each steady step."""

    startup: Startup | None = None
    """Seconds from the process's beginning to the steady steps."""

    losses: tuple[float, ...] = ()
    """Each step's loss, warm-up included."""

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    """Peaks of the CUDA allocator: `requested_bytes.all.peak`, and so on."""

    retries: int | None = None
    """The allocator's counter `num_alloc_retries`."""

    host_bytes: int | None = None
    """Largest resident memory of the process."""

    first_context_bytes: int | None = None
    """Growth of the device's used bytes by the first tiny tensor."""

    communication_bytes: int | None = None
    """Growth of the device's used bytes by the process group and its first exchange."""

    paged_bytes: int | None = None
    """Managed memory of its optimizer, on the GPU or not."""

    smi_bytes: int | None = None
    """nvidia-smi's used memory at one quiet moment."""

    smi_nvml_bytes: int | None = None
    """NVML's used memory at that moment."""

    device_name: str | None = None
    """The device as torch names it."""

    total_bytes: int | None = None
    """The GPU's memory as torch sees it."""

    crowded: str | None = None
    """What other processes took of the host's cores while steps were timed."""

    quiet: tuple[bool, ...] = ()
    """Of each of `seconds`, whether the core that launches kernels was quiet."""

    disturbed: float | None = None
    """`QuietCore.disturbed_share` of that core."""

    host_loop_seconds: float | None = None
    """How long a short loop takes that core (`QuietCore.loop_seconds`)."""

    timed_from: float | None = None
    """When the first steady step began on the host, by the monotonic clock."""

    timed_until: float | None = None
    """When the last of them had ended on the device."""

    peaks_at: float | None = None
    """When the peaks were read, by the monotonic clock; None at the end of all."""

    failed_at: float | None = None
    """When an exception ended it, by the same clock."""

    fabric_seconds: float | None = None
    """Seconds a step of NCCL's kernels, in steps after the timed ones."""

    exposed_fabric_seconds: float | None = None
    """Of these, while no other kernel ran."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages and the CUDA libraries."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object without NaN; `ChildResult.from_json` reads it back."""
        return asdict(self) | {"losses": finite_or_null(self.losses)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The result that `to_json` wrote; raises `BadDocument` for anything else."""
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
    "quiet": lambda value: _is_list_of(value, bool),
    "losses": lambda value: _is_list_of(value, int, float, type(None)),
    "versions": lambda value: isinstance(value, dict) and _is_list_of(list(value.values()), str),
    "startup": _is_startup_or_none,
}
"""Whether each field's value is one that a child can have written."""
