"""Synthetic batches of time series. All lengths are those of the model's config.

Shapes: B samples, L past steps, P steps to predict, C channels, F features of a point in time.

| tensor                      | shape     | models                                        |
|-----------------------------|-----------|-----------------------------------------------|
| past_values                 | (B, L, C) | all; (B, L) for one channel of a transformer  |
| future_values               | (B, P, C) | all; (B, P) for one channel of a transformer  |
| past_observed_mask          | as values | all but PatchTSMixer                          |
| future_observed_mask        | as values | transformers                                  |
| past_, future_time_features | (B, ., F) | transformers                                  |
| static_categorical_features | (B, .)    | transformers with such features               |
| static_real_features        | (B, .)    | transformers with such features               |

Transformers are TimeSeriesTransformer, Informer and Autoformer. They read L = context + largest lag steps.
PatchTST and PatchTSMixer cut the context into patches. The tensors are those of the batches in transformers'
examples: of GluonTS for transformers, and of granite-tsfm's `ForecastDFDataset` for patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError
from snugfit.features.series.tasks import SERIES
from snugfit.job.batch import Batch, BatchShapes, SampleInputs
from snugfit.job.inputs import ModelInputs

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class SeriesInput(SampleInputs):
    """The lengths of a model's time series, which create synthetic batches."""

    past: int
    """Number of past steps."""

    future: int
    """Number of steps to predict."""

    channels: tuple[int, ...]
    """Number of channels as a shape; empty for one channel without a dimension."""

    masked: bool = True
    """True if the model takes a mask of observed values."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return past values with their mask, on the CPU."""
        import torch

        size = (samples, self.past, *self.channels)
        batch = {"past_values": torch.rand(size, generator=generator, device="cpu")}
        return batch | ({"past_observed_mask": torch.ones(size, dtype=torch.bool)} if self.masked else {})

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return the values to predict, on the CPU."""
        import torch

        size = (samples, self.future, *self.channels)
        return {"future_values": torch.rand(size, generator=generator, device="cpu")}


@dataclass(frozen=True, kw_only=True)
class DatedSeriesInput(SeriesInput):
    """The lengths of time series whose points have features, such as their month."""

    features: int
    """Number of features of a point in time."""

    categories: tuple[int, ...]
    """Number of categories of each static feature."""

    numbers: int
    """Number of static features that are numbers."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return past values, their mask, and the features of points and of whole series, on the CPU."""
        import torch

        batch = super().inputs(shapes, samples, generator)
        batch["past_observed_mask"] = batch["past_observed_mask"].float()
        for name, length in (("past", self.past), ("future", self.future)):
            size = (samples, length, self.features)
            batch[f"{name}_time_features"] = torch.rand(size, generator=generator, device="cpu")
        if self.categories:
            chosen = [torch.randint(count, (samples,), generator=generator) for count in self.categories]
            batch["static_categorical_features"] = torch.stack(chosen, dim=1)
        if self.numbers:
            batch["static_real_features"] = torch.rand(samples, self.numbers, generator=generator)
        return batch

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return the values to predict and their mask, on the CPU."""
        import torch

        targets = super().targets(shapes, samples, inputs, generator)
        return {**targets, "future_observed_mask": torch.ones_like(targets["future_values"])}


class SeriesInputs(ModelInputs):
    """Input type of models that predict time series."""

    task = SERIES.name
    takes_tokens = False

    def of_job(self, job: Job, config: Any) -> SeriesInput:
        """Return the lengths of a job's series. Raises `JobError` for a model of unknown shapes, and for a
        config without a length.
        """
        kind = job.model.architecture
        if kind not in SERIES.classes:
            raise JobError(
                f"{job.model.name} ({kind}): the batches of this model are unknown in the task {job.task}. "
                f"Models it has: {', '.join(SERIES.classes)}."
            )
        if not config.prediction_length:
            raise JobError(
                f'{job.model.name}: its config has no "prediction_length", the number of steps to predict. '
                "Add it to the config.json."
            )
        if kind.startswith("patch"):
            return SeriesInput(
                past=config.context_length,
                future=config.prediction_length,
                channels=(config.num_input_channels,),
                masked=kind == "patchtst",
            )
        return DatedSeriesInput(
            past=config.context_length + max(config.lags_sequence),
            future=config.prediction_length,
            channels=(config.input_size,) if config.input_size > 1 else (),
            features=config.num_time_features + config.num_dynamic_real_features,
            categories=tuple(config.cardinality) if config.num_static_categorical_features else (),
            numbers=config.num_static_real_features,
        )

    def label_items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of samples, over which the loss is a mean."""
        return len(batch["past_values"])


SERIES_INPUTS = SeriesInputs()
