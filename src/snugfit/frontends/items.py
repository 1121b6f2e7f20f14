"""Operations on a user's batch: reading an example, counting the items of its loss, splitting, and writing it
to a file.

A micro-batch has the weight of its share of the whole batch's items.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError, UsageError, one_line
from snugfit.frontends.data_rng import DataRng
from snugfit.frontends.loader import fingerprint_of, has_an_order, name_of, without_workers
from snugfit.job.batch import IGNORED
from snugfit.job.batch_layout import BatchDims, BatchLayout, leaves, map_leaves
from snugfit.training.checkpoint.facts import model_class
from snugfit.training.rng import preserve_rng

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def example_of(
    make_loader: Callable[[], Iterable[Any]], device: torch.device, *, resumes: bool
) -> dict[str, Any]:
    """Return the first batch (B, ...) of a loader, on the host; restore the generators of process and data.

    Raises `UsageError` for an invalid batch. Also raises it for data that a run which `resumes` could not
    repeat: the same states give another batch.
    """
    import torch

    first = _first_of(make_loader(), device)
    if not isinstance(first, Mapping) or not first:
        raise UsageError(
            f"A batch must map the model's arguments to tensors, but the loader gave {first!r:.80}. A "
            "collate_fn can make one."
        )
    if resumes and not has_an_order(make_loader()):
        raise UsageError(
            "With in_order=False batches come in the order in which workers finish, so a resumed run could "
            "not know which it has seen. Leave it out."
        )
    if resumes and fingerprint_of(first) != fingerprint_of(_first_of(loader := make_loader(), device)):
        raise UsageError(
            f"{name_of(loader)[0].upper()}{name_of(loader)[1:]} cannot be read again from its start: its "
            "first batch differs although all random generators were reset. So a resumed run would see "
            "other samples. It may use the system's entropy or a new generator each time, or be a stream "
            "that can be read only once. Draw from torch, numpy or random, or from a generator that is an "
            "attribute of the dataset, and open a stream in __iter__."
        )
    return map_leaves(
        first, lambda _, value: value.detach().cpu() if isinstance(value, torch.Tensor) else value
    )


def _first_of(loader: Any, device: torch.device) -> Any:
    """Return the first batch of a loader, created without workers."""
    loader = without_workers(getattr(loader, "base_dataloader", loader))  # accelerate's is a wrapper
    rng = DataRng(loader)
    before = rng.now
    rng.begin_epoch()
    with preserve_rng(device):
        try:
            first = next(iter(loader), None)
        except SnugfitError:
            raise
        except Exception as error:  # from the user's dataset or collate function
            raise UsageError(
                f"The first batch could not be made ({type(error).__name__}: {one_line(error)}). Try it "
                "without snugfit: next(iter(loader)), or next(iter(trainer.get_train_dataloader()))."
            ) from error
        rng.set(before)
    return first


def layout_of(batch: Mapping[str, Any], dims: BatchDims | None) -> BatchLayout:
    """Return the layout of samples in a loader's batch; the batch may lack names of `dims`."""
    present = {name for name, _ in leaves(batch)}
    return BatchLayout.of(batch, {name: at for name, at in (dims or {}).items() if name in present})


def samples_in(batch: Mapping[str, Any], dims: BatchDims | None = None) -> int:
    """Return the number of samples, from the first dimensions of a batch's tensors or the named ones."""
    return layout_of(batch, dims).samples


def items_in(batch: Mapping[str, Any], *, shifts: bool, dims: BatchDims | None = None) -> int:
    """Count the labels that are not ignored, without the first of each row if the model `shifts` them.

    Without labels, or with floating-point ones, count samples.
    """
    return items_in_each([batch], shifts=shifts, dims=dims)[0]


def items_in_each(
    batches: Sequence[Mapping[str, Any]], *, shifts: bool, dims: BatchDims | None = None
) -> list[int]:
    """Return `items_in` of several batches, with one synchronization for batches on a device."""
    import torch

    counted = counted_items(batches, shifts=shifts, dims=dims)
    if all(isinstance(count, torch.Tensor) for count in counted) and counted:
        counts: list[int] = torch.stack(counted).tolist()  # type: ignore[arg-type]
        return counts
    return [int(count) for count in counted]


def counted_items(
    batches: Sequence[Mapping[str, Any]], *, shifts: bool, dims: BatchDims | None = None
) -> list[torch.Tensor | int]:
    """Return `items_in` of each batch without synchronization: numbers, or scalar tensors on the device."""
    return [_count(batch, shifts, dims) for batch in batches]


def _count(batch: Mapping[str, Any], shifts: bool, dims: BatchDims | None) -> torch.Tensor | int:
    import torch

    # These labels are shifted already, so none of them is left out below.
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor) or not labels.dim() or labels.is_floating_point():
        return samples_in(batch, dims)
    if "shift_labels" not in batch and labels.dim() > 1 and shifts:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def pieces_of(
    batch: Mapping[str, Any], rows: int | None, dims: BatchDims | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the batch in pieces of at most `rows` samples; tensors without samples are repeated in each.

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


def shifts_labels(model: torch.nn.Module) -> bool:
    """Return True for one of transformers' decoders, whose losses shift their labels by one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    two_stacks = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return model_class(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not two_stacks


def write_batch(folder: Path, step: int, batch: Sequence[Mapping[str, Any]], *, rank: int = 0) -> Path:
    """Write every tensor of a step's micro-batches under its number and name, if the disk permits.

    Return the file; its name contains the rank, except for the first one.
    """
    import torch
    from safetensors.torch import save_file

    file = folder / f"nonfinite-step-{step}{f'-rank-{rank}' if rank else ''}.safetensors"
    tensors = {
        # safetensors writes contiguous tensors only.
        f"{number}.{name}": value.detach().cpu().contiguous()
        for number, micro_batch in enumerate(batch)
        for name, value in leaves(micro_batch)
        if isinstance(value, torch.Tensor)
    }
    with contextlib.suppress(OSError):
        save_file(tensors, file)
    return file
