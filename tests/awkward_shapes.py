"""Awkward modules with shapes that depend on their batch: lengths, masks, labels, segments, grids, edges."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from awkward_modules import (
    LENGTH,
    LENGTHS,
    ROWS,
    WIDTH,
    WORDS,
    Numbers,
    Words,
    awkward,
    masked,
    ragged,
    words,
)

TOTAL = sum(LENGTHS)


@awkward(masked)
class TrimsToTheLongestRow(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        longest = mask.sum(1).max().item()
        return self.loss(self.block(self.embed(ids[:, :longest])), labels[:, :longest])


@awkward(masked)
class TrimsBySlice(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        longest = mask.sum(1).max()
        return self.loss(self.block(self.embed(ids[:, :longest])), labels[:, :longest])


@awkward(masked)
class TrimsEmptyColumns(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        used = mask.bool().any(0)
        return self.loss(self.block(self.embed(ids[:, used])), labels[:, used])


@awkward(ragged)
class CountsPositions(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(lengths.max().item(), device=ids.device)
        inside = places[None] < lengths[:, None]
        h = self.block(self.embed(ids[:, : len(places)])) * inside[..., None]
        return self.loss(h, labels[:, : len(places)])


@awkward(ragged)
class MakesAsManyZeros(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        room = torch.zeros(len(ids), int(lengths.max()) + 4, WIDTH, device=ids.device)
        return self.loss(self.block(self.embed(ids)), labels) + self.block(room).square().mean()


@awkward(ragged)
class LoopsAsLongAsARow(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        h = self.embed(ids)
        for _ in range(int(lengths[0]) // 16):
            h = self.block(h)
        return self.loss(h, labels)


@awkward(ragged)
class HalvesWhileLong(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        h, rest = self.embed(ids), lengths.max()
        while rest > 4:
            h, rest = self.block(h), rest // 2
        return self.loss(h, labels)


@awkward(ragged)
class GoesRowByRow(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        losses = [
            self.loss(self.block(self.embed(row[:length])), label[:length])
            for row, label, length in zip(ids, labels, lengths.tolist(), strict=True)
        ]
        return torch.stack(losses).mean()


@awkward(ragged)
class SplitsPackedRows(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        rows = torch.split(self.embed(ids)[inside], lengths.tolist())
        return self.loss(torch.cat([self.block(row) for row in rows]), labels[inside])


@awkward(ragged)
class PadsRowsAgain(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        rows = [
            self.block(self.embed(row[:length])) for row, length in zip(ids, lengths.tolist(), strict=True)
        ]
        padded = rnn.pad_sequence(rows, batch_first=True)
        return self.loss(padded, labels[:, : padded.shape[1]])


@awkward(ragged)
class ReadsThroughNumpy(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.cpu().numpy().max())
        return self.loss(self.block(self.embed(ids[:, :longest])), labels[:, :longest])


@awkward(masked)
class PacksByNonzero(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        places = mask.flatten().nonzero().flatten()
        h = self.block(self.embed(ids).flatten(0, 1)[places])
        return self.loss(h, labels.flatten()[places])


@awkward(masked)
class PacksAndUnpacks(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        inside = mask.bool()
        h = self.embed(ids)
        whole = torch.zeros_like(h)
        whole[inside] = self.block(h[inside])
        return self.loss(whole, labels)


@awkward(masked)
class SelectsByMask(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        kept = torch.masked_select(ids, mask.bool())
        return self.loss(self.block(self.embed(kept)), labels[mask.bool()])


@awkward(masked)
class SelectsStates(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        kept = torch.masked_select(self.embed(ids), mask[..., None].bool()).view(-1, WIDTH)
        return self.loss(self.block(kept), labels[mask.bool()])


@awkward(masked)
class FillsAMask(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        chosen = torch.zeros(mask.shape, dtype=torch.bool, device=ids.device)
        for row in range(len(ids)):
            chosen[row, : int(mask[row].sum())] = True
        return self.loss(self.block(self.embed(ids)[chosen]), labels[chosen])


@awkward(masked)
class WritesByAMask(Words):
    """One row of trainable numbers, written at each padding position."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        h = self.block(self.embed(ids)).clone()
        h[mask == 0] = self.outer.bias
        return self.loss(h, labels)


