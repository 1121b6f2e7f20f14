"""Everyday names of the tensors at the peak and of the limits of a step's speed: `AdamW's moments`, `matrix
products`.

A tensor's name follows from its kind, the module and operator that allocated it, and the optimizer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snugfit.results.footprint import Kind
from snugfit.results.step_seconds import COMMUNICATION, LINK, PIPELINE

if TYPE_CHECKING:
    from snugfit.results.prediction import Prediction, TensorLine

NOTABLE = 0.1
"""Smallest share of a group's bytes at which the report names a dtype."""

EXPERTS = "expert"

_LOSSES = re.compile(r"log_softmax|nll_loss|cross_entropy")
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|proj_out|classifier|score|qa_outputs|cls|.*_head)(\.|$)")
_WHOLE_MODEL = re.compile(r"(module\.?)?(base_model\.model)?")
"""Pattern of the whole model's module path, where the loss is computed. peft and DDP add prefixes."""

_PARTS = (
    (r"expert|(^|\.)(moe|router)", EXPERTS),
    (r"norm[^.]*$|(^|\.)ln_[^.]*$", "normalization"),
    (r"attn|attention", "attention"),
    (r"mlp|ffn|feed_?forward|intermediate|dense|(^|\.)(fc\d|act)|\*\.output", "MLP"),
    (r"embed|(^|\.)(wte|wpe|shared)(\.|$)", "embedding"),
    (r"conv|downsample|patch", "convolution"),
    (r"drop(out)?$", "dropout"),
)
"""Patterns of module paths, each with the common name of that part of a model. The first match counts."""

_BY_KIND = {
    Kind.GRADIENTS: "gradients of the weights",
    Kind.INPUTS: "the batch",
    Kind.KEY_VALUES: "cache of keys and values",
    Kind.LOGITS: "logits",
    Kind.CACHES: "casts of weights (autocast)",
    Kind.GATHERED: "gathered weights",
    Kind.COMMUNICATION: "buffers of exchanges between GPUs",
    Kind.WORKSPACES: "workspaces of kernels",
}

BOUND_BY = {
    "host": "the host, which launches the kernels",
    "loading": "the loading of batches",
    LINK: "copies between the host's memory and the GPU",
    COMMUNICATION: "the exchange between GPUs",
    PIPELINE: "the wait for other pipeline stages",
    "tensor contractions": "matrix products on the GPU",
    "statistical normalisations": "softmax and normalization on the GPU",
    "element-wise": "element-wise kernels on the GPU",
}
"""Text for the bottleneck of a step's speed, by `StepSeconds.bound`."""


@dataclass(frozen=True, kw_only=True)
class PeakItem:
    """Bytes at the peak under one everyday name, such as gradients, with their dtypes."""

    name: str
    bytes: int
    dtypes: tuple[str, ...]
    """Dtypes of the tensors in the group, in the order of their bytes, the largest first."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.dtypes)})" if self.dtypes else self.name


def items_at_peak(prediction: Prediction) -> list[PeakItem]:
    """Return the tensors at the peak in groups with everyday names, the largest group first."""
    optimizer = prediction.recipe.setup().optimizer_path.split(":")[-1]
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for line in prediction.anatomy.largest:
        sizes[item_name(line, optimizer, trains=prediction.job.trains)][line.dtype] += line.bytes
    items = [
        PeakItem(name=name, bytes=by_dtype.total(), dtypes=tuple(_notable(by_dtype)))
        for name, by_dtype in sizes.items()
    ]
    return sorted(items, key=lambda item: -item.bytes)


def item_name(line: TensorLine, optimizer: str, *, trains: bool) -> str:
    """Return the everyday name of these tensors at the peak; `optimizer` is the name of its class."""
    if line.kind == Kind.WEIGHTS:
        return "weights of the experts" if part_of(line.module) == EXPERTS else "weights"
    if line.kind == Kind.OPTIMIZER_STATES:
        own = f"{optimizer}'s {'moments' if 'Adam' in optimizer else 'states'}"
        # Adagrad's constructor creates its states by filling them with a number, so they are no copies of
        # weights.
        is_copy = line.phase == "build" and not line.operator.startswith(("full", "zeros", "ones"))
        return "master weights" if is_copy else own
    if line.kind in _BY_KIND:
        return _BY_KIND[Kind(line.kind)]
    return _name_of_pass(line, trains=trains)


def _name_of_pass(line: TensorLine, *, trains: bool) -> str:
    """Return the everyday name of tensors that the forward pass, the backward pass or the optimizer's step
    allocated.
    """
    path, part = line.module, part_of(line.module)
    if line.phase == "build":
        return "whole model while it is built"
    if line.phase in ("clip", "update"):
        return "temporaries of the optimizer"
    if _LOSSES.search(line.operator) or _HEADS.search(path) or _WHOLE_MODEL.fullmatch(path):
        return "logits and their gradients" if trains else "logits"
    # Repeated layers share a module path that ends in `*`.
    if path.endswith("*"):
        return "hidden states between layers"
    return f"{part or path.rpartition('.')[2]} {line.kind}"


def part_of(module: str) -> str:
    """Return the name of the part of a model, such as `MLP`; empty for other modules."""
    return next((name for pattern, name in _PARTS if re.search(pattern, module, re.IGNORECASE)), "")


def _notable(by_dtype: Counter[str]) -> Iterator[str]:
    """Yield the dtypes that have a notable fraction of these bytes, for the text of a group of tensors."""
    for dtype, size in by_dtype.most_common():
        if dtype and size >= NOTABLE * by_dtype.total():
            yield dtype
