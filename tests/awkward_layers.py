"""Awkward modules around library layers with code paths of their own. They cover attention, recurrent and
convolutional networks, norms with statistics, Fourier and linear algebra, sparse embeddings and pair
losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from awkward_modules import LENGTH, ROWS, WIDTH, WORDS, Numbers, Words, awkward, masked, numbers, words

HEADS = 4
RNN = "a CPU runs LSTMs in oneDNN, with buffers of its own"


class _Attention(Words):
    keys = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = self.v = nn.Linear(WIDTH, WIDTH // HEADS * self.keys)

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(h).unflatten(-1, (heads, WIDTH // HEADS)).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, self.keys), (self.v, self.keys))
        )
        return q, k, v

    def attend(self, ids: Tensor, labels: Tensor, **keywords: Any) -> Tensor:
        h = self.embed(ids)
        out = F.scaled_dot_product_attention(*self.heads(h), **keywords)
        return self.loss(self.block(h + out.transpose(1, 2).flatten(2)), labels)


@awkward(words)
class BroadcastsOneKeyHead(_Attention):
    """Falcon: multi-query attention by broadcasting, without `enable_gqa`."""

    keys = 1

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.attend(ids, labels, is_causal=True)


@awkward(words)
class GroupsItsQueries(_Attention):
    keys = 2

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.attend(ids, labels, is_causal=True, enable_gqa=True)


@awkward(words)
class AsksForMathAttention(_Attention):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.attend(ids, labels)


@awkward(words)
class LearnsItsBias(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.attend(ids, labels, attn_mask=self.bias)


@awkward(masked)
class AttendsToWords(_Attention):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.attend(ids, labels, attn_mask=mask.bool()[:, None, None])


@awkward(masked)
class AttendsWithDropout(_Attention):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.attend(ids, labels, dropout_p=0.1)


@awkward(masked)
class EncodesWithTorch(Words):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 256, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.block(self.encoder(self.embed(ids), src_key_padding_mask=mask == 0)), labels)


@awkward(words)
class AsksForAttentionWeights(Words):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        h, weights = self.attention(h, h, h, need_weights=True)
        return self.loss(self.block(h), labels) + weights.square().mean()


class _Recurrent(Words):
    kind: type[nn.RNNBase] = nn.LSTM
    how: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.rnn = self.kind(WIDTH, WIDTH // (2 if self.how else 1), batch_first=True, **self.how)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.block(self.rnn(self.embed(ids))[0]), labels)


@awkward(words, xfail=RNN)
class RunsAnLstm(_Recurrent):
    pass


@awkward(words)
class RunsAGru(_Recurrent):
    kind = nn.GRU


@awkward(words, xfail=RNN)
class RunsAnLstmBothWays(_Recurrent):
    how = {"bidirectional": True, "num_layers": 2, "dropout": 0.1}  # noqa: RUF012


@awkward(words)
class LoopsOverACell(Words):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h, states = torch.zeros(len(ids), WIDTH, device=ids.device), []
        for x in self.embed(ids[:, :12]).unbind(1):
            h = self.cell(x, h)
            states.append(h)
        return self.loss(self.block(torch.stack(states, 1)), labels[:, :12])


@awkward(numbers)
class ScansItsStates(Numbers):
    """A linear recurrence, step by step, as Mamba's without its kernels."""

    def forward(self, x: Tensor) -> Tensor:
        gate, state, states = self.block(x).sigmoid(), torch.zeros_like(x[:, 0]), []
        for t in range(16):
            state = gate[:, t] * state + (1 - gate[:, t]) * x[:, t]
            states.append(state)
        return self.block(torch.stack(states, 1)).square().mean()


