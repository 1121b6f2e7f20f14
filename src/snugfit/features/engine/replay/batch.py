"""Padding and masks of batches for recorded CUDA graphs: few lengths, and masks that depend on shapes
alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.job.batch import FILL
from snugfit.job.batch_layout import map_leaves
from snugfit.job.limits import input_limit

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

FILLED_UP = "attention_mask"
"""Name of the attention mask in a batch. Only a batch with a mask can be padded without changing the result.
"""


def layout_of(batch: Mapping[str, Any]) -> Hashable:
    """Return the key of a batch's layout: names, shapes and dtypes of tensors, and other values. Batches of
    one key share CUDA graphs.
    """
    import torch

    leaves: list[Hashable] = []

    def note(name: str, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        # Values other than tensors are compared as text, because some cannot be hashed.
        leaves.append((name, tuple(value.shape), value.dtype) if is_tensor else (name, repr(value)))

    map_leaves(batch, note)
    return tuple(leaves)


def longest_sequence(job: Job) -> int | None:
    """Return the longest sequence that the job's model accepts, in tokens; None if it is unlimited or
    unknown.
    """
    module = job.model.module
    config: Any = job.config_to_read() if module is None else getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    facts = config.to_dict()
    limit = input_limit(facts.get("text_config") or facts)
    return limit and limit[1]


def is_packed(pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a row of a micro-batch contains several sequences, whose beginnings
    `position_ids` mark.
    """
    return any("position_ids" in piece for piece in pieces)


def fill_up(
    pieces: Sequence[Mapping[str, Any]], multiple: int, most: int | None = None
) -> list[dict[str, Any]]:
    """Pad micro-batches (B, S) to one length S, the least sufficient multiple of `multiple`, so that CUDA
    graphs are recorded for few lengths. S exceeds `most` only if the longest batch does. Added tokens are
    outside of the attention and have no counted labels. Micro-batches without a mask are not changed.
    """
    # Padding leaves the result unchanged only if the batch has a mask.
    if not all(FILLED_UP in piece and "input_ids" in piece for piece in pieces):
        return [dict(piece) for piece in pieces]
    longest = max(piece["input_ids"].shape[1] for piece in pieces)
    length = -(-longest // multiple) * multiple
    # A batch is not padded beyond the model's positions, and a longer one is not cut.
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
        # Only tensors (B, S) with this sequence length have one value per token.
        if torch.is_tensor(value) and value.dim() == 2 and value.shape[1] == before
        else value
        for name, value in piece.items()
    }


_MASKS = "transformers.masking_utils"


@contextlib.contextmanager
def masks_by_shape(*, packed: bool) -> Iterator[None]:
    """Context in which transformers decides by shapes alone if attention needs a mask, as without a padding
    mask.

    While a graph is recorded transformers (5.17) would always make a mask, which the fastest attention does
    not take. It would also read the values of a padding mask. Unless the batch is `packed`, the model's own
    positions begin once in a row; transformers would read these too.
    """
    if _MASKS not in sys.modules:  # no transformers model was loaded
        yield
        return
    import transformers.cache_utils as caches

    masks = sys.modules[_MASKS]
    changes: dict[str, Any] = {"is_tracing": _has_values}
    if not packed:
        changes["find_packed_sequence_indices"] = _not_packed
    layer = caches.DynamicSlidingWindowLayer
    start = layer.lazy_initialization

    def start_on_device(self: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        _start_on_device(start, self, keys, values)

    with patch.multiple(masks, **changes), patch.object(layer, "lazy_initialization", start_on_device):
        yield


def _start_on_device(
    start: Callable[..., None], layer: Any, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Start a cache layer with a sliding window, whose size is written on the device.

    transformers copies it from the host, which a recording permits only from pinned memory.
    """
    import torch

    layer._sliding_window_tensor = torch.full((), layer.sliding_window, dtype=torch.long, device=keys.device)
    start(layer, keys, values)


def _has_values(tensor: Any = None) -> bool:
    return tensor is not None


def _not_packed(position_ids: Any) -> None:
    """Return None (no packed sequences), in place of transformers' check that reads `position_ids` from the
    device.
    """
