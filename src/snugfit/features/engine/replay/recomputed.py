"""Recomputation of layers within a recorded backward pass.

`torch.utils.checkpoint` saves the states of the random generators before a layer, and restores them before it
recomputes the layer. During a recording, the state of a GPU's generator cannot be read, and a CUDA graph
cannot reset it. A layer without random numbers needs neither. The same holds for dropout with its own seed
(`techniques/seeded_dropout.py`), and for attention whose results are kept (`step/selective.py`). During a
recording, the GPU's generator is therefore left unchanged. A recomputation that draws from it cannot be
recorded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from snugfit.features.engine.replay.graphs import NotRecorded

ATTENTION = {"scaled_dot_product_attention": 4, "_flash_attention_forward": 7}
"""torch's attention functions, each with the position of its dropout argument. The second one is for
sequences of several lengths (`padding_free`)."""


@contextlib.contextmanager
def generators_left_alone(*, attention_is_kept: bool = False) -> Iterator[None]:
    """Context in which torch's activation checkpointing neither saves nor restores the GPU's random state.

    Raises `NotRecorded` for a layer that draws random numbers when it is recomputed; with
    `attention_is_kept`, attention is not recomputed and draws none.
    """
    fork = torch.random.fork_rng

    @contextlib.contextmanager
    def recompute(*arguments: Any, **keywords: Any) -> Iterator[None]:
        with fork(*arguments, **keywords), NoRandomDraws(attention_is_kept):
            yield

    states = patch("torch.utils.checkpoint.get_device_states", _no_states)
    with states, patch("torch.random.fork_rng", recompute):
        yield


def _no_states(*arguments: Any) -> tuple[list[int], list[torch.Tensor]]:
    return [], []


class NoRandomDraws(TorchFunctionMode):
    """A `TorchFunctionMode` that raises `NotRecorded` for torch functions that draw random numbers on a
    device.

    It is no `TorchDispatchMode`, because autograd would then not add gradients in place, which takes memory.
    """

    def __init__(self, attention_is_kept: bool = False) -> None:
        super().__init__()
        self._kept = ATTENTION if attention_is_kept else ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function, or raise `NotRecorded` if it draws random numbers."""
        # The result of attention that is kept is not recomputed, so it draws no random numbers.
        if draws(func, args, kwargs or {}) and func.__name__ not in self._kept:
            raise NotRecorded(f"{func.__name__} draws random numbers in a layer that is recomputed")
        return func(*args, **kwargs or {})


def draws(function: Any, arguments: Any, keywords: Any) -> bool:
    """Return True if this call of a torch function draws random numbers."""
    name = getattr(function, "__name__", "")
    if name in ATTENTION:
        at = ATTENTION[name]
        return bool(keywords.get("dropout_p", arguments[at] if len(arguments) > at else 0.0))
    if "dropout" in name:
        share = keywords.get("p", arguments[1] if len(arguments) > 1 else 0.5)
        # torch's functions use two names for this argument.
        trains = keywords.get("training", keywords.get("train", arguments[2] if len(arguments) > 2 else True))
        return bool(share) and bool(trains)
    # torch tags operators that draw random numbers. Dropout and attention draw only for some arguments.
    return torch.Tag.nondeterministic_seeded in _tags(name)


@functools.cache
def _tags(name: str) -> frozenset[torch.Tag]:
    """Return the tags of the torch operators with this name; empty if there is none."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return frozenset(tag for overload in overloads for tag in getattr(packet, overload).tags)
