"""AdamW for weights of bfloat16, whose new values are rounded by chance, so that none is lost on average.

A bfloat16 has 8 significant bits: what an update adds to a weight is lost where it is less than about 1/512
of it, because the sum is rounded to the weight that was there. Rounded up or down by chance, with the odds of
how near either neighbour is, the sum is right on average, and no copy of the weights in 32 bits is needed
(Zamirai et al., arXiv 2010.06192). Both moments have 16 bits too and are rounded alike: else the second one,
which moves by a thousandth of itself, would stand still.

The update itself is torch's fused AdamW in 32 bits. Weights are gathered into a buffer of `AT_ONCE` numbers
at most, small ones together, large ones a few rows at a time; so there are few kernels, and their temporaries
have a fixed size. Weights in other dtypes are updated alike and rounded to the nearest.

What chance gives is drawn from the device's own generator, as dropout's is: a checkpoint keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

AT_ONCE = 1 << 23
"""Numbers that are updated together (chosen): a kernel over them takes longer than its launch on a GPU of
today, and all temporaries take 160 MiB."""

LOW_BITS = 1 << 16
"""What the lower half of a number in 32 bits, which bfloat16 has no room for, counts to."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class WeightRows(NamedTuple):
    """Some rows of a weight, or all, each with what belongs to them."""

    weight: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW that rounds new weights and moments of bfloat16 up or down by chance."""

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

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all weights that have a gradient."""
        if closure is not None:
            raise ValueError("It takes no closure: it computes no loss")
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for step in self._count(weights):
                alike = [weight for weight in weights if self.state[weight]["step"] == step]
                for dtype in dict.fromkeys(weight.dtype for weight in alike):
                    for piece in _pieces(self._rows(weight) for weight in alike if weight.dtype is dtype):
                        _update(piece, group, step)

    def _count(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """Counts this step for each of these weights; gives the numbers of steps that there are now."""
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = 0
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["step"] += 1
        return sorted({self.state[weight]["step"] for weight in weights})

    def _rows(self, weight: torch.Tensor) -> WeightRows:
        state = self.state[weight]
        parts = (weight, weight.grad, *(state[moment] for moment in MOMENTS))
        return WeightRows(*(torch.atleast_1d(part) for part in parts))


def _pieces(weights: Iterator[WeightRows]) -> Iterator[list[WeightRows]]:
    """Rows of weights, as many together as are updated at once."""
    piece: list[WeightRows] = []
    held = 0
    for rows in (part for weight in weights for part in _split(weight)):
        held += rows.weight.numel()
        if piece and held > AT_ONCE:
            yield piece
            piece, held = [], rows.weight.numel()
        piece.append(rows)
    if piece:
        yield piece


def _split(rows: WeightRows) -> Iterator[WeightRows]:
    """A weight cut into as many rows as are updated at once; one row at least."""
    if rows.weight.numel() == 0:
        return
    at_once = max(1, AT_ONCE // math.prod(rows.weight.shape[1:]))
    for part in zip(*(one.split(at_once) for one in rows), strict=True):
        yield WeightRows(*part)


def _update(piece: Sequence[WeightRows], group: dict[str, Any], step: int) -> None:
    """Updates these rows in 32 bits, and rounds what is kept in bfloat16."""
    weights, gradients, first, second = (list(parts) for parts in zip(*piece, strict=True))
    exact, slope, mean, square = (_gather(parts) for parts in (weights, gradients, first, second))
    before = torch.full((), step - 1.0, dtype=torch.float32, device=exact.device)
    adamw(
        [exact], [slope], [mean], [square], [], [before], fused=True, amsgrad=False, maximize=False,
        beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
    for wide, parts in ((mean, first), (square, second), (exact, weights)):
        rounded = wide
        if parts[0].dtype is torch.bfloat16:
            rounded = round_by_chance(wide)
            if wide is exact:
                rounded.add_(wide, alpha=0)  # not a number, which may carry into a sign, stays what it is
        torch._foreach_copy_(parts, _views(rounded, parts))


def _gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """These tensors in 32 bits, one behind the other."""
    flat = torch.empty(sum(part.numel() for part in parts), dtype=torch.float32, device=parts[0].device)
    torch._foreach_copy_(_views(flat, parts), list(parts))
    return flat


def _views(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def round_by_chance(exact: torch.Tensor) -> torch.Tensor:
    """Numbers in 32 bits that bfloat16 has, next to these: the one or the other neighbour, by chance.

    A number below 2^16 is added to the bits, of which the lower half is then cleared: it carries as often as
    that half says.
    """
    chance = torch.randint(LOW_BITS, exact.shape, dtype=torch.int32, device=exact.device)
    return chance.add_(exact.view(torch.int32)).bitwise_and_(-LOW_BITS).view(torch.float32)
