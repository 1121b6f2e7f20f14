"""Graphs without a GPU: what is recorded is the work, which runs again when it is played.

So everything around CUDA graphs can be tested: which work is recorded when, that it reads what is on the
device, and that a run is the same whether its steps are played or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from snugfit.step.capture.graphs import CudaGraphs, Graphs, NotRecorded
from snugfit.step.capture.handler import REHEARSED


class RunAgain(Graphs):
    """Plays by running the work again; refuses the `refused`-th that it is to record, from 1."""

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
    """Within it, steps that are to be recorded are, on any device; gives the graphs of each loop."""
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
    """A host batch of so many samples of this length, with a mask."""
    ids = torch.arange(samples * length).reshape(samples, length) % 90
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
