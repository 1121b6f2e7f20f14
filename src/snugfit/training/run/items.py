"""Counts of a batch's samples and of its loss terms. A micro-batch is weighted by its fraction of the whole
batch's terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.job.batch import IGNORED
from snugfit.job.batch_layout import BatchDims, BatchLayout, leaves
from snugfit.training.checkpoint.facts import model_class

if TYPE_CHECKING:
    import torch


def layout_of(batch: Mapping[str, Any], dims: BatchDims | None) -> BatchLayout:
    """Return the layout of samples in a loader's batch; the batch may lack names of `dims`."""
    present = {name for name, _ in leaves(batch)}
    return BatchLayout.of(batch, {name: at for name, at in (dims or {}).items() if name in present})


def samples_in(batch: Mapping[str, Any], dims: BatchDims | None = None) -> int:
    """Return the number of samples, from the first dimensions of a batch's tensors or from the named
    dimensions.
    """
    return layout_of(batch, dims).samples


def items_in(batch: Mapping[str, Any], *, shifts: bool, dims: BatchDims | None = None) -> int:
    """Count the labels that are not ignored, without the first of each row if the model `shifts` its labels.

    Without labels, or with floating-point ones, count samples.
    """
    return items_in_each([batch], shifts=shifts, dims=dims)[0]


def items_in_each(
    batches: Sequence[Mapping[str, Any]], *, shifts: bool, dims: BatchDims | None = None
) -> list[int]:
    """Count the labels (or samples) of several batches, as `items_in`, with one synchronization with the
    device.
    """
    import torch

    counted = counted_items(batches, shifts=shifts, dims=dims)
    if all(isinstance(count, torch.Tensor) for count in counted) and counted:
        counts: list[int] = torch.stack(counted).tolist()  # type: ignore[arg-type]
        return counts
    return [int(count) for count in counted]


def counted_items(
    batches: Sequence[Mapping[str, Any]], *, shifts: bool, dims: BatchDims | None = None
) -> list[torch.Tensor | int]:
    """Count the labels (or samples) of each batch, as `items_in`, without synchronization: ints, or scalar
    tensors on the device.
    """
    return [_count(batch, shifts, dims) for batch in batches]


def _count(batch: Mapping[str, Any], shifts: bool, dims: BatchDims | None) -> torch.Tensor | int:
    import torch

    # Labels under this key are shifted already, so the first one counts as well.
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor) or not labels.dim() or labels.is_floating_point():
        return samples_in(batch, dims)
    if "shift_labels" not in batch and labels.dim() > 1 and shifts:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def shifts_labels(model: torch.nn.Module) -> bool:
    """Return True for one of transformers' decoders, whose losses shift their labels by one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    two_stacks = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return model_class(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not two_stacks
