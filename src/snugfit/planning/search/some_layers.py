"""The least that recomputing some layers takes, or spans of them, by what recomputing none and each takes.

A step that recomputes a part of the layers lies about on the line from none to each. On that very line lies
what the device works, for kernels add up. So does what is live when the backward pass begins, but for the one
layer whose activations are there again where each is recomputed: the last layer may be one that keeps all.
Where each is recomputed, most may be live later, with all gradients; at first there were none of them.

Spans of layers run as much again as each layer by itself, and what is live beside what layers keep is live
there too. None of it holds where activations wait on the host.

How far what is simulated is below that, was looked at for GPT-2, ViT, BERT, T5, Llama, Qwen2.5 and Gemma 3,
with adapters and without, for large batches and small ones. Each share stands above the most that was found.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from snugfit.planning.cost.figures import Bound

if TYPE_CHECKING:
    from snugfit.techniques.setup import CheckpointWish

DEVICE_SHARE = 0.03
"""Of the seconds that the device works, how much less they may be: the first layer and the end of a span
leave out some. 1.4 % of GPT-2's and Whisper's, and 2.6 % where a batch is so small that the device waits."""

LAYERS_SHARE = 0.03
"""Of the bytes while a layer runs, and of those beside what layers keep, how much less they may be: 1.4 % of
GPT-2's."""

LINE_SHARE = 0.2
"""Of all bytes and seconds on the line, how much less they may be. In all that the plans of four models
looked at it was 11 % of the bytes and 9 % of the seconds at most: the worst moment is another."""


def least_of_some(without: Bound, full: Bound, wish: CheckpointWish) -> Bound:
    """The least of recomputing each n-th layer, by what none (`without`) and what each (`full`) takes."""
    depth = full.depth or wish.every
    part = _share_of_layers(wish, depth)

    def line(without: float, full: float, share: float) -> float:
        """That much below what is so far on the way from none to full."""
        return (without + (full - without) * part) * (1 - share)

    needed = line(without.needed_bytes, full.needed_bytes, LINE_SHARE)
    if full.depth > 1 and all(one.layers_bytes > one.resting_bytes for one in (without, full)):
        at_first = full.layers_bytes - full.gradient_bytes
        a_layer = (without.layers_bytes - at_first) / (full.depth - 1)
        needed = max(needed, line(without.layers_bytes, at_first - a_layer, LAYERS_SHARE))
    by_device = line(without.device_seconds, full.device_seconds, DEVICE_SHARE)
    return Bound(int(needed), max(line(without.seconds, full.seconds, LINE_SHARE), by_device))


@cache
def _share_of_layers(wish: CheckpointWish, depth: int) -> float:
    """Of so many layers, how many are recomputed."""
    return sum(map(len, wish.cut(depth))) / depth


def least_of_spans(full: Bound) -> Bound:
    """The least of recomputing spans of layers, by what recomputing each layer takes."""
    return Bound(int(full.unkept_bytes * (1 - LAYERS_SHARE)), full.device_seconds * (1 - DEVICE_SHARE))