@awkward(words)
class CallsByName(Words):
    """Calls modules by the text of an id, by a tensor made of one, and by the presence of an id."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = {f"block {ids[0, 0].item()}": self.block}[f"block {ids[0, 0]}"](self.embed(ids))
        width = torch.tensor([ids[0, 0].remainder(8) + 8, 7], device=ids.device).max()
        return self.loss(h, labels) if WORDS in ids else self.loss(h[:, :width], labels[:, :width])


@awkward(masked)
class DropsIgnoredLabels(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        counted = labels != -100
        return F.cross_entropy(self.head(self.block(self.embed(ids))[counted]), labels[counted])


@awkward(masked)
class FindsPlacesByWhere(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        rows, columns = torch.where(mask == 1)
        return self.loss(self.block(self.embed(ids)[rows, columns]), labels[rows, columns])


@awkward(masked)
class FindsPlacesByArgwhere(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        rows, columns = torch.argwhere(mask == 1).unbind(1)
        return self.loss(self.block(self.embed(ids)[rows, columns]), labels[rows, columns])


@awkward(masked)
class AttendsWithinPackedRows(Words):
    """Concatenated rows, as flash attention's varlen kernels take them; each row attends to itself alone."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        inside = mask.bool()
        ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).tolist()
        h = self.embed(ids)[inside][None, None]
        rows = [
            F.scaled_dot_product_attention(row, row, row)
            for row in (h[:, :, start:end] for start, end in itertools.pairwise(ends))
        ]
        return self.loss(self.block(torch.cat(rows, 2)), labels[inside])


@awkward(words)
class EmbedsEachWordOnce(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        seen, back = torch.unique(ids, return_inverse=True)
        return self.loss(self.block(self.embed(seen))[back], labels)


@awkward(words)
class RoutesByHash(Words):
    """Experts by token id: the batch determines the number of tokens of each expert."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        expert = (ids.flatten() * 7) % 4
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=4).tolist()
        h = self.embed(ids).flatten(0, 1)[order]
        parts = [self.block(part) * (1 + index) for index, part in enumerate(h.split(counts))]
        return self.loss(torch.cat(parts), labels.flatten()[order])


@awkward(words)
class CountsSegments(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        segment = torch.cumsum(ids.flatten() % 5 == 0, 0)
        h = self.embed(ids).flatten(0, 1)
        pooled = torch.zeros(int(segment.max()) + 1, WIDTH, device=ids.device).index_add(0, segment, h)
        return self.loss(self.block(h + pooled[segment]), labels) + self.block(pooled).mean()


@awkward(words)
class CountsClasses(Words):
    """`one_hot` without a number of classes computes the largest label."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        target = F.one_hot(labels).float()
        scores = self.head(self.block(self.embed(ids)))[..., : target.shape[-1]]
        return F.binary_cross_entropy_with_logits(scores, target)


@awkward(ragged)
class RepeatsRows(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        repeated = torch.repeat_interleave(self.embed(ids).mean(1), lengths, dim=0)
        return self.head(self.block(repeated)).square().mean()


@awkward(ragged)
class KeepsAsManyAsTheShortest(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        h = self.embed(ids)
        best = h.norm(dim=-1).topk(int(lengths.min())).indices
        kept = h.gather(1, best[..., None].expand(-1, -1, WIDTH))
        return self.loss(self.block(kept), labels.gather(1, best))


@awkward(words)
class SkipsAnEmptyLoss(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.block(self.embed(ids))
        return h.sum() * 0 if (labels == -100).all() else self.loss(h, labels)


@awkward(words)
class ChecksItsIds(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if ids.max() >= WORDS or ids.min() < 0:
            raise ValueError("token id outside the vocabulary")
        assert (ids < WORDS).all()
        return self.loss(self.block(self.embed(ids)), labels)


@awkward(masked)
class DropsAFullMask(Words):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)[:, None]
        full = mask.all() or torch.equal(mask, torch.ones_like(mask))
        bias = None if full else mask.bool()[:, None, None, :]
        return self.loss(self.block(F.scaled_dot_product_attention(h, h, h, attn_mask=bias)), labels)


@awkward(words)
class LooksForGlobalTokens(Words):
    """Longformer: a separate branch for rows with tokens that attend everywhere."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        special = ids == ids[:, :1]
        h = self.embed(ids)
        if special.flatten().any().item():
            h = h + self.block(h)
        return self.loss(h, labels)


def _with_end() -> dict[str, Any]:
    batch = masked()
    batch["ids"][:, 5] = 1
    return {name: batch[name] for name in ("ids", "labels")}


@awkward(_with_end)
class PoolsAtTheEndToken(Words):
    """BART: every row must hold one end token, whose state represents the row."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        ends = ids.eq(1)
        if len(torch.unique_consecutive(ends.sum(1))) > 1:
            raise ValueError("rows have different numbers of end tokens")
        h = self.block(self.embed(ids))
        last = h[ends, :].view(h.size(0), -1, h.size(-1))[:, -1]
        return self.head(last).logsumexp(-1).mean() + self.loss(h, labels.clamp(min=0))


def _pictures() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 8, 8], [1, 4, 16], [2, 4, 4], [1, 8, 4]])
    patches = torch.randn(int(grid.prod(1).sum()), WIDTH, generator=generator)
    return {**words(), "patches": patches, "grid": grid}


@awkward(_pictures)
class PacksPicturesByGrid(Words):
    """Qwen-VL: the patches of all pictures in one sequence, and the grid (B, 3) of each."""

    def forward(self, ids: Tensor, labels: Tensor, patches: Tensor, grid: Tensor) -> Tensor:
        pictures = self.block(patches).split((grid[:, 0] * grid[:, 1] * grid[:, 2]).tolist())
        seen = torch.stack([picture.mean(0) for picture in pictures])
        places = torch.cat([torch.arange(h * w, device=ids.device).repeat(t) for t, h, w in grid.tolist()])
        turned = patches * places.float()[:, None].cos()
        return self.loss(self.block(self.embed(ids) + seen[:, None]), labels) + self.block(turned).mean()


def _graph() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "nodes": torch.randn(96, WIDTH, generator=generator),
        "edges": torch.randint(96, (2, 700), generator=generator),
    }


