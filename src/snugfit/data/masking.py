"""Masks of masked language models, with BERT's shares (Devlin et al. 2019, section 3.1).

15 % of the tokens are to be predicted. The mask token hides 80 % of these, 10 % become another token, and 10
% stay unchanged.

The number of predicted tokens depends on a sequence's length alone and is never 0, as in BERT's own code. A
sample without a single one has a loss of 0/0. transformers' DataCollatorForLanguageModeling instead draws for
each token. Special tokens are not predicted. The choice depends on (seed, epoch, index) alone. The order of
samples, the number of workers and a restart therefore change nothing, and each epoch predicts different
tokens.
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
    """The settings of masking for the sequences of a dataset."""

    seed: int
    """The run's seed for data."""

    mask_token: int
    """The token id that hides a token."""

    known: int
    """Number of tokens with a row in the model's embedding."""

    vocabulary: int
    """Replacement tokens are drawn from 0 up to this number."""

    special: tuple[int, ...]
    """Tokens that are never predicted."""

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int, *, seed: int) -> Masking:
        """Build the settings from the tokenizer. Raises `UsageError` if it has no mask token."""
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
        """Return True for each token that is not special, in the shape of `ids`."""
        ordinary: np.ndarray = self._ordinary[ids]
        return ordinary

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """True for every token that is not special, (vocabulary). A table, because `np.isin` sorts at each
        call."""
        import numpy as np

        ordinary = np.ones(max(self.known, *self.special) + 1, dtype=bool)
        ordinary[list(self.special)] = False
        return ordinary

    def mask(self, ids: list[int], *, epoch: int, index: int) -> tuple[list[int], list[int]]:
        """Return S tokens, some of them hidden, and S labels: the hidden token, or -100."""
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
