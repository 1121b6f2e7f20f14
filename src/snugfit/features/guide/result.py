"""The result of the guide's experiments: predicted, measured and published memory and speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from snugfit.documents import JsonDocument
from snugfit.features.guide.per_parameter import PerParameter
from snugfit.features.guide.suite import VANILLA, Published, WithoutFigure, source
from snugfit.results.footprint import Footprint, Timing
from snugfit.results.speed import StepSpeed
from snugfit.units import MIB


@dataclass(frozen=True, kw_only=True)
class PublishedPrediction:
    """A published memory or speed, next to the prediction for its machine with the package versions of its
    time.
    """

    published: Published
    predicted_bytes: int | None = None
    """NVML bytes; None when the machine names no GPU."""
    predicted_speed: StepSpeed | None = None
    """None when the machine names no GPU, or its rates are not known."""

    @property
    def published_bytes(self) -> int:
        """The published memory, given in MiB, in bytes."""
        return self.published.mib * MIB


@dataclass(frozen=True, kw_only=True)
class GuideRow:
    """One experiment of the guide, with predicted, measured and published memory and speed."""

    name: str
    recipe: str
    loop: str
    predicted: Footprint | None = None
    """Predicted bytes on the given GPU."""
    fits: bool | None = None
    """True if the step is predicted to fit the given GPU."""
    predicted_speed: StepSpeed | None = None
    """Predicted speed on the given GPU; None where its rates are unknown."""
    measured: Footprint | None = None
    timing: Timing | None = None
    """Seconds measured on this machine."""
    outcome: str | None = None
    """End of the measured run."""
    then: tuple[PublishedPrediction, ...] = ()
    """One entry for each published figure, with its prediction."""
    refused: str = ""
    """Reason for a missing prediction."""

    @property
    def predicted_bytes(self) -> int | None:
        """Predicted GPU memory as NVML reports it, or without a known CUDA context the allocator's reserved
        bytes.
        """
        return (self.predicted.nvml_bytes or self.predicted.reserved_bytes) if self.predicted else None

    @property
    def measured_bytes(self) -> int | None:
        """Measured GPU memory by NVML, or without an NVML reading the allocator's reserved bytes."""
        return (self.measured.nvml_bytes or self.measured.reserved_bytes) if self.measured else None

    @property
    def why_refused(self) -> str:
        """The reason why there is no prediction, in one line."""
        return self.refused.strip().rpartition("\n")[2]

    def then_on(self, machine: str) -> PublishedPrediction | None:
        """Return the published result of this machine together with the prediction for it; None without
        one.
        """
        return next((one for one in self.then if one.published.machine == machine), None)


@dataclass(frozen=True, kw_only=True)
class TakenInstead:
    """A slot (a choice of the recipe, such as the optimizer) in which today's best recipe differs from the
    guide's experiment.
    """

    slot: str
    """The slot's own name."""
    then: str
    """Techniques of the experiment."""
    now: str
    """Techniques of today's recipe."""


@dataclass(frozen=True, kw_only=True)
class ModernRow:
    """The fastest recipe of today for an experiment's job, with at most the experiment's memory."""

    name: str
    """The guide's name of the experiment."""
    memory_bytes: int | None
    """Bytes allowed for the recipe: as many as the experiment takes, or all of a GPU that cannot run it."""
    recipe: str = ""
    """Recipe in our notation; empty where none is faster."""
    needed_bytes: int | None = None
    """Bytes that the recipe takes of the GPU."""
    speed: StepSpeed | None = None
    """Speed of its step."""
    instead: tuple[TakenInstead, ...] = ()
    """Changes to the experiment's recipe, slot by slot, where that can run."""
    why_none: str = ""
    """Reason for a missing recipe."""


@dataclass(frozen=True, kw_only=True)
class LargeModelRow:
    """The predicted memory and speed for a large model, with DeepSpeed or without."""

    name: str
    """Model and way of training."""
    gpu: str
    """GPU of the prediction."""
    recipe: str
    why: str
    """Reason why offloading is unnecessary."""
    needed_bytes: int | None = None
    """Bytes that it takes of that GPU."""
    fits: bool | None = None
    """True if it is predicted to fit."""
    speed: StepSpeed | None = None
    """Speed of its step; None without a prediction."""
    refused: str = ""
    """Reason for a missing prediction."""


@dataclass(frozen=True, kw_only=True)
class GuideResult(JsonDocument):
    """The results of all experiments of the guide, for one GPU."""

    what: ClassVar = "guide"

    source: str = field(default_factory=source)
    """The address of the page with the published figures."""
    gpu: str
    """GPU of the predictions."""
    memory_bytes: int | None
    """Usable bytes of that GPU."""
    rows: tuple[GuideRow, ...]
    """The experiments, vanilla first."""
    per_parameter: tuple[PerParameter, ...] = ()
    """With `--optimizers`: bytes per parameter, by model and optimizer."""
    without_figures: tuple[WithoutFigure, ...] = ()
    """Methods that the guide names without figures, chapter by chapter."""
    modern: tuple[ModernRow, ...] = ()
    """With `--modern`: the best recipe of today, experiment by experiment."""
    large_models: tuple[LargeModelRow, ...] = ()
    """With `--modern`: models for which the guide recommends DeepSpeed."""
    device: str | None = None
    """The device that was measured; None when nothing was."""
    versions: Mapping[str, str]
    """Versions of the packages that predicted."""
    doubts: tuple[str, ...] = ()
    """Uncertainties of the predictions, as sentences."""

    @property
    def vanilla(self) -> GuideRow:
        """The row of the baseline experiment."""
        return next(row for row in self.rows if row.name == VANILLA)
