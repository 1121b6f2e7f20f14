"""AdamW in slices of the weights: some at a time are copied, updated by torch's fused AdamW, and copied back.

So there are few kernels, and the temporaries have a fixed size. `AdamWInPieces` widens weights and moments of
fewer bits on their device; `host.AdamWOnHost` updates copies on the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim.adamw import adamw

from snugfit.step.wishes.own_adamw import STEP, OwnAdamW

Part = TypeVar("Part")

AT_ONCE = 1 << 23
"""Number of elements that are updated together (chosen). A kernel over them takes longer than its launch on
present GPUs, and all temporaries take 160 to 290 MiB.
"""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's first and second moment in torch's optimizer state."""


class WeightRows(NamedTuple):
    """Some rows of a weight, with the same rows of its gradient and optimizer state."""

    weight: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    step: int


class FusedAdamW(OwnAdamW, ABC):
    """Base class of AdamW variants that run torch's fused AdamW kernel on copies of some weights at
    a time.
    """

    @abstractmethod
    def update_weights(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update the weights of a group that have gradients, some elements at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one optimizer step on all weights that have a gradient."""
        refuse_closure(self, closure)
        for group in self.param_groups:
            # A weight without elements has no update.
            weights = [weight for weight in group["params"] if weight.grad is not None and weight.numel()]
            self.update_weights(weights, group)


def refuse_closure(optimizer: torch.optim.Optimizer, closure: Any) -> None:
    """Raise `ValueError` if a closure is given, which this optimizer does not support."""
    if closure is not None:
        raise ValueError(f"{type(optimizer).__name__} takes no closure: it computes no loss")


def fused_adamw(tensors: Iterable[list[torch.Tensor]], steps: list[torch.Tensor], group: Any) -> None:
    """Update lists of weights by torch's fused AdamW, from gradients and both moments; `steps` has the number
    of finished steps.
    """
    weights, gradients, firsts, seconds = tensors
    # The empty list is for `amsgrad`, which is off.
    adamw(
        weights, gradients, firsts, seconds, [], steps, fused=True, amsgrad=False, maximize=False,
        beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip


def pieces(
    parts: Iterable[Part], kind: Callable[[Part], Any], size: Callable[[Part], int], most: int
) -> Iterator[list[Part]]:
    """Yield lists of adjacent items for which `kind` is equal, with a total size of at most `most`. A larger
    item is yielded alone.
    """
    for _, group in groupby(parts, kind):
        piece: list[Part] = []
        total = 0
        for part in group:
            # An item above the limit forms a slice of its own.
            if piece and total + size(part) > most:
                yield piece
                piece, total = [], 0
            piece.append(part)
            total += size(part)
        yield piece


class AdamWInPieces(FusedAdamW):
    """AdamW computed in 32 bits, for weights and moments of fewer bits, some elements at a time."""

    numbers_in_a_block = 1
    """The length of every slice of a weight is a multiple of this number of elements."""

    @abstractmethod
    def new_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both moments of a weight before its first step."""

    @abstractmethod
    def widen(self, piece: Sequence[WeightRows], name: str) -> torch.Tensor:
        """Return the stored moment of this name for these rows as one fp32 tensor."""

    @abstractmethod
    def narrow(self, piece: Sequence[WeightRows], moments: tuple[torch.Tensor, ...]) -> None:
        """Store both fp32 moments of these rows, in their smaller format, in the weights' states."""

    def write(self, weights: list[torch.Tensor], exact: torch.Tensor) -> None:
        """Store the new fp32 values in the weights, in the weights' dtype."""
        scatter(exact, weights)

    def update_weights(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Increment the step counts of these weights and update them, grouped by step count and dtype."""
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for weight in weights:
            state = self.state[weight]
            if not state:
                state.update({STEP: 0, **self.new_state(weight)})
            state[STEP] += 1
            # torch's kernel takes a single step count and a single dtype for all weights.
            by_kind.setdefault((state[STEP], weight.dtype, tuple(state)), []).append(weight)
        for same_kind in by_kind.values():
            parts = (rows for weight in same_kind for rows in self._split(weight))
            for piece in pieces(parts, lambda _: None, lambda rows: rows.weight.numel(), AT_ONCE):
                self._update(piece, group)

    def _split(self, weight: torch.Tensor) -> Iterator[WeightRows]:
        """Yield a weight's rows in slices of at most `AT_ONCE` elements."""
        parts = torch.atleast_1d(weight)
        width = math.prod(parts.shape[1:])
        # A slice must consist of whole blocks, so its number of rows is a multiple of this number.
        least = self.numbers_in_a_block // math.gcd(self.numbers_in_a_block, width)
        at_once = max(1, AT_ONCE // width // least) * least
        state = self.state[weight]
        whole = {name: torch.atleast_1d(value) for name, value in state.items() if name != STEP}
        gradient = torch.atleast_1d(weight.grad)
        for start in range(0, len(parts), at_once):
            end = min(start + at_once, len(parts))
            cut = {
                # A packed state has fewer elements than its weight, so it is sliced in proportion.
                name: value[start * len(value) // len(parts) : end * len(value) // len(parts)]
                for name, value in whole.items()
            }
            yield WeightRows(parts[start:end], gradient[start:end], cut, state[STEP])

    def _update(self, piece: Sequence[WeightRows], group: dict[str, Any]) -> None:
        """Update these rows by torch's fused AdamW on fp32 copies."""
        weights = [rows.weight for rows in piece]
        exact, slope = gather(weights), gather([rows.gradient for rows in piece])
        moments = tuple(self.widen(piece, name) for name in MOMENTS)
        # torch's kernel increments the step itself.
        before = torch.full((), piece[0].step - 1.0, dtype=torch.float32, device=exact.device)
        fused_adamw([[exact], [slope], *([moment] for moment in moments)], [before], group)
        # The gradient's copy is freed before the moments, whose temporaries are large.
        del slope
        self.narrow(piece, moments)
        self.write(weights, exact)


def gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors to one flat tensor in fp32."""
    flat = torch.empty(sum(part.numel() for part in parts), dtype=torch.float32, device=parts[0].device)
    # One launch copies and casts all parts.
    torch._foreach_copy_(_views(flat, parts), list(parts))
    return flat


def scatter(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy consecutive values of one flat tensor into several tensors, in order."""
    torch._foreach_copy_(list(parts), _views(flat, parts))


def _views(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    slices = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(slices, parts, strict=True)]
