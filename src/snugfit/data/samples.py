"""Samples: a dataset's rows as token ids, made once at the start and kept in flat arrays.

A run starts the same way each time it is started, so all rows are encoded before the first step: whatever is
wrong with any of them is known then, with its row, and not after three hours. What comes out is a map-style
dataset of plain lists, as transformers' collators take them too:

    {"input_ids": [...], "label": 3}           a class, or a number for a regression
    {"input_ids": [...], "labels": [...]}      a label to each token (or target token), -100 for none
    {..., "token_type_ids": [...]}             two texts, for models that tell them apart

Left out are samples that a loss cannot look at, such as a prompt that fills all the room there is: their loss
would be 0/0. They are counted, and when nothing else is there it is an error.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from snugfit.data.by_place import ByPlace, Sample
from snugfit.data.chat import ALL_WORDS, ITS_WORDS, NO_TOOLS
from snugfit.data.columns import columns_of
from snugfit.data.encoding import Encoded, Encoder
from snugfit.data.labels import Where, class_numbers, measures, one_order
from snugfit.data.masking import Masking
from snugfit.data.ragged import Filling, Ragged
from snugfit.data.rows import Rows
from snugfit.data.tokens import Tokenizer
from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED
from snugfit.job.job import Job, Task

if TYPE_CHECKING:
    import numpy as np


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Samples(ByPlace):
    """A dataset of samples, picklable and without a state."""

    inputs: Ragged
    """Token ids of each."""

    rows: np.ndarray
    """Of which row each was made; of a packed one, the row that it begins with."""

    labels: Ragged | None = None
    """One to each token, or to each of the target. None where the tokens themselves are asked for."""

    label: np.ndarray | None = None
    """One to each sample."""

    types: Ragged | None = None
    """1 for tokens of a second text."""

    masking: Masking | None = None
    """What hides tokens from a masked language model."""

    label_names: tuple[str, ...] = ()
    """Of the classes, in order."""

    cut: int = 0
    """Samples that were too long."""

    cut_tokens: int = 0
    """Tokens that they lost; packed, the few left over at the end."""

    left_out: int = 0
    """Rows of which no sample was made, for a loss could look at nothing in them."""

    notes: tuple[str, ...] = ()
    """What somebody who trains on this should be told."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample's input."""
        return self.inputs.lengths

    def __len__(self) -> int:
        return len(self.inputs)

    def _made(self, index: int, epoch: int) -> Sample:
        """Masks differ from one epoch to the next, nothing else does."""
        ids = self.inputs[index]
        found: Sample = {"input_ids": ids}
        if self.types is not None:
            found["token_type_ids"] = self.types[index]
        if self.label is not None:
            found["label"] = self.label[index].item()
        elif self.labels is not None:
            found["labels"] = self.labels[index]
        elif self.masking is not None:
            found["input_ids"], found["labels"] = self.masking.masked(ids, epoch=epoch, index=index)
        else:
            found["labels"] = list(ids)
        return found

    def only(self, kept: np.ndarray) -> Samples:
        """Those that are marked True; the others are counted as left out."""
        return replace(
            self,
            inputs=self.inputs.only(kept),
            rows=self.rows[kept],
            labels=self.labels and self.labels.only(kept),
            label=None if self.label is None else self.label[kept],
            types=self.types and self.types.only(kept),
            left_out=self.left_out + int((~kept).sum()),
        )

    def packed(self, length: int) -> Samples:
        """The tokens of all samples, one behind the other, in samples of this length."""
        inputs = self.inputs.recut(length)
        begins = self.inputs.owners(inputs.starts[:-1])
        lost = len(self.inputs.values) - len(inputs.values)
        return replace(self, inputs=inputs, rows=self.rows[begins], cut_tokens=lost)


def samples_of(
    rows: Rows,
    job: Job,
    tokenizer: Any | None,
    *,
    pack: bool = False,
    max_length: int | None = None,
    label_names: Sequence[str] = (),
    seed: int = 0,
) -> Samples:
    """The rows as samples of the job. Raises `UsageError` that names the row.

    Cut at `max_length` tokens, at most the job's sequence length. `pack` (causal-lm) joins texts by the end
    token and cuts the whole into samples of that length, so that nothing is padded; attention then reaches
    across the texts within a sample, as in GPT-2's own training. What is left over at the end is dropped.
    `label_names` is the order of classes in the split that is trained on, for one that is evaluated. `seed`
    decides which tokens a masked language model is asked for. `tokenizer` may be None for rows that have
    `input_ids`.
    """
    length = _length(job, max_length)
    columns = columns_of(rows, job)
    if pack and (job.task is not Task.CAUSAL_LM or set(columns) & {"prompt", "messages", "label"}):
        what = job.task if job.task is not Task.CAUSAL_LM else "a prompt, messages or labels of one's own"
        raise UsageError(f"Packing is for causal-lm on plain text; with {what} texts must stay apart.")
    words = None if tokenizer is None else Tokenizer(tokenizer)
    if pack and (words is None or words.end is None):
        raise UsageError("Packing joins texts by the end token, and this tokenizer has none. Leave it out.")
    encoder = Encoder(rows, columns, job, words, limit=None if pack else length)
    samples, named = _gathered(encoder)
    known = one_order(label_names, rows.class_names(columns.get("label", "")), rows.source)
    samples = _with_classes(samples, named, job, known, rows.where)
    vocabulary = job.transformers_config().get_text_config().vocab_size
    refuse_unknown_tokens(samples.inputs, vocabulary, job, rows.where)
    if samples.labels is not None and job.task is not Task.TOKEN_CLASSIFICATION:
        refuse_unknown_tokens(samples.labels, vocabulary, job, rows.where, ignored=True)
    if "messages" in columns and words is not None:
        told = ITS_WORDS if words.tells_the_assistant else ALL_WORDS
        samples = replace(samples, notes=(told, *((NO_TOOLS,) if "tools" in rows.columns else ())))
    if job.task is Task.MASKED_LM and samples.labels is None:
        samples = replace(samples, masking=Masking.of(tokenizer, vocabulary, seed=seed))
    return samples.packed(length) if pack else _that_teach(samples, job, rows.where)


