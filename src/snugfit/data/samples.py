"""Samples: a dataset's rows as token ids, encoded once at the start and stored in flat arrays.

All rows are encoded before the first step. An invalid row therefore raises its error at the start, with its
number, and not after three hours. The result is a map-style dataset of plain lists, which transformers'
collators take too:

| sample                                      | content                                                   |
|---------------------------------------------|-----------------------------------------------------------|
| `{"input_ids": [...], "label": 3}`          | a class, or a number for a regression                     |
| `{"input_ids": [...], "labels": [...]}`     | one label per token (or target token), -100 for none      |
| `{..., "token_type_ids": [...]}`            | two texts, for models with token types                    |

Samples without a token in the loss are left out, such as a prompt that fills the whole sequence length. Their
loss would be 0/0. They are counted, and a dataset with no other sample is an error.

A masked language model predicts 15 % of the tokens. The mask token hides 80 % of these, 10 % become another
token, and 10 % stay unchanged.

The number of predicted tokens depends on a sequence's length alone and is never 0, as in BERT's own code. A
sample without a single one has a loss of 0/0. transformers' DataCollatorForLanguageModeling instead draws for
each token. Special tokens are not predicted. The choice depends on (seed, epoch, index) alone. The order of
samples, the number of workers and a restart therefore change nothing, and each epoch predicts different
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from snugfit.data.chat import ALL_WORDS, NO_TOOLS, ONLY_THE_ASSISTANT, marks_the_assistant
from snugfit.data.columns import columns_of
from snugfit.data.encoding import EncodedRow, Encoder
from snugfit.data.indexed import IndexedSamples, Sample
from snugfit.data.labels import Where, class_numbers, one_order, regression_values
from snugfit.data.ragged import Ragged, RaggedBuilder
from snugfit.data.rows import Rows
from snugfit.data.tokens import Tokenizer
from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED
from snugfit.job.job import Job, Task

if TYPE_CHECKING:
    import numpy as np


PACKED = "Texts are packed: attention crosses the texts within a sample."
"""A note of a run on packed texts."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Samples(IndexedSamples):
    """Samples of tokens, encoded in flat arrays. Without labels, the model predicts the tokens themselves."""

    inputs: Ragged
    """The token ids of each sample."""

    types: Ragged | None = None
    """Token types: 1 for each token of a second text, else 0. None without token types."""

    masking: Masking | None = None
    """Random masking of tokens for masked language models; None for other tasks."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample's input, (N)."""
        return self.inputs.lengths

    def __len__(self) -> int:
        return len(self.inputs)

    def _sample(self, index: int, epoch: int) -> Sample:
        """Return the sample at this index. Its masked tokens differ from one epoch to the next."""
        ids = self.inputs[index]
        sample: Sample = {"input_ids": ids}
        if self.types is not None:
            sample["token_type_ids"] = self.types[index]
        if target := self.target(index):
            sample |= target
        elif self.masking is not None:
            sample["input_ids"], sample["labels"] = self.masking.mask(ids, epoch=epoch, index=index)
        else:
            sample["labels"] = list(ids)
        return sample

    def filter(self, keep: np.ndarray) -> Samples:
        """Return the samples marked True in `keep`, (N). The others are added to the number of samples left
        out.
        """
        return replace(
            self,
            inputs=self.inputs.filter(keep),
            labels=self.labels and self.labels.filter(keep),
            label=None if self.label is None else self.label[keep],
            types=self.types and self.types.filter(keep),
            left_out=self.left_out + int((~keep).sum()),
        )

    def pack(self, length: int) -> Samples:
        """Concatenate the tokens of all samples and cut them into samples of this length."""
        inputs = self.inputs.recut(length)
        cut = len(self.inputs.values) - len(inputs.values)
        return replace(self, inputs=inputs, cut_tokens=cut, notes=(*self.notes, PACKED))