@awkward(_graph, batch_size=96)
class PassesMessages(Numbers):
    """A graph network: edges are not samples."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sender, receiver = edges
        received = torch.zeros_like(nodes).index_add(0, receiver, self.block(nodes[sender]))
        return self.block(received).square().mean()


def spoken() -> dict[str, Any]:
    """Return sound (B, T, D) and its words (B, 12), with the lengths of each."""
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
        "lengths": torch.tensor(LENGTHS),
        "targets": torch.randint(1, WORDS, (ROWS, 12), generator=generator),
        "target_lengths": torch.tensor([12, 5, 9, 7]),
    }


class _Speech(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)).log_softmax(-1).transpose(0, 1)


@awkward(spoken)
class RecognisesSpeech(_Speech):
    def forward(self, x: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        return F.ctc_loss(self.scores(x), targets, lengths, target_lengths, zero_infinity=True)


@awkward(spoken)
class RecognisesFlatTargets(_Speech):
    """transformers' CTC heads: concatenated labels of all rows, checked against the vocabulary."""

    def forward(self, x: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        if targets.max() >= WORDS:
            raise ValueError("label outside the vocabulary")
        inside = torch.arange(targets.shape[1], device=x.device)[None] < target_lengths[:, None]
        flat = targets.masked_select(inside)
        with torch.backends.cudnn.flags(enabled=False):
            return F.ctc_loss(self.scores(x), flat, lengths, inside.sum(-1), zero_infinity=True)


@awkward(words)
class MergesRepeatedWords(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        merged, counts = torch.unique_consecutive((ids // 32).flatten(), return_counts=True)
        return self.head(self.block(self.embed(merged))).square().mean() * counts.float().mean()


@awkward(ragged)
class SortsByLength(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        h = self.block(self.embed(ids[order]))
        return self.loss(h[order.argsort()], labels)


@awkward(words)
class SortsIntoBuckets(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        borders = torch.arange(0, WORDS, 16, device=ids.device)
        return self.loss(self.block(self.embed(torch.bucketize(ids, borders))), labels)


def _sized() -> dict[str, Any]:
    return {**words(), "wanted": 40}


@awkward(_sized)
class IsToldItsLength(Words):
    def forward(self, ids: Tensor, labels: Tensor, wanted: int) -> Tensor:
        return self.loss(self.block(self.embed(ids[:, :wanted])), labels[:, :wanted])


@awkward(ragged, refused="has no such device")
class FillsNestedRows(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        h = self.embed(ids)
        nested = torch.nested.nested_tensor([row[:n] for row, n in zip(h, lengths.tolist(), strict=True)])
        return self.loss(self.block(nested.to_padded_tensor(0.0)), labels[:, : max(LENGTHS)])


@awkward(ragged)
class RunsAPackedRnn(Words):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        h, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.loss(self.block(h), labels[:, : h.shape[1]])


@awkward(ragged)
class CutsByTheMean(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        cut = int(lengths.float().mean().ceil())
        return self.loss(self.block(self.embed(ids[:, :cut])), labels[:, :cut])


@awkward(ragged)
class PicksByLists(Words):
    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        rows, last = [1, 3, 0], 2
        longest = lengths[[0, -1, last - 1]].max().item()
        h = self.block(self.embed(ids[rows, :longest]))
        return self.loss(h, labels[rows, :longest]) + h[:, [-1, 0]].square().mean()
