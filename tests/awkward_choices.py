"""Awkward modules whose control flow depends on values of their weights or on random numbers."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from awkward_modules import WIDTH, Numbers, Words, awkward, numbers, words

EXPERTS = 4


@awkward(numbers, doubt=r"mean\(\) > 0")
class OpensAGate(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        if h.mean() > 0:
            h = self.block(torch.cat((h, h, h), 1))
        return h.square().mean()


@awkward(numbers, doubt=r"\.item\(\)")
class GrowsByItsNorm(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        times = int(h.norm().item()) // 40
        return self.block(h.repeat(1, times + 1, 1)).square().mean()


class _Routed(Words):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))


@awkward(words, doubt=r"where|nonzero")
class RoutesByWhere(_Routed):
    """Runs each expert on the tokens that chose it, as in the first version of Mixtral."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids).flatten(0, 1)
        weight, chosen = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            out.index_add_(0, rows, expert(h[rows]) * weight[rows, None])
        return self.loss(self.block(out), labels)


@awkward(words, doubt=r"tolist")
class RoutesBySplit(_Routed):
    """Sorts tokens by expert and splits them by their counts, as JetMoE and DeepSeek do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids).flatten(0, 1)
        weight, chosen = self.router(h).softmax(-1).max(-1)
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
        parts = (h[order] * weight[order, None]).split(counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return self.loss(self.block(out), labels.flatten()[order])


@awkward(words)
class RoutesDensely(_Routed):
    """Runs every expert on every token, with weights of zero."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        weight = self.router(h).softmax(-1)
        kept = torch.zeros_like(weight).scatter(-1, weight.topk(2).indices, 1.0) * weight
        out = sum(expert(h) * kept[..., index, None] for index, expert in enumerate(self.experts))
        return self.loss(self.block(out), labels)


@awkward(words, doubt="no gradient")
class RoutesByCapacity(_Routed):
    """Switch: a fixed capacity for each expert, dispatched by a matrix product."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids).flatten(0, 1)
        gates = F.one_hot(self.router(h).argmax(-1), EXPERTS).float()
        place = (gates.cumsum(0) * gates).long() - 1
        room = F.one_hot(place.clamp(0, 79).max(-1).values, 80).float()
        dispatch = gates[:, :, None] * room[:, None, :]
        given = torch.einsum("tec,td->ecd", dispatch, h)
        out = torch.stack([expert(given[index]) for index, expert in enumerate(self.experts)])
        return self.loss(self.block(torch.einsum("tec,ecd->td", dispatch, out)), labels)


@awkward(words, doubt=r"all\(\)|confidence")
class LeavesEarly(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        for _ in range(4):
            h = self.block(h)
            confidence = self.head(h).softmax(-1).amax(-1)
            if (confidence > 0.05).all():
                break
        return self.loss(h, labels)


@awkward(numbers, refused=r"loop that depends on weights.*`while p\.min\(\) < 1:`.*1,000 times")
class ComputesUntilSure(Numbers):
    """Adaptive computation time: halts at a threshold that the weights decide."""

    def __init__(self) -> None:
        super().__init__()
        self.halt = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, p = x, torch.zeros(x.shape[:2], device=x.device)
        while p.min() < 1:
            h = self.block(h)
            p = p + self.halt(h).sigmoid().squeeze(-1)
        return h.square().mean()


@awkward(numbers)
class CountsUpAConstant(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h, p = x, torch.zeros((), device=x.device)
        while p < 1:
            h, p = self.block(h), p + 0.3
        return h.square().mean()


@awkward(numbers, doubt=r"condition.*mean\(-1\) > 0")
class KeepsPositiveRows(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x).flatten(0, 1)
        return self.block(h[h.mean(-1) > 0]).square().mean()


@awkward(numbers)
class DividesByItsMean(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        return (h / (abs(h.mean().item()) + 1)).square().mean()


@awkward(numbers)
class CopiesToTheHost(Numbers):
    """Copies results to the host, and no branch depends on them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        self.logged = f"{h.mean().item() * 2:.3f}", h.detach().mean().cpu()
        return (h / h.std().item()).square().mean()


@awkward(words)
class LogsItsLoss(Words):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(self.block(self.embed(ids)), labels)
        self.logged.append(loss.item())
        return loss


@awkward(numbers)
class RefusesInfinity(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        if not torch.isfinite(h).all() or torch.isnan(h).any():
            raise FloatingPointError("no number")
        if torch.isinf(h).any():
            h = h.clamp(-1e4, 1e4)
        return h.square().mean()


@awkward(numbers, doubt=r"random")
class DropsLayersByPython(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x if random.random() < 0.5 else self.block(x)
        return self.block(x).square().mean()


@awkward(numbers, doubt=r"rand")
class DropsLayersByTorch(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x if torch.rand([]) < 0.5 else self.block(x)
        return self.block(x).square().mean()


@awkward(numbers, doubt=r"rand")
class DropsLayersOnTheDevice(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            if torch.rand((), device=x.device) > 0.5:
                x = self.block(x)
        return self.block(x).square().mean()


@awkward(numbers)
class DropsPathsByRow(Numbers):
    """Stochastic depth as timm implements it: a mask, and no branch."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.9)
        return (x + self.block(x) * kept / 0.9).square().mean()


@awkward(words)
class MasksByChance(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.rand(ids.shape, device=ids.device) < 0.15
        return self.loss(self.block(self.embed(ids.masked_fill(hidden, 1))), labels)


@awkward(words)
class DrawsWords(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.block(self.embed(ids))
        drawn = torch.multinomial(self.head(h).softmax(-1).flatten(0, 1), 1).view_as(ids)
        return self.loss(self.block(self.embed(drawn)), labels)


@awkward(words)
class DrawsByGumbel(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        chosen = F.gumbel_softmax(self.head(self.block(self.embed(ids))), hard=True)
        return self.loss(self.block(chosen @ self.embed.weight), labels)


@awkward(words, doubt=r"unique")
class PoolsUniquePredictions(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.block(self.embed(ids))
        said = self.head(h).argmax(-1).unique()
        return self.loss(h, labels) + self.block(self.embed(said)).square().mean()