def _length(job: Job, max_length: int | None) -> int:
    if max_length is None:
        return job.sequence_length
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise UsageError(f"max_length is {max_length!r}; it is a number of tokens, from 1 up.")
    if max_length > job.sequence_length:
        raise UsageError(
            f"max_length is {max_length}, and the job was planned for sequences of {job.sequence_length}"
            " tokens: set the job's sequence length."
        )
    return max_length


@dataclass(frozen=True, kw_only=True)
class _Named:
    """The labels of classes, as the rows have them."""

    values: list[Any]
    rows: array[int]

    def where(self, where: Where) -> Where:
        return lambda index: where(self.rows[index])


def _gathered(encoded: Iterable[Encoded]) -> tuple[Samples, _Named]:
    """Every row's tokens in arrays, and the labels that are yet to become numbers."""
    import numpy as np

    inputs, labels, types = Filling(), Filling(), Filling()
    named = _Named(values=[], rows=array("q"))
    cut, lost, labelled, typed = 0, 0, False, False
    for row, each in enumerate(encoded):
        inputs.append(each.ids)
        types.append(each.types or [])
        words = len(named.values) if each.named else 0
        labels.append([label if label < 0 else label + words for label in each.labels or []])
        named.values.extend(each.named)
        named.rows.extend([row] * len(each.named))
        labelled, typed = labelled or each.labels is not None, typed or each.types is not None
        cut, lost = cut + (each.cut > 0), lost + each.cut
    made = inputs.done()
    samples = Samples(
        inputs=made,
        rows=np.arange(len(made), dtype=np.int64),
        labels=labels.done() if labelled else None,
        types=types.done() if typed else None,
        cut=cut,
        cut_tokens=lost,
    )
    return samples, named


def _with_classes(samples: Samples, named: _Named, job: Job, known: tuple[str, ...], where: Where) -> Samples:
    """With the classes' names as numbers."""
    if job.task is Task.SEQUENCE_CLASSIFICATION:
        if job.labels == 1:
            return replace(samples, label=measures(named.values, named.where(where)))
        numbers, names = class_numbers(named.values, named.where(where), labels=job.labels, names=known)
        return replace(samples, label=numbers, label_names=names)
    if job.task is not Task.TOKEN_CLASSIFICATION or samples.labels is None:
        return samples
    labels = samples.labels
    if named.values:  # labels are places among the words
        numbers, names = class_numbers(
            named.values, named.where(where), labels=job.labels, names=known, ignored=True
        )
        found = numbers[labels.values.clip(min=0)]
        found[labels.values < 0] = IGNORED
        return replace(samples, labels=Ragged(found, labels.starts), label_names=names)
    _, names = class_numbers(
        labels.values.tolist(),
        lambda place: where(int(labels.owners(place))),
        labels=job.labels,
        names=known,
        ignored=True,
    )
    return replace(samples, label_names=names)


def refuse_unknown_tokens(
    lists: Ragged, vocabulary: int, job: Job, where: Where, *, ignored: bool = False
) -> None:
    """A token that the model has no row for ends on the device, in an assertion that names nothing."""
    wrong = (lists.values < 0) | (lists.values >= vocabulary)
    if ignored:
        wrong &= lists.values != IGNORED
    if wrong.any():
        place = int(wrong.argmax())
        raise UsageError(
            f"{where(int(lists.owners(place)))}: token {lists.values[place]}; {job.model.name} knows tokens 0"
            f" to {vocabulary - 1:,}. Is the tokenizer of another model?"
        )


def _that_teach(samples: Samples, job: Job, where: Where) -> Samples:
    """Those that have something that a loss looks at."""
    empty = samples.lengths == 0
    if job.task in (Task.SEQUENCE_CLASSIFICATION, Task.SEQ2SEQ_LM) and empty.any():
        raise UsageError(f"{where(int(empty.argmax()))}: its text is empty: there is not one token in it.")
    if samples.label is not None:
        return samples
    if samples.masking is not None:
        looked_at = samples.inputs.sums(samples.masking.may_be_asked(samples.inputs.values))
    elif samples.labels is not None:
        counted = samples.labels.values != IGNORED
        if job.task is Task.CAUSAL_LM:  # nothing foretells a first token
            counted[samples.labels.starts[:-1][samples.labels.lengths > 0]] = False
        looked_at = samples.labels.sums(counted)
    else:
        looked_at = samples.lengths - 1
    if not (looked_at > 0).any():
        raise UsageError(
            f"{where(0)} and every other row: a loss would look at nothing (all labels are {IGNORED}, the"
            " text is empty, or a prompt fills all of the sequence length)."
        )
    return samples if (looked_at > 0).all() else samples.only(looked_at > 0)