def _pictures() -> dict[str, Any]:
    return {"x": torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


@awkward(_pictures)
class NormsGroups(nn.Module):
    """A small U-Net: strided, grouped and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(torch.relu(self.norm(self.down(x)))) - x).square().mean()


class _Normed(nn.Module):
    momentum: float | None = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32, momentum=self.momentum)
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.relu(self.norm(self.first(x)))) - x).square().mean()


@awkward(_pictures)
class NormsItsBatch(_Normed):
    pass


@awkward(_pictures)
class AveragesItsBatches(_Normed):
    """Cumulative average: the share of a batch is one over the batch count, which is read from a buffer."""

    momentum = None


@awkward(_pictures)
class ResizesPictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.interpolate(self.first(x), scale_factor=2, mode="nearest")
        patches = F.unfold(h, 4, stride=4)
        return self.last(F.avg_pool2d(F.fold(patches, h.shape[-2:], 4, stride=4), 2)).square().mean()


@awkward(numbers)
class MixesFrequencies(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.fft.fft2(x.float()).real).square().mean()


@awkward(numbers)
class HasComplexWeights(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, dim=1) * self.filter
        return self.block(torch.fft.irfft(waves, n=x.shape[1], dim=1)).square().mean()


@awkward(numbers)
class Whitens(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        spread = h.transpose(1, 2) @ h / h.shape[1] + torch.eye(WIDTH, device=x.device)
        return torch.linalg.slogdet(spread).logabsdet.mean() + torch.linalg.inv(spread).square().mean()


@awkward(numbers)
class LearnsFromManyLosses(Numbers):
    """Each loss allocates its elements before their mean, at the peak."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        target = self.inner.weight.mean() + torch.zeros_like(h)
        loss = F.huber_loss(h, target) + F.smooth_l1_loss(h, target) + F.mse_loss(h, target)
        return F.binary_cross_entropy_with_logits(h, target.sigmoid()) + loss + self.outer(h).mean()


@awkward(numbers)
class ComputesInDoubles(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x).double()
        return (h.cumsum(1) / h.abs().cumsum(1).clamp(min=1e-6)).float().square().mean()


@awkward(numbers)
class ChoosesItsOwnAutocast(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type if x.device.type != "meta" else "cuda", dtype=torch.bfloat16):
            h = self.block(x)
        with torch.autocast("cpu", enabled=False):
            return h.float().square().mean()


@awkward(words)
class SumsBagsOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(4096, WIDTH, mode="mean"), nn.Linear(WIDTH, 512)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.bags(ids)).square().mean()


@awkward(words, refused="The size of sparse gradients")
class EmbedsSparsely(Words):
    """torch's AdamW refuses sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH, sparse=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.block(self.embed(ids)), labels)


@awkward(words)
class ComparesAllPairs(Words):
    """In-batch negatives, as in the training of sentence embedders and CLIP."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        a = F.normalize(self.block(self.embed(ids)).flatten(0, 1), dim=-1)
        b = F.normalize(self.block(self.embed(labels)).flatten(0, 1), dim=-1)
        target = torch.arange(len(a), device=a.device)
        both = F.cross_entropy(a @ b.T * 20, target) + F.cross_entropy(b @ a.T * 20, target)
        return both + self.head(a).square().mean()


@awkward(numbers)
class SinkhornsItsScores(Numbers):
    """Optimal transport: a fixed number of normalisations without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.block(x).flatten(0, 1)
        with torch.no_grad():
            plan = (scores / 0.05).softmax(-1)
            for _ in range(3):
                plan = plan / plan.sum(0, keepdim=True)
                plan = plan / plan.sum(1, keepdim=True)
        return -(plan * scores.log_softmax(-1)).sum(-1).mean()


@awkward(numbers)
class ProjectsATransposedInput(Numbers):
    """A layer with a bias adds it in place to the product of a non-contiguous input."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Linear(LENGTH, 8 * LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.over_time(self.block(x).transpose(1, 2)).mean()


class _WithLoss(Numbers):
    """One of the losses that are a single operator, on 4 x 64 x 256 scores."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(self.block(x))
        return self.criterion(scores, torch.ones_like(scores))

    def criterion(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.soft_margin_loss(scores, target)


@awkward(numbers)
class TakesASoftMargin(_WithLoss):
    pass


@awkward(numbers)
class TakesBinaryCrossEntropy(_WithLoss):
    def criterion(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(scores.sigmoid(), target)


@awkward(numbers)
class WeighsBinaryCrossEntropy(_WithLoss):
    def criterion(self, scores: Tensor, target: Tensor) -> Tensor:
        weights = torch.ones_like(scores[0, 0])
        return F.binary_cross_entropy_with_logits(2 * scores, target, target, pos_weight=weights)


@awkward()
class KeepsChannelsLast(nn.Module):
    """A map of features from tokens, whose channels stay the last dimension in memory up to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix, self.classes = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 8, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        features = self.embed(ids).unflatten(1, (8, 8)).permute(0, 3, 1, 2)
        scores = F.interpolate(self.classes(self.mix(features).relu()), scale_factor=4, mode="bilinear")
        classes = labels.unflatten(1, (8, 8)).repeat_interleave(4, 1).repeat_interleave(4, 2)
        return F.cross_entropy(scores, classes % 8)


@awkward(numbers)
class TakesMarginsOfClasses(_WithLoss):
    def criterion(self, scores: Tensor, target: Tensor) -> Tensor:
        rows = scores.flatten(0, 1)
        several = F.multilabel_margin_loss(rows, target.long().flatten(0, 1))
        return several + F.multi_margin_loss(rows, target[..., 0].long().flatten())
