"""A model's weights in a checkpoint: written as `from_pretrained` loads them, and put back into a live model.

Of an adapted model only the adapters are kept, for its base never changes. A module that is not one of
transformers' has its `state_dict` in `model.safetensors`. Anything that is missing or left over when weights
are put back is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    import torch

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def _is_adapted(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def trained_weights(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """What trains and what a step changes, by its name in the model's `state_dict`: of an adapted model the
    adapters alone."""
    if not _is_adapted(model):
        return model.state_dict()
    from peft import get_peft_model_state_dict

    adapters: Mapping[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return adapters


def write_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes copies of this model's `trained_weights` as its kind is saved."""
    from safetensors.torch import save_file
    from transformers import PreTrainedModel

    if _is_adapted(model):
        model.peft_config["default"].save_pretrained(str(folder))  # type: ignore[union-attr, index]
        save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
    elif isinstance(model, PreTrainedModel):
        with no_progress_bars():
            model.save_pretrained(folder, state_dict=weights)
    else:
        save_file({name: value.clone() for name, value in weights.items()}, folder / WEIGHTS)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Puts the weights that were kept in `folder` into a model that stands. Raises `SnugfitError` when they
    are another model's."""
    from safetensors.torch import load_file
    from transformers import PreTrainedModel

    try:
        if _is_adapted(model):
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(model, load_file(folder / ADAPTER))
        elif isinstance(model, PreTrainedModel):
            _load_pretrained(model, folder)
        else:
            model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    except (RuntimeError, KeyError, ValueError, OSError) as fault:
        raise SnugfitError(f"{folder} holds no weights of this model: {fault}") from None


def _load_pretrained(model: Any, folder: Path) -> None:
    """Tied weights are kept once. Some architectures are kept under other names than they compute with, or in
    several files: those are loaded as a model of their own first."""
    from safetensors.torch import load_file

    single = folder / WEIGHTS
    saved = load_file(single) if single.is_file() else {}
    own = model.state_dict()
    tied = {name for name in own if name not in saved}
    addresses = {own[name].data_ptr() for name in saved if name in own}
    if set(saved) <= set(own) and all(own[name].data_ptr() in addresses for name in tied):
        model.load_state_dict(saved, strict=False)
        return
    again = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype, local_files_only=True)
    model.load_state_dict(again.state_dict(), strict=True)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within it transformers draws no bar for the files of weights that it reads or writes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
