"""Synthetic batches, as the Hugging Face guide makes them: random token ids in [100, 30000), random labels.

The task determines the tensors of a batch. The job and the architecture determine their sizes. Memory and
time depend on shapes and dtypes only, so random content is as good as text. All tensors are created on the
CPU, as by a data loader.

Shapes: B samples, S sequence length, T target length.

| task                    | inputs                              | labels                         |
|-------------------------|-------------------------------------|--------------------------------|
| sequence-classification | input_ids (B, S)                    | (B), class; a number for 1 label |
| token-classification    | input_ids (B, S)                    | (B, S), class                  |
| causal-lm               | input_ids (B, S)                    | (B, S), a copy of the input ids |
| masked-lm               | input_ids (B, S)                    | (B, S), random ids everywhere  |
| seq2seq-lm              | input_ids (B, S)                    | (B, T), random ids             |

Other inputs are those of features (`inputs.py`).

With padding, the last part of every sequence is padding. There `attention_mask` is 0 and ids are the pad
token. Labels of these tokens are -100, which losses ignore. The mask is passed only with padding.
Encoder-decoder classifiers (BART, T5) read the hidden state of the end token, so each of their sequences ends
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from snugfit.job.batch_layout import BatchLayout, map_leaves
from snugfit.job.inputs import has_classes, inputs_of
from snugfit.job.job import Job, Task
from snugfit.job.model import first_end_token

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]

LOWEST_ID, HIGHEST_ID = 100, 30_000
"""Range of random token ids, as in Hugging Face's guide. The special tokens of most vocabularies are below
it.
"""

IGNORED = -100
"""Label that torch's cross-entropy ignores."""

FILL = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
"""Values with which a shorter micro-batch is lengthened, by the input's name. Other inputs must have equal
lengths in all micro-batches.
"""

REAL_VALUES = "_snugfit_real_values"
"""Name of an attribute of a simulated batch's tensor. Its value is a function that returns a real tensor's
values.
"""


def synthetic(job: Job, samples: int, *, seed: int = 0) -> Batch:
    """Return a batch of B = `samples` random samples on the CPU; the same seed gives the same batch."""
    return BatchShapes.of(job).batch(samples, seed)


def label_items(job: Job, batch: Mapping[str, Any]) -> int:
    """Return the number of labels or samples over which the model's loss of this CPU batch is averaged.

    Items are samples for classification of sequences and images. For tasks with a label per token they are
    labels other than -100. Decoders count after the shift by one, since the first token is never predicted. A
    module from Python is assumed to average over samples.
    """
    if job.task is Task.CUSTOM:
        return job.model.layout(job.batch_size).count(batch)
    if (own := inputs_of(job.task, job.model.architecture).label_items(batch)) is not None:
        return own
    labels = batch["labels"]
    if labels.dim() == 1:
        return int(labels.shape[0])
    # The first token of a causal model is never predicted, since labels shift by one.
    counted = labels[..., 1:] if job.task is Task.CAUSAL_LM else labels
    return int((counted != IGNORED).sum())


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens in a batch that are not padding; 0 for pictures and sound. It waits for the
    batch's device.
    """
    return int(token_count(batch))


def token_count(batch: Mapping[str, Any]) -> torch.Tensor | int:
    """Return the number of tokens in a batch that are not padding, as a scalar tensor on its device. Only
    reading the tensor's value waits for the device.
    """
    if "attention_mask" in batch:
        counted: torch.Tensor = batch["attention_mask"].sum()
        return counted
    return int(batch["input_ids"].numel()) if "input_ids" in batch else 0


class SyntheticDataset:
    """A map-style dataset of random samples for torch's `DataLoader`, with its default collator.

    For a module from Python, the samples are those of its example in turn, collated by `BatchLayout.join`.
    Each sample is made on access from its own seed. Pictures and sound of a whole dataset therefore never
    occupy memory, and all workers produce the same samples.
    """

    def __init__(self, job: Job, samples: int = 512, *, seed: int = 0) -> None:
        self.job, self.samples, self.seed = job, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        if self._layout is not None:
            # The samples of the example are repeated in turn.
            sample = index % self._layout.samples
            return self._layout.part(self._example, sample, sample + 1)
        # Each sample has its own seed, so that all workers create the same samples and none is stored.
        batch = self._shapes.batch(1, self.seed * self.samples + index)
        joined = inputs_of(self.job.task, self.job.model.architecture).joined
        return {name: value if name in joined else value[0] for name, value in batch.items()}

    @cached_property
    def _shapes(self) -> BatchShapes:
        return BatchShapes.of(self.job)

    @cached_property
    def _example(self) -> Batch:
        """The user's example batch for a model that is a module from Python, on the host."""
        return map_leaves(
            self.job.model.example or {},
            lambda _, value: value.detach().to("cpu") if hasattr(value, "detach") else value,
        )

    @cached_property
    def _layout(self) -> BatchLayout | None:
        """The layout of a user's example batch for `batch_size=1`; None for other jobs."""
        return self.job.model.layout(self.job.batch_size) if self.job.task is Task.CUSTOM else None


