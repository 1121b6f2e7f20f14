"""A model's weights in a checkpoint: written in the file format of transformers or peft, and loaded into an
existing model.

- `config.json`, `model.safetensors`: a model of transformers, for `from_pretrained`. Another module has its
  `state_dict` in `model.safetensors`.
- `adapter_config.json`, `adapter_model.safetensors`: each adapter, for peft. One that is not called "default"
  is in a folder of its name, as in peft.
- `model_state.json`, `.safetensors`: the model's state that those files omit (`model_state.py`).

A missing or additional tensor in a checkpoint is an error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint import adapters
from snugfit.training.checkpoint.model_state import (
    MODEL_STATE,
    ModelState,
    beginning_of,
    has_model_state,
    load_model_state,
    model_state_of,
    names_kept_beside,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The weights and state of a model for a checkpoint."""

    model: torch.nn.Module
    """The model that has these weights. Its class has the method that saves them."""

    files: Mapping[str, Mapping[str, torch.Tensor]]
    """Contents of the weight files: tensors by their names in a file, by the file's path.

    A tied weight is one tensor under two names.
    """

    configs: Mapping[str, Any]
    """peft's config of each adapter, by the adapter's subfolder."""

    state: ModelState
    """All state of the model that its next step needs. It shares tensors with `files`."""

    dtype: torch.dtype | None = None
    """Dtype of the saved weights; None if it is that of the live model."""

    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Lower 16 bits of weights whose upper half is bfloat16, by the weights' names. Files contain both halves
    as one fp32 tensor."""

    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Function that joins the two halves of a weight; None without residuals."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the weights and the state; a tensor under several names is yielded several
        times.
        """
        for tensors in self.files.values():
            yield from tensors.values()
        yield from self.residuals.values()
        yield from self.state.all_tensors()

    @property
    def widened_bytes(self) -> int:
        """The number of bytes by which the files are larger than their tensors because of a wider dtype,
        without the low halves of split weights.
        """
        in_16_bits = {id(value): 2 * value.numel() for value in self.residuals.values()}
        return sum(in_16_bits.values())

    def with_copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> ModelWeights:
        """Return a copy of the weights in which `copy` was applied to each tensor."""
        files = {
            file: {name: copy(value) for name, value in tensors.items()}
            for file, tensors in self.files.items()
        }
        residuals = {name: copy(value) for name, value in self.residuals.items()}
        return replace(self, files=files, residuals=residuals, state=self.state.with_copies(copy))

    def _tensors_to_write(self) -> dict[str, torch.Tensor]:
        """Return the tensors of `model.safetensors` by name, in their saved dtype. Tied weights stay one
        tensor.
        """
        weights = self.files[WEIGHTS]
        if self.join is None:
            return dict(weights)
        joined: dict[int, torch.Tensor] = {}
        for name, residual in self.residuals.items():
            if id(weights[name]) not in joined:
                joined[id(weights[name])] = self.join(weights[name], residual)
        return {name: joined.get(id(value), value) for name, value in weights.items()}

    def write(self, folder: Path) -> None:
        """Write the files of this model into `folder`."""
        from transformers import PreTrainedModel

        if adapters.is_adapted(self.model):
            self._write_adapters(folder)
        elif isinstance(self.model, PreTrainedModel):
            self._write_pretrained(self.model, folder)
        else:
            self._write_module(folder)

    def _write_adapters(self, folder: Path) -> None:
        places: dict[int, tuple[str, str] | None] = {}
        for inner, config in self.configs.items():
            (folder / inner).mkdir(exist_ok=True)
            config.save_pretrained(str(folder / inner))
        for file, tensors in self.files.items():
            _save(tensors, folder / file)
            places |= {id(value): (file, name) for name, value in tensors.items()}
        self.state.write(folder, places)

    def _write_pretrained(self, model: PreTrainedModel, folder: Path) -> None:
        """Write a model of transformers, and the tensors that its files omit.

        For some architectures transformers renames tensors in its files. When those are loaded, all tensors
        get one dtype.
        """
        weights, written = self.files[WEIGHTS], self._tensors_to_write()
        # The model has no container. To look for one, transformers would import packages for seconds.
        with no_progress_bars(), patch("transformers.modeling_utils.unwrap_model", lambda module: module):
            model.save_pretrained(folder, state_dict=written)
        # transformers may omit or rename tensors when it saves, so the names are read from its files.
        names = _names_in(folder)
        is_renamed = not names <= set(weights)
        in_files = [
            value
            for name, value in weights.items()
            if name in names or (is_renamed and written[name].dtype == (self.dtype or model.dtype))
        ]
        if self.dtype is not None:
            _name_dtype(folder / "config.json", self.dtype)
        self.state.write(folder, {id(value): None for value in in_files})

    def _write_module(self, folder: Path) -> None:
        weights = self.files[WEIGHTS]
        _save(self._tensors_to_write(), folder / WEIGHTS)
        self.state.write(folder, {id(value): None for value in weights.values()})


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write this dtype into the `config.json` at `config`, from which transformers reads it."""
    facts = json.loads(config.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weights_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> ModelWeights:
    """Return the live weights and state of this model for a checkpoint.

    A model with adapters includes only these and other trainable, optimized or changed tensors. Raises
    `SnugfitError` for values that no checkpoint can contain.
    """
    import torch

    # A `state_dict` may contain extra state that is not a tensor.
    named = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if not adapters.is_adapted(model):
        state, parts = model_state_of(model, set(named)), held_parts(optimizer)
        # The lower half of a tied weight is needed under each of its names.
        with_names = model.named_parameters(remove_duplicate=False)
        residuals = {name: parts[weight] for name, weight in with_names if weight in parts}
        return ModelWeights(
            model=model,
            files={WEIGHTS: named},
            configs={},
            state=state,
            dtype=torch.float32 if residuals else None,
            residuals=residuals,
            join=getattr(optimizer, "whole_weight", None),
        )
    adapters.refuse_unsaved_adapters(model)
    files, configs = adapters.files_of(model, named)
    exports = [value for tensors in files.values() for value in tensors.values()]
    groups = [] if optimizer is None else optimizer.param_groups
    optimized = [weight for group in groups for weight in group["params"]]
    state = model_state_of(model, set(named), among=[*exports, *optimized])
    return ModelWeights(model=model, files=files, configs=configs, state=state)


def held_parts(optimizer: Any) -> Mapping[torch.Tensor, torch.Tensor]:
    """Return the low halves of split fp32 weights, which the optimizer stores, in a dict by weight; the dict
    is empty for other optimizers.
    """
    parts: Mapping[torch.Tensor, torch.Tensor] = getattr(optimizer, "held_parts", dict)()
    return parts


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Save the tensors; one with two names, from tied modules, is written twice, as in peft."""
    from safetensors.torch import save_file

    first_names: dict[int, str] = {}
    for name, value in tensors.items():
        first_names.setdefault(id(value), name)
    # safetensors rejects several names for the same memory.
    copies = {
        name: value if first_names[id(value)] == name else value.clone() for name, value in tensors.items()
    }
    save_file(copies, file, metadata={"format": "pt"})


