"""Lower bounds of recomputing some layers or spans of them, from the figures of recomputing none and each.

A step that recomputes part of the layers is roughly on the line from none to each. The device's seconds
are exactly on that line, since kernels add up. So are the live bytes at the start of the backward pass,
except for one layer. If each layer is recomputed, that layer's activations exist again; otherwise the last
layer may be one that keeps all. If each is recomputed, the peak may come later, with all gradients. At the
start there were none of them.

Spans of layers recompute as much as each layer by itself. Live bytes outside the kept tensors of layers
are also live there. None of this holds if activations wait on the host.

The distance of simulations below these bounds was determined for GPT-2, ViT, BERT, T5, Llama, Qwen2.5 and
Gemma 3. It covers models with adapters and without, large batches and small ones. Each share exceeds the
greatest distance found.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from snugfit.planning.cost.figures import Bound

if TYPE_CHECKING:
    from snugfit.techniques.setup import CheckpointWish

DEVICE_SHARE = 0.03
"""Largest share by which the device's seconds may be below the line from recomputing none to each.

The first layer and the end of a span omit some kernels. GPT-2 and Whisper reached 1.4 %, and 2.6 % with a
batch so small that the device waits.
"""

LAYERS_SHARE = 0.03
"""Largest share by which two kinds of bytes may be below the line: GPT-2 reached 1.4 %.

They are the bytes while a layer runs, and those outside the kept tensors of layers.
"""

LINE_SHARE = 0.2
"""Largest share by which all bytes and seconds may be below the line, since the moment of the peak changes.

The plans of four models reached 11 % of the bytes and 9 % of the seconds.
"""


def least_of_some(without: Bound, full: Bound, wish: CheckpointWish) -> Bound:
    """Return the lower bounds of recomputing each n-th layer, from none (`without`) and each (`full`)."""
    depth = full.depth or wish.every
    part = _share_of_layers(wish, depth)

    def line(without: float, full: float, share: float) -> float:
        """Return the value at the recomputed share of the line from none to full, reduced by `share`."""
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
    """Return the recomputed share of `depth` layers."""
    return sum(map(len, wish.cut(depth))) / depth


def least_of_spans(full: Bound) -> Bound:
    """Return the lower bounds of recomputing spans of layers, from recomputing each layer."""
    return Bound(int(full.unkept_bytes * (1 - LAYERS_SHARE)), full.device_seconds * (1 - DEVICE_SHARE))