def samples_of(
    rows: Rows,
    job: Job,
    tokenizer: Any | None,
    *,
    pack: bool = False,
    label_names: Sequence[str] = (),
    seed: int = 0,
) -> Samples:
    """Return the rows encoded as samples of the job. Raises `UsageError` that names an invalid row.

    Samples are truncated to the job's sequence length. `pack` (causal-lm) joins texts with the end token and
    cuts the whole into samples of that length, without padding. Attention then crosses the texts within a
    sample, as in GPT-2's own training; the rest at the end is dropped. `label_names` is the order of the
    training split's classes, for an evaluation split. `seed` decides the tokens that a masked language model
    predicts. `tokenizer` may be None for rows that have `input_ids`.
    """
    columns = columns_of(rows, job)
    if pack and (job.task is not Task.CAUSAL_LM or set(columns) & {"prompt", "messages", "label"}):
        format_name = job.task if job.task is not Task.CAUSAL_LM else "prompts, messages or separate labels"
        raise UsageError(
            f"Packing works for causal-lm on plain text. With {format_name}, texts must not be joined. Leave "
            "packing out."
        )
    words = None if tokenizer is None else Tokenizer(tokenizer)
    if pack and (words is None or words.end is None):
        raise UsageError(
            "Packing joins texts with the end token, but this tokenizer has none. Leave packing out."
        )
    encoder = Encoder(rows, columns, job, words, limit=None if pack else job.sequence_length)
    samples, row_labels = _gather(encoder)
    names = one_order(label_names, rows.class_names(columns.get("label", "")), rows.source)
    samples = _with_label_numbers(samples, row_labels, job, names, rows.location)
    vocabulary = job.transformers_config().get_text_config().vocab_size
    refuse_unknown_tokens(samples.inputs, vocabulary, job, rows.location)
    if samples.labels is not None and job.task is not Task.TOKEN_CLASSIFICATION:
        refuse_unknown_tokens(samples.labels, vocabulary, job, rows.location, ignored=True)
    if "messages" in columns and tokenizer is not None:
        note = ONLY_THE_ASSISTANT if marks_the_assistant(tokenizer) else ALL_WORDS
        samples = replace(samples, notes=(note, *((NO_TOOLS,) if "tools" in rows.columns else ())))
    if job.task is Task.MASKED_LM and samples.labels is None:
        samples = replace(samples, masking=Masking.of(tokenizer, vocabulary, seed=seed))
    return samples.pack(job.sequence_length) if pack else _without_untrainable(samples, job, rows.location)


@dataclass(frozen=True, kw_only=True)
class _RowLabels:
    """Labels as the dataset has them, before their conversion to class numbers: one per sequence, or one per
    word.
    """

    values: list[Any]
    rows: array[int]
    """The index of the dataset row of each label."""

    def location(self, location: Where) -> Where:
        return lambda index: location(self.rows[index])


def _gather(encoded: Iterable[EncodedRow]) -> tuple[Samples, _RowLabels]:
    """Return every row's token ids in arrays, and the labels before their conversion to numbers."""
    inputs, labels, types = RaggedBuilder(), RaggedBuilder(), RaggedBuilder()
    row_labels = _RowLabels(values=[], rows=array("q"))
    cut, lost, labelled, typed = 0, 0, False, False
    for number, row in enumerate(encoded):
        inputs.append(row.ids)
        types.append(row.types or [])
        before = len(row_labels.values) if row.row_labels else 0
        # Labels index the values of their row. In the joined list, the row's values start at `before`.
        labels.append([label if label < 0 else label + before for label in row.labels or []])
        row_labels.values.extend(row.row_labels)
        row_labels.rows.extend([number] * len(row.row_labels))
        labelled, typed = labelled or row.labels is not None, typed or row.types is not None
        cut, lost = cut + (row.cut > 0), lost + row.cut
    samples = Samples(
        inputs=inputs.build(),
        labels=labels.build() if labelled else None,
        types=types.build() if typed else None,
        cut=cut,
        cut_tokens=lost,
    )
    return samples, row_labels


def _with_label_numbers(
    samples: Samples, row_labels: _RowLabels, job: Job, names: tuple[str, ...], location: Where
) -> Samples:
    """Return the samples with the rows' labels as numbers. `names` are the class names in their known order,
    if there is one.
    """
    values, where_of = row_labels.values, row_labels.location(location)
    if job.task is Task.SEQUENCE_CLASSIFICATION:
        # In transformers, a single label means regression.
        if job.labels == 1:
            return replace(samples, label=regression_values(values, where_of))
        numbers, names = class_numbers(values, where_of, labels=job.labels, names=names)
        return replace(samples, label=numbers, label_names=names)
    if job.task is not Task.TOKEN_CLASSIFICATION or samples.labels is None:
        return samples
    labels = samples.labels
    if values:  # each token's label is an index into its row's values
        numbers, names = class_numbers(values, where_of, labels=job.labels, names=names, ignored=True)
        # -100 would index from the end of the array, so it is clipped here and restored below.
        of_tokens = numbers[labels.values.clip(min=0)]
        of_tokens[labels.values < 0] = IGNORED
        return replace(samples, labels=Ragged(of_tokens, labels.starts), label_names=names)
    _, names = class_numbers(
        labels.values.tolist(),
        lambda position: location(int(labels.lists_of(position))),
        labels=job.labels,
        names=names,
        ignored=True,
    )
    return replace(samples, label_names=names)