def _names_in(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return names


def _weight_files(folder: Path) -> list[Path]:
    single = folder / WEIGHTS
    return [single] if single.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read all weights in a checkpoint's files of transformers or peft; return host tensors by their names in
    the files.
    """
    from safetensors.torch import load_file

    saved: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        saved |= load_file(file)
    return saved


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights in `folder` into an existing model. Raises `SnugfitError` for another model's
    weights."""
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    beginning_of(model)
    try:
        if adapters.is_adapted(model):
            if not has_model_state(folder):
                raise SnugfitError(
                    f"{folder} has adapters and no {MODEL_STATE}: snugfit did not write it. Other weights "
                    "that train may be missing. Start a new run, or continue with the program that wrote it."
                )
        elif isinstance(model, PreTrainedModel):
            _load_pretrained(model, folder)
        else:
            _load_module(model, folder)
        load_model_state(model, folder)
    except (
        RuntimeError, LookupError, ValueError, TypeError, AttributeError, OSError, MemoryError,
        SafetensorError,
    ) as fault:  # fmt: skip
        raise SnugfitError(
            f"{folder} has no weights of this model: {fault} Resume with the model that wrote it, or "
            "start a new run."
        ) from None


def _load_module(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights of a module that is not a transformers model. Extra state without tensors is loaded
    with the model's state.
    """
    from safetensors.torch import load_file

    # The file omits extra state intentionally, so missing names are checked below.
    left = model.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    missing = [name for name in left.missing_keys if not name.endswith("_extra_state")]
    for name in (*missing, *left.unexpected_keys):
        raise KeyError(f"{name} is {'missing' if name in missing else 'left over'}")


def _load_pretrained(model: Any, folder: Path) -> None:
    """Load a model of transformers, whose tied weights are saved once.

    For architectures whose tensors are renamed in the files, a second model is loaded and copied.
    """
    saved = read_weights(folder)
    own = {name: value for name, value in model.state_dict().items() if hasattr(value, "data_ptr")}
    beside = names_kept_beside(folder)
    tied = {name for name in own if name not in saved and name not in beside}
    addresses = {own[name].data_ptr() for name in saved if name in own}
    # A name that the file omits must be that of memory with another, saved name.
    if set(saved) <= set(own) and all(own[name].data_ptr() in addresses for name in tied):
        model.load_state_dict(saved, strict=False)
        return
    again, info = type(model).from_pretrained(
        folder, config=model.config, dtype=model.dtype, local_files_only=True, output_loading_info=True
    )
    if missing := set(info["missing_keys"]) - beside:
        raise KeyError(f"{min(missing)} is missing")
    loaded = again.state_dict()
    # The new model has a single dtype. Weights that were rounded to it are read from the file.
    exact = {
        name: value for name, value in saved.items() if name in loaded and _is_rounded(value, loaded[name])
    }
    model.load_state_dict({**loaded, **exact}, strict=True)


def _is_rounded(saved: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Return True if the tensor `loaded` has the values of `saved`, rounded to another dtype."""
    import torch

    return saved.dtype != loaded.dtype and torch.equal(saved.to(loaded.dtype), loaded.to(saved.device))


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars for files of weights within the context."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
