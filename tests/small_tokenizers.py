"""Small tokenizers of several kinds, built in the test: one token for each word and for the text between
words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>")
"""Names of tokens 0 to 6."""

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = (*NUMBERS, ".", "-", "u", "s", "of")
"""Tokens from 7: `one` is 7, `.` is 17, `-` 18, `u` 19, `s` 20, `of` 21."""


def tokenizer(manner: str, **more: Any) -> Any:
    """Build a tokenizer. `bert`: [CLS] a [SEP] b [SEP]; `gpt2`: words, `</s>` ends, no padding; `t5`: words,
    `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if manner == "bert":
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        more = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **more}
        names = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    else:
        names = {"eos": "</s>"}
    if manner == "t5":
        ended = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 6)])
        backend.post_processor = ended
        names["pad"] = "[PAD]"
    tokens = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **tokens, **more)


def saved(folder: Path, manner: str) -> Path:
    """Save the tokenizer and return its folder."""
    tokenizer(manner).save_pretrained(str(folder))
    return folder
