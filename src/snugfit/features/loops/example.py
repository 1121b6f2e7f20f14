"""The first batch of a user's loader, which gives a job its input shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError, UsageError, one_line
from snugfit.features.loops.data_rng import DataRng
from snugfit.features.loops.loader import fingerprint_of, has_an_order, name_of, without_workers
from snugfit.job.batch_layout import map_leaves
from snugfit.training.rng import preserve_rng

if TYPE_CHECKING:
    import torch


def example_of(
    make_loader: Callable[[], Iterable[Any]], device: torch.device, *, resumes: bool
) -> dict[str, Any]:
    """Return the first batch (B, ...) of a loader, on the CPU. Restore all random generators afterwards.

    Raises `UsageError` for an invalid batch. With `resumes`, also raises it if the same random states give
    another batch.
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
    """Return the loader's first batch, without starting worker processes."""
    with preserve_rng(device):
        loader = without_workers(getattr(loader, "base_dataloader", loader))  # accelerate's is a wrapper
        rng = DataRng(loader)
        with rng.apart():
            rng.begin_epoch()
            try:
                return next(iter(loader), None)
            except SnugfitError:
                raise
            except Exception as error:  # from the user's dataset or collate function
                raise UsageError(
                    f"The first batch could not be made ({type(error).__name__}: {one_line(error)}). Try it "
                    "without snugfit: next(iter(loader)), or next(iter(trainer.get_train_dataloader()))."
                ) from error