def refuse_unknown_tokens(
    lists: Ragged, vocabulary: int, job: Job, location: Where, *, ignored: bool = False
) -> None:
    """Raise `UsageError` for a token id without a row in the model's embedding.

    On the device this would be a failed assertion that names no row.
    """
    wrong = (lists.values < 0) | (lists.values >= vocabulary)
    if ignored:
        wrong &= lists.values != IGNORED
    if wrong.any():
        position = int(wrong.argmax())
        raise UsageError(
            f"{location(int(lists.lists_of(position)))}: token {lists.values[position]}; {job.model.name} "
            f"knows tokens 0 to {vocabulary - 1:,}. Use the model's own tokenizer."
        )


def _without_untrainable(samples: Samples, job: Job, location: Where) -> Samples:
    """Return the samples that have a token in the loss. Raises `UsageError` if there are none."""
    empty = samples.lengths == 0
    if job.task in (Task.SEQUENCE_CLASSIFICATION, Task.SEQ2SEQ_LM) and empty.any():
        raise UsageError(
            f"{location(int(empty.argmax()))}: its text is empty, without a single token. Add text, or "
            "remove the row."
        )
    if samples.label is not None:
        return samples
    if samples.masking is not None:
        in_loss = samples.inputs.sums(samples.masking.may_be_predicted(samples.inputs.values))
    elif samples.labels is not None:
        counted = samples.labels.values != IGNORED
        if job.task is Task.CAUSAL_LM:  # a first token has no prediction
            # The start of an empty sample is the first token of the next sample, so empty samples are
            # excluded.
            counted[samples.labels.starts[:-1][samples.labels.lengths > 0]] = False
        in_loss = samples.labels.sums(counted)
    else:
        # The labels are the tokens themselves, and the first token has no prediction.
        in_loss = samples.lengths - 1
    if not (in_loss > 0).any():
        raise UsageError(
            f"{location(0)} and every other row: there is nothing to learn (all labels are {IGNORED}, the "
            "text is empty, or a prompt fills the whole sequence length). Correct the data, or set a "
            "longer sequence length."
        )
    return samples if (in_loss > 0).all() else samples.filter(in_loss > 0)


# ---- masks ------------------------------------------------------------------------------------------------


PREDICTED, HIDDEN, REPLACED = 0.15, 0.8, 0.1
"""Shares in BERT's masking: predicted tokens among all; among those, tokens hidden by the mask token, and
tokens replaced by random ones."""


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Settings of random masking for a masked language model."""

    seed: int
    """Seed from which the random masks are drawn."""

    mask_token: int
    """Id of the token that replaces hidden tokens."""

    known: int
    """Number of token ids that have a row in the model's embedding."""

    vocabulary: int
    """Number of token ids from which random replacements are drawn."""

    special: tuple[int, ...]
    """Ids of special tokens, which are never masked."""

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int, *, seed: int) -> Masking:
        """Return the masking settings for a tokenizer. Raises `UsageError` if it has no mask token."""
        if tokenizer is None or tokenizer.mask_token_id is None:
            raise UsageError(
                "masked-lm needs a mask token, but this tokenizer has none. Use the model's own "
                "tokenizer, or another task."
            )
        return cls(
            seed=seed,
            mask_token=tokenizer.mask_token_id,
            known=vocabulary,
            # The model's embedding may have more rows than the tokenizer has tokens, as padding.
            vocabulary=min(len(tokenizer), vocabulary),
            special=tuple(sorted(tokenizer.all_special_ids)),
        )

    def may_be_predicted(self, ids: np.ndarray) -> np.ndarray:
        """Return True for each token of `ids` that masking may select: all but special tokens."""
        ordinary: np.ndarray = self._ordinary[ids]
        return ordinary

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """Return a table (vocabulary) with True for every token that is not special. It exists because
        `np.isin` sorts at each call.
        """
        import numpy as np

        # Ids of special tokens may exceed the number of rows of the embedding.
        ordinary = np.ones(max(self.known, *self.special) + 1, dtype=bool)
        ordinary[list(self.special)] = False
        return ordinary

    def mask(self, ids: list[int], *, epoch: int, index: int) -> tuple[list[int], list[int]]:
        """Return S tokens, some of them masked, and S labels: the original token if it is predicted, or
        -100."""
        import numpy as np

        original = np.array(ids, dtype=np.int64)
        candidates = np.flatnonzero(self.may_be_predicted(original))
        if not len(candidates):
            return ids, [IGNORED] * len(ids)
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch, index]))
        count = max(1, round(PREDICTED * len(candidates)))
        chosen = draw.permutation(candidates)[:count]
        draws, replacements = draw.random(count), draw.integers(self.vocabulary, size=count)
        masked, labels = original.copy(), np.full_like(original, IGNORED)
        labels[chosen] = original[chosen]
        masked[chosen[draws < HIDDEN]] = self.mask_token
        replaced = (draws >= HIDDEN) & (draws < HIDDEN + REPLACED)
        masked[chosen[replaced]] = replacements[replaced]
        return masked.tolist(), labels.tolist()
