"""AdamW in 32 bits over weights and moments that are kept in fewer: a piece of them at a time.

Weights are gathered into a buffer of `AT_ONCE` numbers at most, small ones together, large ones a few rows at
a time, updated there by torch's fused AdamW, and put back. So there are few kernels, and their temporaries
have a fixed size. How moments are kept, and how what comes back is rounded, is a subclass's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

AT_ONCE = 1 << 23
"""Numbers that are updated together (chosen): a kernel over them takes longer than its launch on a GPU of
today, and all temporaries take 160 to 290 MiB."""

STEP = "step"
"""The key of a state under which the steps of a weight are counted."""


class WeightRows(NamedTuple):
    """Some rows of a weight, or all, each with what belongs to them."""

    weight: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]


class WeightKind(NamedTuple):
    """Equal for weights that may be updated together."""

    step: int
    dtype: torch.dtype
    names: tuple[str, ...]


class OwnAdamW(torch.optim.Optimizer):
    """AdamW with an update of our own, and torch's numbers."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Its numbers are torch's defaults."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class AdamWInPieces(OwnAdamW, ABC):
    """AdamW that widens a piece of its weights and moments, updates it, and narrows it again."""

    numbers_in_a_block = 1
    """Rows are cut where a multiple of so many numbers ends."""

    @abstractmethod
    def new_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both moments of a weight before its first step."""

    @abstractmethod
    def widen(self, piece: Sequence[WeightRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments of a piece, each in 32 bits one behind the other."""

    @abstractmethod
    def narrow(self, piece: Sequence[WeightRows], first: torch.Tensor, second: torch.Tensor) -> None:
        """Keeps these moments in the states of this piece."""

    def write(self, weights: list[torch.Tensor], exact: torch.Tensor) -> None:
        """Gives the weights their new values."""
        scatter(exact, weights)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all weights that have a gradient."""
        if closure is not None:
            raise ValueError("It takes no closure: it computes no loss")
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None and weight.numel()]
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state.update({STEP: 0, **self.new_state(weight)})
                state[STEP] += 1
            for kind in dict.fromkeys(self._kind(weight) for weight in weights):
                for piece in self._pieces(weight for weight in weights if self._kind(weight) == kind):
                    self._update(piece, group, kind.step)

    def _kind(self, weight: torch.Tensor) -> WeightKind:
        state = self.state[weight]
        return WeightKind(state[STEP], weight.dtype, tuple(state))

    def _pieces(self, weights: Iterable[torch.Tensor]) -> Iterator[list[WeightRows]]:
        """Rows of weights, as many together as are updated at once."""
        piece: list[WeightRows] = []
        held = 0
        for rows in (part for weight in weights for part in self._split(weight)):
            held += rows.weight.numel()
            if piece and held > AT_ONCE:
                yield piece
                piece, held = [], rows.weight.numel()
            piece.append(rows)
        if piece:
            yield piece

    def _split(self, weight: torch.Tensor) -> Iterator[WeightRows]:
        """A weight cut into as many rows as are updated at once."""
        parts = torch.atleast_1d(weight)
        width = math.prod(parts.shape[1:])
        least = self.numbers_in_a_block // math.gcd(self.numbers_in_a_block, width)
        at_once = max(1, AT_ONCE // width // least) * least
        whole = {name: torch.atleast_1d(value) for name, value in self.state[weight].items() if name != STEP}
        gradient = torch.atleast_1d(weight.grad)
        for start in range(0, len(parts), at_once):
            end = min(start + at_once, len(parts))
            state = {
                name: value[start * len(value) // len(parts) : end * len(value) // len(parts)]
                for name, value in whole.items()
            }
            yield WeightRows(parts[start:end], gradient[start:end], state)

    def _update(self, piece: Sequence[WeightRows], group: dict[str, Any], step: int) -> None:
        """torch's fused AdamW over a piece."""
        weights = [rows.weight for rows in piece]
        exact, slope = gather(weights), gather([rows.gradient for rows in piece])
        first, second = self.widen(piece)
        before = torch.full((), step - 1.0, dtype=torch.float32, device=exact.device)
        adamw(
            [exact], [slope], [first], [second], [], [before], fused=True, amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        del slope
        self.narrow(piece, first, second)
        self.write(weights, exact)


def gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """These tensors in 32 bits, one behind the other."""
    flat = torch.empty(sum(part.numel() for part in parts), dtype=torch.float32, device=parts[0].device)
    torch._foreach_copy_(_views(flat, parts), list(parts))
    return flat


def scatter(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Gives these tensors the numbers that lie one behind the other."""
    torch._foreach_copy_(list(parts), _views(flat, parts))


def _views(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
