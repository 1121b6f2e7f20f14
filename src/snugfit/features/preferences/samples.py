"""Rows of chosen and rejected answers as token ids, and their batches.

| columns                  | content                                                                       |
|--------------------------|-------------------------------------------------------------------------------|
| prompt, chosen, rejected | texts, or lists of messages; each answer follows the prompt                   |
| chosen, rejected         | the same; the common beginning of both is the prompt                          |
| prompt, completion,      | `kto`: the same, and True, 1 or "true" for a desirable answer. The second     |
| label                    | sequence of a sample is its prompt with the next row's answer.                |

A text ends with the tokenizer's end token. Messages are written by its chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, final

from snugfit.data.chat import chat_tokens, conversation_of
from snugfit.data.collate import Collate, pad_rows
from snugfit.data.columns import columns_of
from snugfit.data.encoding import common_prefix
from snugfit.data.indexed import IndexedSamples, Sample
from snugfit.data.ragged import Ragged, RaggedBuilder
from snugfit.data.rows import as_text
from snugfit.data.samples import refuse_unknown_tokens
from snugfit.data.tokens import Tokenizer, as_tokenizer, padding_token
from snugfit.errors import UsageError
from snugfit.features.preferences.settings import FORMS, ON_ROLLOUTS, tensors_of
from snugfit.job.batch import IGNORED
from snugfit.job.job import Job, Task

if TYPE_CHECKING:
    import numpy as np
    import torch

    from snugfit.data.rows import Row, Rows

PAIRS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))

USUAL = {
    PAIRS[0]: (
        ("prompt", "chosen", "rejected"), ("question", "chosen", "rejected"),
        ("instruction", "chosen", "rejected"), ("input", "chosen", "rejected"),
    ),
    PAIRS[1]: (("chosen", "rejected"),),
    ("prompt", "completion"): (("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
}  # fmt: skip
"""Usual column names, by roles."""

ANSWERS = (("prompt", "completion"),)
INPUTS = {Task(name): ANSWERS if name == "kto" else PAIRS for name in FORMS}
"""Roles of the columns that each task reads."""

LABELS = {Task("kto"): ("label", "labels", "desirable", "kto_tag")}
"""Usual names of the column that marks desirable answers."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PairSamples(IndexedSamples):
    """Samples of two token sequences each, encoded in flat arrays."""

    sequences: tuple[Ragged, Ragged]
    """Token ids of the first and the second sequence of each sample, with the prompt."""

    prompts: np.ndarray
    """Number of tokens of each sequence that belong to the prompt, (N, 2)."""

    names: tuple[str, ...]
    """Names of the tensors that the task's loss reads."""

    pad_token: int
    """Token id that pads sequences."""

    def __len__(self) -> int:
        return len(self.prompts)

    def _sample(self, index: int, epoch: int) -> Sample:
        """Return both sequences of the sample and the lengths of their prompts."""
        return {
            "sequences": [ids[index] for ids in self.sequences],
            "prompts": self.prompts[index].tolist(),
            **self.target(index),
        }

    def collate_with(self, targets: Collate) -> Callable[[list[Any]], dict[str, Any]]:
        """Return the collate function; `targets` has the lengths of batches."""
        return PairCollate(targets=targets, pad_token=self.pad_token, names=self.names)


@final
@dataclass(frozen=True, kw_only=True)
class PairCollate:
    """A picklable function from samples to a batch of pairs (`inputs.py` has the shapes)."""

    targets: Collate
    """Collate function of tokens, which has the lengths of a batch."""

    pad_token: int
    """Token id that pads sequences."""

    names: tuple[str, ...]
    """Names of the tensors that the task's loss reads."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        lists = [ids for sample in samples for ids in sample["sequences"]]
        prompts = [length for sample in samples for length in sample["prompts"]]
        length = self.targets.length(lists, self.targets.job.sequence_length)
        rows = {"input_ids": pad_rows(lists, length, self.pad_token)}
        if any(len(ids) < length for ids in lists):
            rows["attention_mask"] = pad_rows([[1] * len(ids) for ids in lists], length, 0)
        if "labels" in self.names:
            answers = [[IGNORED] * at + list(ids[at:]) for ids, at in zip(lists, prompts, strict=True)]
            rows["labels"] = pad_rows(answers, length, IGNORED)
        batch = {name: torch.from_numpy(values).view(-1, 2, length) for name, values in rows.items()}
        if "desirable" in self.names:
            batch["desirable"] = torch.tensor([sample["label"] for sample in samples], dtype=torch.bool)
        return batch


Pair = list[tuple[list[int], int]]
"""Type of the token ids of two sequences, each with its number of prompt tokens."""


@dataclass(frozen=True, kw_only=True)
class _PairEncoder:
    """Encoder of the rows of one dataset: it returns both sequences of a row, and their prompts' lengths."""

    rows: Rows
    columns: Mapping[str, str]
    tokenizer: Tokenizer

    def pair(self, row: Row, index: int, after: Row) -> Pair:
        """Return the token ids and the number of prompt tokens of the chosen and the rejected answer.

        With a column of single answers, the second one is that of the row `after` this one.
        """
        values = {
            role: self.rows.value(row, column, index)
            for role, column in self.columns.items()
            if role != "label"
        }
        if "completion" in values:
            column = self.columns["completion"]
            values["chosen"] = values.pop("completion")
            values["rejected"] = self.rows.value(after, column, index)
        location = self.rows.location(index)
        if all(isinstance(value, list) for value in values.values()):
            return self._of_messages(values, location)
        texts = {role: as_text(value, location, role) for role, value in values.items()}
        prompt = texts.get("prompt", _common_text(texts["chosen"], texts["rejected"]))
        before = texts.get("prompt", "")
        alone = self.tokenizer.tokens([prompt], limit=None)[0].ids
        joined = [before + texts[role] for role in ("chosen", "rejected")]
        ended = [self.tokenizer.with_end(one.ids) for one in self.tokenizer.tokens(joined, limit=None)]
        return [(ids, common_prefix(alone, ids)) for ids in ended]

    def _of_messages(self, values: Mapping[str, Any], location: str) -> Pair:
        chats = {role: conversation_of(value, location) for role, value in values.items()}
        chosen, rejected = chats["chosen"], chats["rejected"]
        if "prompt" in chats:
            chosen, rejected = chats["prompt"] + chosen, chats["prompt"] + rejected
        # The last message is always an answer.
        most = min(len(chosen), len(rejected)) - 1
        pairs = zip(chosen[:most], rejected[:most], strict=True)
        shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if not shared:
            raise UsageError(
                f"{location}: chosen and rejected share no message before their answers. Begin both with the "
                "prompt's messages, or give a column of them: prompt=NAME."
            )
        of_transformers = self.tokenizer.of_transformers
        prompt, *answers = chat_tokens(of_transformers, [shared, chosen, rejected], [location] * 3)
        return [(answer.ids, common_prefix(prompt.ids, answer.ids)) for answer in answers]


