"""Tokenization of conversations with the tokenizer's chat template.

{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

Only the assistant's words should enter the loss. A template with `{% generation %}` marks their tokens.
Without these marks all tokens enter the loss. Chats in the older ShareGPT form (`from`, `value`) are accepted
too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from snugfit.data.rows import as_text
from snugfit.errors import UsageError, one_line

Chat = list[dict[str, Any]]


class ChatTokens(NamedTuple):
    """The tokens of one conversation, tokenized with a chat template."""

    ids: list[int]
    assistant: list[bool] | None
    """One flag per token, True for tokens that the assistant wrote. None if the chat template does not mark
    them."""


SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Names of speakers in ShareGPT datasets, mapped to the roles of chat templates."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

ALL_WORDS = (
    "The chat template does not mark the assistant's words ({% generation %}), so the model learns all words "
    "of the conversations, also the user's."
)
ONLY_THE_ASSISTANT = "The model learns only the assistant's words, which the chat template marks."
"""Note for the user on conversations in which only the assistant's tokens enter the loss. All other
conversations get `ALL_WORDS`."""

NO_TOOLS = "The column 'tools' is ignored: conversations are written without tools."


def conversation_of(value: Any, location: str) -> Chat:
    """Return the messages of the conversation in a row's value. Raises `UsageError` for a value that is no
    list of messages.
    """
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        shown = "nothing (null)" if value is None else f"{value!r:.60}"
        raise UsageError(
            f'{location}: a conversation must be a list of messages, {{"role": "user", "content": '
            f'"..."}}, not {shown}.'
        )
    return [_message(item, f"{location}, message {number}") for number, item in enumerate(value, start=1)]


def _message(message: Mapping[str, Any], location: str) -> dict[str, Any]:
    if "from" in message and "value" in message and "role" not in message:
        if message["from"] not in SHAREGPT:
            raise UsageError(
                f"{location}: from {message['from']!r:.40}; it must be one of {', '.join(SHAREGPT)}."
            )
        message = {"role": SHAREGPT[message["from"]], "content": message["value"]}
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise UsageError(
            f"{location}: it has {', '.join(map(repr, message))}; a message needs a role and a content. "
            "Add them, or remove the row."
        )
    content = message["content"]
    # An assistant's message that only calls tools has no content.
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {
        **message,
        "content": content if isinstance(content, list) else as_text(content, location, "content"),
    }


def marks_the_assistant(tokenizer: Any) -> bool:
    """Return True if the chat template marks the assistant's words.

    Raises `UsageError` if the tokenizer has no chat template.
    """
    try:
        template = tokenizer.get_chat_template()
    except (AttributeError, ValueError):
        raise UsageError(
            "The rows are conversations, but this tokenizer has no chat template. Use the tokenizer of a "
            "chat model, put a chat_template.jinja into its folder, or use rows of prompt and completion."
        ) from None
    # transformers marks tokens by the positions of characters, which only fast tokenizers have.
    return bool(_MARKED.search(template)) and bool(getattr(tokenizer, "is_fast", False))


def chat_tokens(tokenizer: Any, chats: Sequence[Chat], locations: Sequence[str]) -> list[ChatTokens]:
    """Return the tokens of each conversation; `locations` has the file and line of each one, for error
    messages.
    """
    marked = marks_the_assistant(tokenizer)
    try:
        encoding = _apply(tokenizer, list(chats), marked)
    except Exception as error:  # the error names no conversation, so each is tried alone
        for chat, of in zip(chats, locations, strict=True):
            _apply_alone(tokenizer, chat, of, marked)
        raise UsageError(
            f"The chat template fails ({one_line(error)}). Correct it in the tokenizer's folder "
            "(chat_template.jinja)."
        ) from error
    masks = encoding.get("assistant_masks") or [None] * len(chats)
    return [
        ChatTokens(ids, mask and list(map(bool, mask)))
        for ids, mask in zip(encoding["input_ids"], masks, strict=True)
    ]


def _apply(tokenizer: Any, chats: list[Chat], marked: bool) -> Any:
    return tokenizer.apply_chat_template(
        chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked, padding=False
    )


def _apply_alone(tokenizer: Any, chat: Chat, location: str, marked: bool) -> None:
    try:
        _apply(tokenizer, [chat], marked)
    except Exception as error:
        raise UsageError(
            f"{location}: the chat template refuses this conversation ({one_line(error)}). Correct this "
            "row, or remove it."
        ) from error
