"""What the guide's suite gives: rows of what was foreseen, seen and published, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from snugfit.evaluation.guide_suite import VANILLA, Published, source
from snugfit.evaluation.per_parameter import PerParameter
from snugfit.results.footprint import Footprint, Timing
from snugfit.units import MIB

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class PublishedPrediction:
    """A published figure, and the prediction for its machine under the software of its time."""

    published: Published
    """What was printed."""

    predicted_bytes: int | None = None
    """NVML bytes; None when the machine names no GPU."""

    @property
    def published_bytes(self) -> int:
        """The printed MiB in bytes."""
        return self.published.mib * MIB


@dataclass(frozen=True, kw_only=True)
class GuideRow:
    """One experiment: foreseen, seen and published."""

    name: str
    """The experiment."""

    recipe: str
    """Its recipe."""

    loop: str
    """Its training loop."""

    predicted: Footprint | None = None
    """On the GPU that was named."""

    fits: bool | None = None
    """Whether it fits there."""

    measured: Footprint | None = None
    """Seen here."""

    timing: Timing | None = None
    """Seen here."""

    outcome: str | None = None
    """How the measured run ended."""

    then: tuple[PublishedPrediction, ...] = ()
    """What was published."""

    refused: str = ""
    """Why there is no prediction."""

    @property
    def predicted_bytes(self) -> int | None:
        """What it is predicted to hold of the GPU: NVML bytes, or reserved where no context is known."""
        return (self.predicted.nvml_bytes or self.predicted.reserved_bytes) if self.predicted else None

    @property
    def measured_bytes(self) -> int | None:
        """What it was seen to hold of the GPU."""
        return (self.measured.nvml_bytes or self.measured.reserved_bytes) if self.measured else None

    def then_on(self, machine: str) -> PublishedPrediction | None:
        """What was published of it on this machine, with its prediction; None where nothing was."""
        return next((one for one in self.then if one.published.machine == machine), None)


@dataclass(frozen=True, kw_only=True)
class GuideResult:
    """The suite's rows and what follows from them."""

    gpu: str
    """The GPU that the predictions are for."""

    memory_bytes: int | None
    """What may be used of it."""

    rows: tuple[GuideRow, ...]
    """The experiments, vanilla first."""

    per_parameter: tuple[PerParameter, ...] = ()
    """Bytes per parameter, by model and optimizer."""

    device: str | None = None
    """What was measured on; None when nothing was measured."""

    versions: Mapping[str, str]
    """Package versions of the predictions."""

    doubts: tuple[str, ...] = ()
    """What is less certain than the rest."""

    @property
    def vanilla(self) -> GuideRow:
        """The row that the others are compared with."""
        return next(row for row in self.rows if row.name == VANILLA)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `GuideResult.from_json` reads it back."""
        return {"schema": SCHEMA, "what": "guide", "source": source(), **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The result that `to_json` wrote."""
        fields = {name: value for name, value in document.items() if name not in ("schema", "what", "source")}
        fields["rows"] = tuple(_row(row) for row in fields["rows"])
        fields["per_parameter"] = tuple(PerParameter(**line) for line in fields["per_parameter"])
        fields["doubts"] = tuple(fields["doubts"])
        return cls(**fields)


def _row(document: Mapping[str, Any]) -> GuideRow:
    fields = dict(document)
    for name in ("predicted", "measured"):
        fields[name] = Footprint.from_json(fields[name]) if fields[name] else None
    fields["timing"] = Timing.from_json(fields["timing"]) if fields["timing"] else None
    fields["then"] = tuple(
        PublishedPrediction(**{**one, "published": Published(**one["published"])}) for one in fields["then"]
    )
    return GuideRow(**fields)
