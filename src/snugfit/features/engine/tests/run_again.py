"""CUDA graphs without a GPU: recording stores the work, and a replay runs it again.

So the code around CUDA graphs can be tested. Tests cover the moments of recording, reads of the device's
buffers, and the equality of replayed and eager runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from snugfit.features.engine.replay.graphs import REHEARSED, CudaGraphs, Graphs, NotRecorded


class RunAgain(Graphs):
    """Replaces CUDA graphs: a replay runs the recorded function again. The recording with number `refused`,
    from 1, fails.
    """

    def __init__(self, refused: int = 0) -> None:
        self.recorded = self.played = 0
        self._refused = refused

    def own_memory(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        self.recorded += 1
        if self.recorded == self._refused:
            raise NotRecorded("it waits")

        def play() -> None:
            self.played += 1
            work()

        return play

    refill = CudaGraphs.refill


@contextlib.contextmanager
def captured_on_cpu(refused: int = 0) -> Iterator[list[RunAgain]]:
    """Record steps on any device within this context; yield the list of each loop's graphs."""
    made: list[RunAgain] = []

    def make() -> RunAgain:
        made.append(RunAgain(refused))
        return made[-1]

    token = REHEARSED.set(make)
    try:
        yield made
    finally:
        REHEARSED.reset(token)


def batch_of(length: int, samples: int = 2, **more: Any) -> Mapping[str, torch.Tensor]:
    """Return a host batch of so many samples of this length, with a mask."""
    ids = torch.arange(samples * length).reshape(samples, length) % 90
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
