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
    """Predicted GPU memory in bytes, as NVML shows it; None if the machine's GPU is unknown."""
    predicted_speed: StepSpeed | None = None
    """Predicted speed on the machine; None if its GPU or the GPU's rates are unknown."""

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
    """Predicted memory on the given GPU; None without a prediction."""
    fits: bool | None = None
    """True if the step should fit on the given GPU; None without a prediction."""
    predicted_speed: StepSpeed | None = None
    """Predicted speed on the given GPU; None if the GPU's rates are unknown."""
    measured: Footprint | None = None
    timing: Timing | None = None
    """Seconds measured on this machine; None without a measurement."""
    outcome: str | None = None
    """Outcome of the measured run; None without a measurement."""
    then: tuple[PublishedPrediction, ...] = ()
    """Published figures of the experiment, each with its prediction for the same machine."""
    refused: str = ""
    """Reason for a missing prediction; empty for none."""

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
        """Return the published result of this machine together with its prediction; None without a published
        result.
        """
        return next((result for result in self.then if result.published.machine == machine), None)


@dataclass(frozen=True, kw_only=True)
class TakenInstead:
    """A slot (a choice of the recipe, such as the optimizer) in which today's best recipe differs from the
    guide's experiment.
    """

    slot: str
    """Name of the slot (choice of a recipe, such as the optimizer)."""
    then: str
    """Techniques of the experiment in this slot."""
    now: str
    """Techniques of today's recipe in this slot."""


@dataclass(frozen=True, kw_only=True)
class ModernRow:
    """The fastest recipe of today for an experiment's job, with at most the experiment's memory."""

    name: str
    """The guide's name of the experiment."""
    memory_bytes: int | None
    """Bytes allowed for the recipe: those of the experiment, or the whole GPU if the experiment does not fit.
    """
    recipe: str = ""
    """Fastest recipe in the notation of recipes; empty if none is faster than the experiment."""
    needed_bytes: int | None = None
    """Bytes that the recipe needs on the GPU; None without a recipe."""
    speed: StepSpeed | None = None
    """Predicted speed of the recipe's step; None without a recipe."""
    instead: tuple[TakenInstead, ...] = ()
    """Differences to the experiment's recipe, slot by slot, if the experiment can run."""
    why_none: str = ""
    """Reason for a missing recipe; empty for none."""


@dataclass(frozen=True, kw_only=True)
class LargeModelRow:
    """The predicted memory and speed for a large model, with DeepSpeed or without."""

    name: str
    """The model, and the method of training it."""
    gpu: str
    """Name of the GPU that the prediction is for."""
    recipe: str
    why: str
    """Reason why offloading is unnecessary."""
    needed_bytes: int | None = None
    """Bytes that training needs on that GPU; None without a prediction."""
    fits: bool | None = None
    """True if training should fit on that GPU; None without a prediction."""
    speed: StepSpeed | None = None
    """Predicted speed of the step; None without a prediction."""
    refused: str = ""
    """Reason for a missing prediction; empty for none."""


@dataclass(frozen=True, kw_only=True)
class GuideResult(JsonDocument):
    """The results of all experiments of the guide, for one GPU."""

    what: ClassVar = "guide"

    source: str = field(default_factory=source)
    """Web address of the guide with the published figures."""
    gpu: str
    """Name of the GPU that the predictions are for."""
    memory_bytes: int | None
    """Usable bytes of that GPU; None if unknown."""
    rows: tuple[GuideRow, ...]
    """Results of the guide's experiments; vanilla, the baseline without methods, comes first."""
    per_parameter: tuple[PerParameter, ...] = ()
    """With `--optimizers`: predicted bytes per parameter, for each model and optimizer."""
    without_figures: tuple[WithoutFigure, ...] = ()
    """Methods that the guide names without figures, by chapter."""
    modern: tuple[ModernRow, ...] = ()
    """With `--modern`: the fastest present recipe for each experiment."""
    large_models: tuple[LargeModelRow, ...] = ()
    """With `--modern`: predictions for models for which the guide recommends DeepSpeed."""
    device: str | None = None
    """Name of the measured device; None without a measurement."""
    versions: Mapping[str, str]
    """Versions of the packages that predicted, by package name."""
    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of the predictions."""

    @property
    def vanilla(self) -> GuideRow:
        """The row of the baseline experiment."""
        return next(row for row in self.rows if row.name == VANILLA)
