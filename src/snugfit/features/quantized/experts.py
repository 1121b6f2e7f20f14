"""Mixture-of-experts weights in a model with 4-bit weights: they stay unquantized, and adapters on them are
large.

bitsandbytes replaces linear layers. transformers 5 stores all experts of a layer in one parameter with three
dimensions, which is not a linear layer. peft adapts such a parameter if it is a target, with one pair of
matrices for each expert.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.features.quantized.fields import QUANTIZE
from snugfit.results.footprint import Kind
from snugfit.units import MIB, show_bytes

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Block
    from snugfit.techniques.setup import Setup

LEAST = 64 * MIB
"""Size in bytes from which a warning mentions experts that stay unquantized."""

_FUSED = re.compile(r"experts$")
"""Regular expression for class names of modules that hold all experts in fused parameters."""

_WRAPPED = re.compile(r"(?:\.base_layer)+$")
_ADAPTER = re.compile(r"(?:\.base_layer)*\.lora_\w+(?:\.\w+)?$")


def expert_warnings(setup: Setup, blocks: Sequence[Block], missing: int) -> list[str]:
    """Return warnings about unquantized experts and about large adapters on them.

    `missing` is the number of bytes by which the step exceeds the memory.
    """
    if QUANTIZE.of(setup) is None:
        return []
    sizes: Counter[str] = Counter()
    modules: set[str] = set()
    for block in blocks:
        module = _WRAPPED.sub("", block.module)
        if block.kind == Kind.WEIGHTS and _FUSED.search(module) and "float" in block.dtype:
            sizes[block.dtype] += block.nbytes
            modules.add(module)
    if sizes.total() < LEAST:
        return []
    dtypes = " and ".join(f"{dtype} ({show_bytes(nbytes)})" for dtype, nbytes in sizes.most_common())
    sentence = (
        f"The weights of experts stay in {dtypes}. bitsandbytes quantizes linear layers only, and fused "
        "experts are parameters with three dimensions. With 'fused', experts=true packs them too."
    )
    return [sentence, *_about_adapters(blocks, modules, missing)]


def _about_adapters(blocks: Sequence[Block], experts: set[str], missing: int) -> Iterator[str]:
    """Yield a warning about large adapters on experts, with LoRA targets that leave them out."""
    nbytes, attention = 0, dict[str, None]()
    for block in blocks:
        module, adapters = _ADAPTER.subn("", block.module)
        if not adapters:
            continue
        if module in experts:
            nbytes += block.nbytes
        elif re.search(r"att", module.rpartition(".")[0], re.IGNORECASE):
            attention[module.rpartition(".")[2]] = None
    if not nbytes:
        return
    sentence = f"The adapters of experts take {show_bytes(nbytes)} at the peak, with gradients and states."
    if attention:
        fits = (
            ""
            if not missing
            else ", with which the step fits by estimate"
            if nbytes >= missing
            else (f", of the {show_bytes(missing)} that are missing")
        )
        sentence += f" targets={'|'.join(attention)} adapts attention only, and saves them{fits}."
    yield sentence
