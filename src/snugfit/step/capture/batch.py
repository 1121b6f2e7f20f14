"""Batches whose place on the device stays, as what is recorded needs them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.job.batch import FILL
from snugfit.job.batch_layout import map_leaves
from snugfit.job.limits import input_limit

if TYPE_CHECKING:
    from snugfit.job.job import Job

FILLED_UP = "attention_mask"
"""The input that says which tokens count. Only a batch with one can be made longer and mean the same."""


def layout_of(batch: Mapping[str, Any]) -> Hashable:
    """What two batches have in common that the same recorded work can be played for: names, shapes and
    dtypes of their tensors, and all that is no tensor."""
    import torch

    leaves: list[Hashable] = []

    def note(name: str, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        leaves.append((name, tuple(value.shape), value.dtype) if is_tensor else (name, repr(value)))

    map_leaves(batch, note)
    return tuple(leaves)


def longest_sequence(job: Job) -> int | None:
    """How many positions the job's model has, in tokens; None where they do not end, or nobody knows."""
    module = job.model.module
    config: Any = job.config_to_read() if module is None else getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    facts = config.to_dict()
    limit = input_limit(facts.get("text_config") or facts)
    return limit and limit[1]


def is_packed(pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Whether micro-batches say where each sequence of a row begins."""
    return any("position_ids" in piece for piece in pieces)


def fill_up(
    pieces: Sequence[Mapping[str, Any]], multiple: int, most: int | None = None
) -> list[dict[str, Any]]:
    """Micro-batches (B, S) of one length S, the least multiple of this that is enough for the longest, and no
    more than `most` if that is, so that few lengths are left. What is added is no part of the attention and
    has no labels that count. Of micro-batches without a mask the lengths stay."""
    if not all(FILLED_UP in piece and "input_ids" in piece for piece in pieces):
        return [dict(piece) for piece in pieces]
    longest = max(piece["input_ids"].shape[1] for piece in pieces)
    length = -(-longest // multiple) * multiple
    if most is not None:
        length = max(longest, min(length, most))
    return [_lengthen(piece, length) for piece in pieces]


def _lengthen(piece: Mapping[str, Any], length: int) -> dict[str, Any]:
    import torch

    before = piece["input_ids"].shape[1]
    if before == length:
        return dict(piece)
    return {
        name: torch.nn.functional.pad(value, (0, length - before), value=FILL.get(name, 0))
        if torch.is_tensor(value) and value.dim() == 2 and value.shape[1] == before
        else value
        for name, value in piece.items()
    }
