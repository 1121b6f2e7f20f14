"""Micro-batches of a user's batch: splitting, joining, and writing them to a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.job.batch_layout import BatchDims, leaves
from snugfit.training.run.items import layout_of

if TYPE_CHECKING:
    from pathlib import Path


def pieces_of(
    batch: Mapping[str, Any], rows: int | None, dims: BatchDims | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the batch in parts of at most `rows` samples; a tensor without a sample dimension is in each
    part.

    Raises `JobError` for a batch with unclear dimensions.
    """
    layout = layout_of(batch, dims)
    if rows is None or (layout.rows and layout.samples <= rows):
        yield batch
        return
    layout.refuse_unclear(
        f"The batch must be cut into pieces of {rows}",
        "Name them with batch_dims={'edges': None, 'x': 0} of fit and accelerate. None is for a tensor that "
        "is never cut, and a number for the dimension of its samples. Or train with the whole batch at "
        "once.",
    )
    for start in range(0, layout.samples, rows):
        yield layout.part(batch, start, start + rows)


def join_pieces(pieces: Sequence[Mapping[str, Any]], dims: BatchDims | None = None) -> dict[str, Any] | None:
    """Join micro-batches into one batch; None if their tensors do not fit together."""
    try:
        return layout_of(pieces[0], dims).join(pieces)
    except (KeyError, RuntimeError, TypeError):
        return None


def write_batch(folder: Path, step: int, batch: Sequence[Mapping[str, Any]], *, rank: int = 0) -> Path:
    """Write a step's micro-batches to one file, each tensor by micro-batch number and name, if the disk
    permits.

    Return the file's path; its name has the rank, except for rank 0.
    """
    import torch
    from safetensors.torch import save_file

    file = folder / f"nonfinite-step-{step}{f'-rank-{rank}' if rank else ''}.safetensors"
    tensors = {
        # safetensors requires contiguous tensors.
        f"{number}.{name}": value.detach().cpu().contiguous()
        for number, micro_batch in enumerate(batch)
        for name, value in leaves(micro_batch)
        if isinstance(value, torch.Tensor)
    }
    with contextlib.suppress(OSError):
        save_file(tensors, file)
    return file