def _common_text(first: str, other: str) -> str:
    """Return the common beginning of two texts, up to the last whole word."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False))
    return "".join(letter for letter, _ in shared).rpartition(" ")[0]


def read_samples(
    rows: Rows, job: Job, processor: Any, tokenizer: Any | None, *, pack: bool, label_names: Sequence[str]
) -> PairSamples:
    """Return a dataset's rows as pairs of token sequences, truncated to the job's sequence length.

    Raises `UsageError` for a row without an answer, and for a missing tokenizer.
    """
    import numpy as np

    _refuse_untrained(job, pack=pack)
    columns = columns_of(rows, job, INPUTS, USUAL, LABELS)
    words = as_tokenizer(tokenizer)
    if words is None:
        raise UsageError(
            f"{rows.source}: its rows are text, but no tokenizer was found. Give one: tokenizer=FOLDER, or "
            "--tokenizer FOLDER."
        )
    encoder = _PairEncoder(rows=rows, columns=columns, tokenizer=Tokenizer(words))
    sequences, prompts, row_numbers = (RaggedBuilder(), RaggedBuilder()), list[list[int]](), list[int]()
    desirable, limit, cut, lost = list[bool](), job.sequence_length, 0, 0
    for index, row in enumerate(rows):
        pair = encoder.pair(row, index, rows[(index + 1) % len(rows)])
        # An answer whose tokens are all cut has no log-probability.
        if any(min(len(ids), limit) <= prompt for ids, prompt in pair):
            continue
        row_numbers.append(index)
        if "label" in columns:
            desirable.append(_is_desirable(rows.value(row, columns["label"], index), rows.location(index)))
        for builder, (ids, _) in zip(sequences, pair, strict=True):
            builder.append(ids[:limit])
        excess = [max(0, len(ids) - limit) for ids, _ in pair]
        cut, lost = cut + (sum(excess) > 0), lost + sum(excess)
        prompts.append([prompt for _, prompt in pair])
    if not prompts:
        raise UsageError(
            f"{rows.source}: no row has two answers within {limit} tokens. Set a longer sequence length, or "
            "correct the columns."
        )
    first, second = (builder.build() for builder in sequences)
    vocabulary = job.transformers_config().get_text_config().vocab_size
    for lists in (first, second):
        refuse_unknown_tokens(lists, vocabulary, job, lambda number: rows.location(row_numbers[number]))
    return PairSamples(
        sequences=(first, second),
        prompts=np.array(prompts, dtype=np.int64),
        label=np.array(desirable) if desirable else None,
        names=tensors_of(job),
        pad_token=padding_token(job, words),
        cut=cut,
        cut_tokens=lost,
        left_out=len(rows) - len(row_numbers),
    )


def _refuse_untrained(job: Job, *, pack: bool) -> None:
    """Raise `UsageError` for a job that is predicted alone, and for packed texts."""
    if job.task in (*ON_ROLLOUTS, "distill"):
        raise UsageError(
            f"snugfit train does not support the task {job.task}, whose answers the model generates. Train "
            "with TRL, and use snugfit predict for its memory."
        )
    if pack:
        raise UsageError(f"Packing joins texts, but the task {job.task} compares them. Leave packing out.")
    if job.phase_settings.get("reference") == "precomputed":
        raise UsageError(
            "reference is 'precomputed', which is for predictions and measurements: snugfit train computes "
            "the reference in each step. Leave --reference out."
        )


def _is_desirable(value: Any, location: str) -> bool:
    """Return True for the mark of a desirable answer. Raises `UsageError` for a value that is no mark."""
    marks = {"true": True, "1": True, "false": False, "0": False}
    if (mark := str(value).lower()) not in marks:
        raise UsageError(
            f"{location}: label {value!r:.40} marks no answer. Allowed are true and false, or 1 and 0."
        )
    return marks[mark]
