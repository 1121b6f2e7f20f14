"""A transformers tokenizer: loading it, tokenizing texts with it, and its padding token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from snugfit.data.pretrained import load_pretrained
from snugfit.errors import UsageError, one_line
from snugfit.job.job import Job


def load_tokenizer(name_or_folder: str | os.PathLike[str]) -> Any:
    """Load transformers' tokenizer by its name or folder. Raises `UsageError`."""
    from transformers import AutoTokenizer

    return load_pretrained(
        name_or_folder,
        AutoTokenizer.from_pretrained,
        "tokenizer",
        word="tokenizer",
        patterns=("*token*", "*vocab*"),
        file="tokenizer.json",
    )


def padding_token(job: Job, tokenizer: Any | None = None) -> int:
    """Return the id of the token that pads batches.

    The model's own goes first, because models search for it: a decoder that classifies reads the last token
    that differs from it. Next are the tokenizer's padding token, its end token, a common choice of users, and
    0.
    """
    config = job.transformers_config().get_text_config()
    candidates = [getattr(config, "pad_token_id", None)]
    candidates += [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
    return next(
        (token for token in candidates if isinstance(token, int) and 0 <= token < config.vocab_size), 0
    )


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one text, or of a pair of texts."""

    ids: list[int]
    """The token ids of the text, including special tokens."""

    types: list[int] | None
    """Token types: 1 for each token of the second text, else 0. None if the model has no token types."""

    words: list[int | None]
    """The index of each token's word in an input that is a list of words; None for special tokens."""

    cut: int = 0
    """Number of tokens lost by truncation."""


@final
class Tokenizer:
    """A wrapper of a transformers tokenizer that returns token ids as plain lists."""

    def __init__(self, tokenizer: Any) -> None:
        self.of_transformers = tokenizer
        # Data loader workers are forked after the tokenizer has used threads. They never use the tokenizer,
        # but without this variable it warns at every fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def tokens(
        self,
        texts: Sequence[Any] | None = None,
        pairs: Sequence[str] | None = None,
        *,
        targets: Sequence[str] | None = None,
        limit: int | None,
        words: bool = False,
    ) -> list[Tokens]:
        """Return the tokens of each text, at most `limit` per text.

        A longer text is tokenized a second time, with truncation. Raises `UsageError` if the tokenizer fails.
        """
        if words and not getattr(self.of_transformers, "is_fast", False):
            raise UsageError(
                "token-classification needs a fast tokenizer, which knows the word of each token. Give "
                "one (tokenizer.is_fast)."
            )
        if limit is not None:
            self._refuse_too_short(limit, pair=pairs is not None)
        inputs = {"text": texts, "text_pair": pairs, "text_target": targets}
        tokens = self._call(inputs, words, truncation=False)
        long = [i for i, text in enumerate(tokens) if limit is not None and len(text.ids) > limit]
        if long:
            inputs = {name: values and [values[i] for i in long] for name, values in inputs.items()}
            again = self._call(inputs, words, truncation=True, max_length=limit)
            for i, short in zip(long, again, strict=True):
                tokens[i] = replace(short, cut=len(tokens[i].ids) - len(short.ids))
        return tokens

    def with_end(self, ids: list[int]) -> list[int]:
        """Return the ids with the end token appended, unless it is there already or the tokenizer
        has none.
        """
        end = self.end
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    @property
    def end(self) -> int | None:
        """The token that ends a text."""
        token: int | None = self.of_transformers.eos_token_id
        return token

    def _call(self, inputs: dict[str, Sequence[Any] | None], words: bool, **more: Any) -> list[Tokens]:
        try:
            # With `verbose`, the tokenizer would warn of texts beyond the model's length. They are truncated
            # here.
            encoding = self.of_transformers(
                **inputs, is_split_into_words=words, padding=False, verbose=False, **more
            )
        except Exception as error:  # a custom tokenizer may raise any error
            raise UsageError(
                f"The tokenizer fails on the dataset's text ({one_line(error, 300)}). Try it without "
                "snugfit: tokenizer(text)."
            ) from error
        types = encoding.get("token_type_ids")
        return [
            Tokens(
                ids=ids,
                types=types[i] if types else None,
                words=encoding.word_ids(i) if words else [],
            )
            for i, ids in enumerate(encoding["input_ids"])
        ]

    def _refuse_too_short(self, limit: int, *, pair: bool) -> None:
        special = self.of_transformers.num_special_tokens_to_add(pair=pair)
        if limit <= special:
            raise UsageError(
                f"{limit} tokens leave no room for text: this tokenizer adds {special} special tokens to "
                "each sequence. Set a longer sequence length."
            )


def as_tokenizer(tokenizer: Any | None) -> Any | None:
    """Return the given tokenizer, or the one in this folder. Raises `UsageError` for other types."""
    if tokenizer is not None and not callable(tokenizer) and not isinstance(tokenizer, str | os.PathLike):
        raise UsageError(
            f"tokenizer is {tokenizer!r:.80}; it must be transformers' tokenizer, or its folder."
        )
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
