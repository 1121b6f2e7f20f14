"""What a measured child tells its parent: one typed document, checked field by field.

The child writes it, the parent believes nothing that has the wrong type: a number that is no number makes the
whole result a `bad-result`. Only a loss may be missing (null): a loss can be NaN, and JSON has no NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from snugfit.documents import BadDocument, finite_or_null, null_to_nan
from snugfit.results.footprint import Startup

_COUNTS = (
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "host_bytes",
    "retries",
    "first_context_bytes",
    "smi_bytes",
    "smi_nvml_bytes",
    "total_bytes",
)

_OUTCOME = re.compile(r"ok|refused|host-oom|oom:[a-z]+|exit:1")
"""What a child can tell of its own end; see causes.py."""


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """What one run found out about itself; what it could not find is None."""

    outcome: str
    """`ok`, or the cause of its end, as far as the child could tell."""

    message: str = ""
    """For a cause other than `ok`: the exception in one line."""

    seconds: tuple[float, ...] = ()
    """Each steady step."""

    startup: Startup | None = None
    """From the process's beginning to the steady steps."""

    losses: tuple[float, ...] = ()
    """Each step's loss, warm-up included."""

    requested_bytes: int | None = None
    """`requested_bytes.all.peak` of the CUDA allocator."""

    allocated_bytes: int | None = None
    """`allocated_bytes.all.peak`."""

    reserved_bytes: int | None = None
    """`reserved_bytes.all.peak`."""

    retries: int | None = None
    """`num_alloc_retries`."""

    host_bytes: int | None = None
    """Largest resident memory."""

    first_context_bytes: int | None = None
    """Growth of the device's used bytes by the first tiny tensor."""

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
    """Of each of `seconds`, whether the core that asks for kernels was quiet."""

    disturbed: float | None = None
    """Share of looks at the loop's core that found it disturbed, as `QuietCore.disturbed` tells it."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what took part."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object without NaN; `ChildResult.from_json` reads it back."""
        return asdict(self) | {"losses": finite_or_null(self.losses)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The findings that `to_json` wrote; raises `BadDocument` for anything else."""
        names = {each.name for each in fields(cls)}
        if set(document) != names:
            odd = ", ".join(sorted(set(document) ^ names))
            raise BadDocument(f"a result with unknown or missing fields: {odd[:200]}")
        _all_of(document, ("message",), lambda value: isinstance(value, str))
        _all_of(document, ("outcome",), lambda value: isinstance(value, str) and _OUTCOME.fullmatch(value))
        _all_of(document, ("device_name", "crowded"), lambda value: value is None or isinstance(value, str))
        _all_of(document, _COUNTS, lambda value: value is None or (type(value) is int and value >= 0))
        _all_of(document, ("disturbed",), lambda value: value is None or _lengths([value]))
        _all_of(document, ("seconds",), _lengths)
        _all_of(document, ("quiet",), _truths)
        _all_of(document, ("losses",), lambda value: _numbers(value, null=True))
        _all_of(document, ("versions",), _texts)
        _all_of(document, ("startup",), lambda value: value is None or _startup(value))
        startup = Startup.from_json(document["startup"]) if document["startup"] else None
        lists = {
            "seconds": tuple(document["seconds"]),
            "quiet": tuple(document["quiet"]),
            "losses": null_to_nan(document["losses"]),
        }
        return cls(**dict(document) | lists | {"startup": startup})


def _all_of(document: Mapping[str, Any], names: Sequence[str], lawful: Any) -> None:
    for name in names:
        if not lawful(document[name]):
            raise BadDocument(f"a result with {name} = {str(document[name])[:80]}")


def _numbers(value: Any, *, null: bool = False) -> bool:
    kinds = (int, float, type(None)) if null else (int, float)
    return isinstance(value, list) and all(type(each) in kinds for each in value)


def _truths(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is bool for each in value)


def _startup(value: Any) -> bool:
    names = {each.name for each in fields(Startup)}
    return isinstance(value, dict) and set(value) == names and _lengths(list(value.values()))


def _lengths(value: Any) -> bool:
    return _numbers(value) and all(each >= 0 for each in value)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