class SampleInputs:
    """Inputs and labels of a job's samples. This class has those of the core's tasks on tokens. Features
    define subclasses.
    """

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return random inputs for B = `samples` samples, on the CPU."""
        return shapes.tokens(samples, generator)

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return random labels of these inputs by the names of the model's arguments, on the CPU."""
        return {"labels": shapes.labels(samples, inputs, generator)}


@dataclass(frozen=True, kw_only=True)
class BatchShapes:
    """Sizes of a job's synthetic batches (vocabulary, special tokens, other inputs), from its
    model's config.
    """

    job: Job
    vocabulary: int = 0
    pad_token: int = 0
    end_token: int | None = None
    """Token that ends every sequence, for classifiers that read its hidden state; None for other models."""
    other: SampleInputs = field(default_factory=SampleInputs)
    """Inputs and labels of the task."""

    @classmethod
    def of(cls, job: Job) -> BatchShapes:
        """Return the sizes of this job's batches."""
        if job.task is Task.CUSTOM:
            return cls(job=job)
        config = job.config_to_read()
        text = config.get_text_config()
        vocabulary = getattr(text, "vocab_size", 0) or 0
        pad_token = getattr(text, "pad_token_id", None)
        # Encoder-decoder classifiers (BART, T5) read the state of the end token.
        looks_for_end = config.is_encoder_decoder and job.task is Task.SEQUENCE_CLASSIFICATION
        return cls(
            job=job,
            vocabulary=vocabulary,
            # A pad token outside of the vocabulary would index past the embedding.
            pad_token=pad_token if pad_token is not None and pad_token < vocabulary else 0,
            end_token=first_end_token(config) if looks_for_end else None,
            other=inputs_of(job.task, job.model.architecture).of_job(job, config) or SampleInputs(),
        )

    def batch(self, samples: int, seed: int) -> Batch:
        """Return random inputs and labels of B = `samples` rows, on the CPU."""
        if self.job.task is Task.CUSTOM:
            # A user's batch may have tensors that no random numbers can replace, so it consists of the
            # example's samples.
            dataset = SyntheticDataset(self.job, samples)
            return self.job.model.layout(self.job.batch_size).join([dataset[row] for row in range(samples)])
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        inputs = self.other.inputs(self, samples, generator)
        return {**inputs, **self.other.targets(self, samples, inputs, generator)}

    def tokens(self, samples: int, generator: torch.Generator) -> Batch:
        """Return random token ids (B, S), with their attention mask if there is padding."""
        import torch

        ids = self.ids(samples, self.job.sequence_length, generator)
        padding = self.padding_of(ids)
        if self.end_token is not None:  # once per sequence, or the classifier raises an error
            # A random end token elsewhere would be a second one.
            ids[ids == self.end_token] = (self.end_token + 1) % self.vocabulary
            ids[:, padding.start - 1] = self.end_token
        if not self.job.padding:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        # Padding is at the end, and the mask excludes it.
        mask[:, padding] = 0
        ids[:, padding] = self.pad_token
        return {"input_ids": ids, "attention_mask": mask}

    def labels(self, samples: int, inputs: Batch, generator: torch.Generator) -> torch.Tensor:
        """Return labels of the task's shape: (B), (B, S) or (B, T), as in this module's table."""
        import torch

        job = self.job
        if has_classes(job.task) and job.task is not Task.TOKEN_CLASSIFICATION:
            if job.labels == 1:  # transformers treats one label as a regression
                return torch.rand(samples, generator=generator, device="cpu")
            return torch.randint(job.labels, (samples,), generator=generator, device="cpu")
        if job.task is Task.CAUSAL_LM:
            labels = inputs["input_ids"].clone()
        elif job.task is Task.TOKEN_CLASSIFICATION:
            shape = (samples, job.sequence_length)
            labels = torch.randint(job.labels, shape, generator=generator, device="cpu")
        elif job.task is Task.MASKED_LM:
            labels = self.ids(samples, job.sequence_length, generator)
        else:
            labels = self.ids(samples, job.target_length, generator)
        if job.padding:
            labels[:, self.padding_of(labels)] = IGNORED
        return labels

    def ids(self, samples: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Return random token ids of shape (B = `samples`, `length`) and dtype int64, in the model's
        vocabulary.
        """
        import torch

        high = min(HIGHEST_ID, self.vocabulary or HIGHEST_ID)  # CANINE hashes characters: no vocabulary
        # A tiny vocabulary has no room for special tokens below the range.
        low = LOWEST_ID if high > LOWEST_ID else high // 2
        return torch.randint(low, high, (samples, length), generator=generator, device="cpu")

    def padding_of(self, ids: torch.Tensor) -> slice:
        """Return the columns of `ids` (B, length) that are padding: the job's fraction, at the end, but never
        all.
        """
        length = ids.shape[1]
        # At least one token is not padded, since a mean over no tokens is NaN.
        padded = min(round(self.job.padding * length), length - 1)
        return slice(length - padded, length)
