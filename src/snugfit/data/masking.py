"""Masked-LM masks, as BERT was trained: 15 % of the tokens are asked for, and of these 80 % are hidden behind
the mask token, 10 % are another token, and 10 % stay as they are (Devlin et al. 2019, 3.1).

As in BERT's own code, and unlike transformers' collator, the number of tokens that are asked for is fixed by
a sequence's length and is never 0: a sample without a single one has a loss of 0/0. Special tokens are not
asked for. Which tokens they are is decided by (seed, epoch, index) alone, so the order of samples, the number
of workers and a restart change nothing, and each epoch asks for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED

if TYPE_CHECKING:
    import numpy as np

ASKED, HIDDEN, OTHER = 0.15, 0.8, 0.1


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How a sequence is masked."""

    seed: int
    """Of the run."""

    mask_token: int
    """What hides a token."""

    known: int
    """Tokens of the model."""

    vocabulary: int
    """Tokens from 0 up to it may stand in for another."""

    special: tuple[int, ...]
    """Tokens that are not asked for."""

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int, *, seed: int) -> Masking:
        """With the tokenizer's own mask token. Raises `UsageError` when it has none."""
        if tokenizer is None or tokenizer.mask_token_id is None:
            raise UsageError(
                "masked-lm hides tokens behind a mask token, and this tokenizer has none. Is it the model's?"
            )
        return cls(
            seed=seed,
            mask_token=tokenizer.mask_token_id,
            known=vocabulary,
            vocabulary=min(len(tokenizer), vocabulary),
            special=tuple(sorted(tokenizer.all_special_ids)),
        )

    def may_be_asked(self, ids: np.ndarray) -> np.ndarray:
        """Which of these tokens are none of the special ones."""
        found: np.ndarray = self._plain[ids]
        return found

    @cached_property
    def _plain(self) -> np.ndarray:
        """Of every token, whether it is no special one: looked up, for `np.isin` sorts at each call."""
        import numpy as np

        plain = np.ones(max(self.known, *self.special) + 1, dtype=bool)
        plain[list(self.special)] = False
        return plain

    def masked(self, ids: list[int], *, epoch: int, index: int) -> tuple[list[int], list[int]]:
        """The sequence with some of its tokens hidden, and the labels that ask for them."""
        import numpy as np

        before = np.array(ids, dtype=np.int64)
        asked_for = np.flatnonzero(self.may_be_asked(before))
        if not len(asked_for):
            return ids, [IGNORED] * len(ids)
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch, index]))
        count = max(1, round(ASKED * len(asked_for)))
        chosen = draw.permutation(asked_for)[:count]
        fate, others = draw.random(count), draw.integers(self.vocabulary, size=count)
        after, labels = before.copy(), np.full_like(before, IGNORED)
        labels[chosen] = before[chosen]
        after[chosen[fate < HIDDEN]] = self.mask_token
        other = (fate >= HIDDEN) & (fate < HIDDEN + OTHER)
        after[chosen[other]] = others[other]
        return after.tolist(), labels.tolist()
