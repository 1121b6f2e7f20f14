"""Masks of masked language models, as BERT was trained: 15 % of the tokens are to be predicted, and of these
80 % are hidden behind the mask token, 10 % are another token, and 10 % stay as they are (Devlin et al. 2019,
section 3.1).

As in BERT's own code, and unlike transformers' DataCollatorForLanguageModeling, which draws for each token,
the number of tokens to predict is fixed by a sequence's length and is never 0: a sample without a single one
has a loss of 0/0. Special tokens are not predicted. Which tokens are depends on (seed, epoch, index) alone,
so the order of samples, the number of workers and a restart change nothing, and each epoch takes others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED

if TYPE_CHECKING:
    import numpy as np

PREDICTED, HIDDEN, REPLACED = 0.15, 0.8, 0.1
"""The share of tokens to predict, and of these the shares that are hidden and replaced."""


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How the sequences of a dataset are masked."""

    seed: int
    """The run's seed for data."""

    mask_token: int
    """What hides a token."""

    known: int
    """How many tokens the model has rows for."""

    vocabulary: int
    """Tokens from 0 up to it may replace another."""

    special: tuple[int, ...]
    """Tokens that are never predicted."""

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int, *, seed: int) -> Masking:
        """With the tokenizer's own mask token. Raises `UsageError` when it has none."""
        if tokenizer is None or tokenizer.mask_token_id is None:
            raise UsageError(
                "masked-lm needs a mask token, but this tokenizer has none. Is it the model's tokenizer?"
            )
        return cls(
            seed=seed,
            mask_token=tokenizer.mask_token_id,
            known=vocabulary,
            vocabulary=min(len(tokenizer), vocabulary),
            special=tuple(sorted(tokenizer.all_special_ids)),
        )

    def may_be_predicted(self, ids: np.ndarray) -> np.ndarray:
        """For tokens in any shape, True for each that is not special, in that shape."""
        ordinary: np.ndarray = self._ordinary[ids]
        return ordinary

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """True for every token that is not special, (vocabulary): a table, for `np.isin` sorts at each
        call."""
        import numpy as np

        ordinary = np.ones(max(self.known, *self.special) + 1, dtype=bool)
        ordinary[list(self.special)] = False
        return ordinary

    def mask(self, ids: list[int], *, epoch: int, index: int) -> tuple[list[int], list[int]]:
        """S tokens with some of them hidden, and the S labels: the hidden token, or -100 for none."""
        import numpy as np

        original = np.array(ids, dtype=np.int64)
        candidates = np.flatnonzero(self.may_be_predicted(original))
        if not len(candidates):
            return ids, [IGNORED] * len(ids)
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch, index]))
        count = max(1, round(PREDICTED * len(candidates)))
        chosen = draw.permutation(candidates)[:count]
        fate, replacements = draw.random(count), draw.integers(self.vocabulary, size=count)
        masked, labels = original.copy(), np.full_like(original, IGNORED)
        labels[chosen] = original[chosen]
        masked[chosen[fate < HIDDEN]] = self.mask_token
        replaced = (fate >= HIDDEN) & (fate < HIDDEN + REPLACED)
        masked[chosen[replaced]] = replacements[replaced]
        return masked.tolist(), labels.tolist()
