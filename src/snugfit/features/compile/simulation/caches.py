"""Compiled layers that fill a key-value cache, on tensors without data and up to torch's recompile limit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

BEYOND_LIMIT = (
    "torch compiles {limit} layers and runs the others uncompiled, because each layer that fills a cache "
    "needs its own program. Set model.config.use_cache = False, which compiles one program for all layers. "
    "Or raise torch._dynamo.config.recompile_limit above the number of layers."
)


@contextlib.contextmanager
def layers_with_cache(limit: int) -> Iterator[None]:
    """Context in which Dynamo compiles at most `limit` programs for one function, and raises
    `FailOnRecompileLimitHit` for a further one.

    A cache layer of transformers creates its empty tensors by `torch.tensor([])`. On the device `meta`, that
    is no fake tensor within a trace, and Dynamo stops with an error. Here `new_empty` creates them. Either
    tensor has no elements, so the programs are equal.
    """
    import torch._dynamo
    from transformers.cache_utils import DynamicLayer

    def lazy_initialization(self: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True

    # The prediction has its own sentence on the limit.
    convert_frame = logging.getLogger("torch._dynamo.convert_frame")
    with (
        patch.object(DynamicLayer, "lazy_initialization", lazy_initialization),
        patch.object(convert_frame, "disabled", True),
        torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True),
    ):
        yield
