"""Blocks (pages) of a paged key-value cache: groups of layers, and the blocks that a sequence takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snugfit.features.serving.sizes import LayerCache

MIN_LAYER_RATIO = 1.5
"""Ratio between the numbers of layers of two kinds, below which the smaller group is padded to the larger
one. Source: vLLM, `v1/core/kv_cache_utils.py`, `_get_kv_cache_groups_uniform_page_size`, from 0.18 on. 0.15
to 0.17 have 1.25, and 0.33 has the function in `v1/core/kv_cache_planning.py`.
"""

ALIGNMENT = 16
"""The tokens of a block are a multiple of this number if the state of a Mamba layer enlarges it (vllm 0.19,
`model_executor/models/config.py`, `HybridAttentionMambaModelConfig`). Models with MLA have 64 there.
"""


@dataclass(frozen=True)
class Group:
    """Layers with the same type of cache, such as a sliding window, that share blocks of a paged cache."""

    window: int | None
    """Number of tokens that a layer attends to (sliding window); None for all."""

    stateful: bool
    """True for layers with a state, such as Mamba's. Each sequence needs `PagedCache.state_blocks` blocks for
    it.
    """


@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """The paged key-value cache of a model on one rank: its layer groups and block size."""

    groups: tuple[Group, ...]
    """Groups of layers. All groups have equally many pages in a block."""

    block_bytes: int
    """Bytes of one block, which has a page for each layer of a group."""

    block_size: int
    """Number of tokens in one block."""

    batched_tokens: int
    """Number of tokens in one forward pass. A layer with a sliding window holds them beyond its window."""

    state_blocks: int = 1
    """Number of blocks for the states of one sequence."""

    @property
    def token_bytes(self) -> int:
        """Bytes of cache that one more token takes, as long as no sliding window is full."""
        pages = sum(not group.stateful for group in self.groups)
        return pages * self.block_bytes // self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Return the number of cache blocks that one sequence of this many tokens takes."""
        return sum(self._blocks_in(group, tokens) for group in self.groups)

    def _blocks_in(self, group: Group, tokens: int) -> int:
        if group.stateful:
            return self.state_blocks
        if group.window is None:
            return math.ceil(tokens / self.block_size)
        # A chunk of a prompt is written before earlier tokens leave the window, which may begin within a
        # block (`v1/kv_cache_interface.py`, `SlidingWindowSpec.max_memory_usage_bytes`).
        cached_tokens = min(group.window - 1 + self.batched_tokens, tokens)
        return math.ceil(cached_tokens / self.block_size) + 1

    def blocks_in(self, available: int) -> int:
        """Return the number of cache blocks that fit into `available` bytes."""
        return max(0, available) // self.block_bytes if self.block_bytes else 0

    def tokens_in(self, available: int) -> int:
        """Return the cached tokens that the engine reports for `available` bytes. It divides the blocks
        evenly among the groups.
        """
        return self.blocks_in(available) // len(self.groups) * self.block_size

    def longest_in(self, available: int, limit: int) -> int:
        """Return the tokens of the longest sequence whose cache fits into `available` bytes, at most
        `limit`.
        """
        blocks = self.blocks_in(available)
        return largest(limit, lambda tokens: self.blocks_of(tokens) <= blocks)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` for which the function `fits` returns True, by bisection; 0 if
    there is none. `fits` must also return True for each smaller number.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def paged_cache(
    layers: Sequence[LayerCache], *, number_bytes: float, state_bytes: int, block_size: int, batched: int,
    caches_prefixes: bool = False,
) -> PagedCache:  # fmt: skip
    """Return the paged cache of these layers. A cached number takes `number_bytes`, and a number in a Mamba
    state `state_bytes`.

    With `caches_prefixes`, a sequence of a model with both Mamba and attention layers keeps two states (vllm
    0.33, `v1/kv_cache_interface.py`, `MambaSpec.max_memory_usage_bytes` in the mode `align`).

    All pages have one size, and all groups the same number of layers. So the pages of a sliding-window layer
    are as large as others (vllm 0.19, `v1/core/kv_cache_utils.py`, `unify_kv_cache_spec_page_size`). vLLM
    gives larger blocks to layers with fewer numbers per token. Here all layers have one block size.
    """
    per_token = max((math.ceil(layer.token_numbers * number_bytes) for layer in layers), default=0)
    state = max((layer.state_numbers * state_bytes for layer in layers), default=0)
    if state and per_token:
        # The page of an attention layer is enlarged until it holds a state.
        block_size = max(block_size, math.ceil(state / per_token / ALIGNMENT) * ALIGNMENT)
    page = max(per_token * block_size, state)
    kinds: Counter[Group] = Counter()
    for layer in layers:
        if layer.token_numbers:
            kinds[Group(layer.window, stateful=False)] += 1
        if layer.state_numbers:
            kinds[Group(None, stateful=True)] += 1
    fewest, most = min(kinds.values(), default=1), max(kinds.values(), default=1)
    size = most if most < fewest * MIN_LAYER_RATIO else fewest
    groups = [group for group, count in kinds.items() for _ in range(math.ceil(count / size))]
    return PagedCache(
        groups=tuple(groups), block_bytes=size * page, block_size=block_size, batched_tokens=batched,
        state_blocks=2 if caches_prefixes and per_token else 1,
    )  # fmt: skip
