"""What the processes of a run tell each other in each step, on the host.

    before the forward pass    how many items count in each one's micro-batches. A micro-batch's loss is
                               scaled by its share of all of them, times the parts that processes cut the
                               batch into: DDP and FSDP2 average gradients over these, so the average is the
                               gradient of the mean over the global batch, however the samples are padded
    after the forward pass     each one's part of the loss, tokens, and what it has heard from outside

The second is made while the device is at the backward pass. A run of one process tells nobody.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from snugfit.job.batch import tokens_of
from snugfit.training.ranks import Ranks
from snugfit.training.stops import Stops


@final
class StepExchange:
    """The exchanges of one run's steps."""

    def __init__(self, ranks: Ranks, stops: Stops) -> None:
        self.ranks, self._stops = ranks, stops
        self.tokens = 0
        """Tokens of the last step, in all processes, that are not padding."""
        self.own_seconds = 0.0
        """What this process took of the last step by itself: up to its loss, without the exchanges."""
        self._began = self._forwarded = 0.0
        self._items: float = 0
        self._own_tokens = 0

    def weights(self, pieces: Sequence[Mapping[str, Any]], items: Sequence[float]) -> list[float | None]:
        """By what the loss of each host micro-batch is multiplied, in which so many items count."""
        if not self.ranks.are_many:
            self._items = sum(items)
            return [None] if len(items) == 1 else [share / (self._items or 1) for share in items]
        self._own_tokens = sum(tokens_of(piece) for piece, share in zip(pieces, items) if share)
        self._items = round(self.ranks.sum_parts([sum(items)])[0])
        self._began, self._forwarded = time.perf_counter(), 0.0
        return [self.ranks.data_ranks * share / (self._items or 1) for share in items]

    def forward_ends(self) -> None:
        """This process has computed a micro-batch's loss, where a backward pass that exchanges gradients is
        over when its call returns: on the CPU."""
        self._forwarded = time.perf_counter()

    def loss(self, part: float) -> float:
        """The mean over the global batch, of what this process's weighted micro-batches came to."""
        if not self.ranks.are_many:
            return part
        self.own_seconds = (self._forwarded or time.perf_counter()) - self._began
        counts = self.ranks.counts
        own = [counts and counts * part / self.ranks.data_ranks, counts * self._own_tokens]
        total, tokens, *flags = self.ranks.sum([*own, *self._stops.flags])
        self.tokens = round(tokens)
        self._stops.hear(flags)
        return total if self._items else math.nan
