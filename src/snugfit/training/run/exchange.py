"""The numbers that the processes of a run exchange in each step, on the host.

- Before the forward pass: the number of counted items in each process's micro-batches. A micro-batch's loss
  is multiplied by its share of all items and by the number of parts of the batch. DDP and FSDP2 average
  gradients over these parts. The average is therefore the gradient of the mean over the global batch, for any
  padding.
- After the forward pass: each process's part of the loss, its tokens, and its signals.

The second exchange takes place during the device's backward pass. A run of one process exchanges nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from snugfit.job.batch import tokens_of
from snugfit.training.interrupt import StopSignals
from snugfit.training.ranks import Ranks


@final
class StepExchange:
    """The exchanges between processes in each step of one run."""

    def __init__(self, ranks: Ranks, stops: StopSignals) -> None:
        self.ranks, self._stops = ranks, stops
        self.tokens = 0
        """Number of tokens of the last step in all processes, without padding."""
        self.own_seconds = 0.0
        """Seconds that this process computed in the last step until its loss was known, without exchanges
        with others."""
        self._began = self._forwarded = 0.0
        self._items: float = 0
        self._own_tokens = 0

    def weights(self, pieces: Sequence[Mapping[str, Any]], items: Sequence[float]) -> list[float | None]:
        """Return the weight of each host micro-batch's loss, given their numbers of labels (or samples) that
        count.
        """
        if not self.ranks.are_many:
            self._items = sum(items)
            return [None] if len(items) == 1 else [share / (self._items or 1) for share in items]
        self._own_tokens = sum(tokens_of(piece) for piece, share in zip(pieces, items) if share)
        self._items = round(self.ranks.sum_parts([sum(items)])[0])
        self._began, self._forwarded = time.perf_counter(), 0.0
        return [self.ranks.data_ranks * share / (self._items or 1) for share in items]

    def forward_ends(self) -> None:
        """Record the time at which a micro-batch's forward pass ended, on the CPU.

        On a CPU, a backward pass that exchanges gradients is over when its call returns.
        """
        self._forwarded = time.perf_counter()

    def loss(self, part: float) -> float:
        """Return the mean loss over the global batch, given the sum of this process's weighted losses."""
        if not self.ranks.are_many:
            return part
        self.own_seconds = (self._forwarded or time.perf_counter()) - self._began
        counts = self.ranks.counts
        own = [counts and counts * part / self.ranks.data_ranks, counts * self._own_tokens]
        total, tokens, *flags = self.ranks.sum([*own, *self._stops.flags])
        self.tokens = round(tokens)
        self._stops.set_signals(flags)
        return total if self._items else math.nan
