"""The folder of a model's trained weights, and the checks before they are read.

Weights must be safetensors in a folder with a config.json: reading a pickle runs code. The safetensors
library checks the content of a file when it is opened.

Only the weights of a head may be missing. Messages list new weights and skipped tensors.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import ModelError, some_of
from snugfit.job.dtype import file_dtype
from snugfit.job.find import cached_file

if TYPE_CHECKING:
    from torch import nn

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
"""Name of the file that peft writes next to an adapter's weights."""

LARGEST_INDEX = 64 << 20
"""Largest accepted size in bytes of an index of weight files. The index of a model with 2,000 layers has two
million.
"""


def find_weights(name: str | os.PathLike[str]) -> Path:
    """Return the folder of safetensors called `name`: a folder, or a hub id of the local cache.

    Raises `ModelError` if there is none, or if one of its files may not be read.
    """
    folder = Path(os.path.expanduser(os.fspath(name)))
    if not folder.is_dir():
        folder = _cached_folder(os.fspath(name))
    files = list(_files(folder))
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"{folder}: {file.name} is named by {INDEX} but is missing. Give a complete folder."
            )
        # transformers follows `../` out of the folder, so links are resolved and compared.
        if file.name != SINGLE and not _is_of(folder, file):
            raise ModelError(
                f"{folder}: {file.name} is named by {INDEX} and is a link to {file.resolve()}, outside the "
                "folder. An index may only name files in its own folder. Put the file there."
            )
    # transformers loads an adapter from the same folder without a message.
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{folder} has {ADAPTER} next to a model's weights. transformers would load that adapter into "
            "the model and freeze the rest. Merge it (peft's merge_and_unload, then save_pretrained), or "
            "move its files to another folder."
        )
    return folder


def own_folder(name: str, origin: str) -> Path | None:
    """Return the folder of the model with this name and origin, with or without weights.

    The result is None for a model that has no folder of its own.
    """
    if origin == "hub cache":
        file = cached_file(name, "config.json")
        return file and file.parent
    named = Path(os.path.expanduser(name))
    return (named if named.is_dir() else named.parent) if origin == "path" else None


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype of the weights in a folder, by torch's name; None if no weight can be read."""
    try:
        return file_dtype(next(iter(_files(folder))))
    except ModelError:
        return None


def _files(folder: Path) -> Iterator[Path]:
    if (folder / SINGLE).exists():
        yield folder / SINGLE
        return
    if (folder / INDEX).exists():
        yield from (folder / shard for shard in _shards(folder / INDEX))
        return
    if any((folder / pickled).exists() for pickled in PICKLED):
        raise ModelError(
            f"{folder} has its weights as a pickle, which can run code when it is read. If you trust it, "
            f"this command writes safetensors next to it: {_conversion(folder)}"
        )
    more = " It has only an adapter: merge that into its model." if (folder / ADAPTER).exists() else ""
    raise ModelError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX}.{more} Give a folder that "
        "save_pretrained wrote."
    )


def _conversion(folder: Path) -> str:
    """Return a command line that converts a folder's pickled weights to safetensors, for the class that its
    config names."""
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        named = None
    kind = named if isinstance(named, str) and named.isidentifier() else "AutoModel"
    path = str(folder)
    program = f"from transformers import {kind} as M; M.from_pretrained({path!r}).save_pretrained({path!r})"
    return shlex.join(["python", "-c", program])


def _is_of(folder: Path, file: Path) -> bool:
    """Return True if `file` is in `folder`, also after links are resolved.

    In the hub's cache, where a snapshot's files are links, `folder` is extended to the folder of the model.
    """
    own = folder.resolve()
    # Files of a snapshot are links into the model's blobs, two folders up.
    root = own.parents[1] if own.parent.name == "snapshots" else own
    return file.resolve().is_relative_to(root)


def _shards(index: Path) -> list[str]:
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise ModelError(
                f"{index} is larger than {LARGEST_INDEX:,} bytes, which is too large for an index. Save "
                "the model again with save_pretrained."
            )
        document = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ModelError(
            f"{index} is not an index of weights: {fault} Save the model again with save_pretrained."
        ) from None
    for name in ("metadata", "weight_map"):  # transformers reads both
        if not isinstance(document, dict) or not isinstance(document.get(name), dict):
            raise ModelError(
                f'{index} is not an index of weights: it has no object "{name}". Save the model again '
                "with save_pretrained, or copy its files again."
            )
    shards = list(document["weight_map"].values())
    for shard in shards:
        if (
            # The file name of a shard must not be a path.
            not isinstance(shard, str)
            or not shard
            or shard != os.path.basename(shard)
            or shard in (".", "..")
        ):
            raise ModelError(
                f"{index} names {shard!r}: an index may only name files in its own folder. Put the file "
                "there, and correct the index."
            )
    return sorted(set(shards))


def _cached_folder(name: str) -> Path:
    with suppress(ValueError):
        if file := cached_file(name, SINGLE) or cached_file(name, INDEX):
            return file.parent
    raise ModelError(
        f"{name}: there is no folder with weights, and the local cache of the hub does not have this "
        "model. Give the folder of a model that was saved with save_pretrained, or download it first: hf "
        "download NAME."
    )


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """The differences between a loaded model and the weights in its folder."""

    new: Sequence[str]
    """Names of the weights of a new head. The folder does not have them, so they are drawn at random."""

    unused: Sequence[str]
    """Names of the folder's tensors that the model does not use."""

    def lines(self, folder: Path) -> Iterator[str]:
        """Yield a sentence on each difference between the loaded model and the folder of its weights."""
        if self.new:
            yield f"{folder} has no {some_of(self.new)}, so they are newly initialised and must be trained."
        if self.unused:
            unused = some_of(self.unused)
            yield f"This model does not use {unused} of {folder}. If it should, choose another task."


def check_loaded(model: Any, folder: Path, info: Mapping[str, Any]) -> LoadedWeights:
    """Return the differences between `model` and its folder, from transformers' loading report `info`.

    Raises `ModelError` if weights outside a new head are missing, or have another shape.
    """
    if wrong := sorted(info["mismatched_keys"]):
        name, saved, due = wrong[0]
        more = f" {len(wrong) - 1} more have other shapes too." if len(wrong) > 1 else ""
        raise ModelError(
            f"{folder}: {name} has the shape {tuple(saved)}, and {type(model).__name__} has {tuple(due)} "
            "there. Give a folder whose weights have the sizes of its config.json and the job's number of "
            f"labels.{more}"
        )
    missing = set(info["missing_keys"])
    # Without any weight in common, the folder belongs to another model.
    if len(missing) >= len(list(model.parameters())):
        raise ModelError(
            f"{folder} has no weights of {type(model).__name__}. Give the folder of this model's own weights."
        )
    # transformers would draw missing weights at random.
    if lost := sorted(missing - _new_heads(model, missing)):
        raise ModelError(
            f"{folder} is missing weights of {type(model).__name__} that are not those of a new head: "
            f"{some_of(lost)}. Give a complete folder. To start them at random, load the model with "
            "from_pretrained and save it with save_pretrained."
        )
    return LoadedWeights(new=sorted(missing), unused=sorted(info["unexpected_keys"]))


def _new_heads(model: Any, missing: set[str]) -> set[str]:
    """Return the missing weights that belong to heads which tasks add to a model.

    These are all weights outside of its base. Inside of the base they are poolers, heads and the embedding of
    a mask. A module with any present weight is excluded.
    """
    from torch import nn

    without = missing | set(getattr(model, "all_tied_weights_keys", ()))  # a tied weight comes from elsewhere
    present = {name.rpartition(".")[0] for name in model.state_dict() if name not in without}
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    prefix = f"{model.base_model_prefix}." if base is not None else ""
    # The child modules with layers or embeddings are the base model; heads have neither.
    stacks = {
        name
        for name, child in (model if base is None else base).named_children()
        if any(isinstance(module, nn.ModuleList | nn.Embedding) for module in child.modules())
    }

    def is_head(name: str) -> bool:
        owner, _, leaf = name.rpartition(".")
        if prefix and not name.startswith(prefix):
            # Outside of the base, a module with any present weight is no new head.
            return owner not in present
        child = name.removeprefix(prefix).partition(".")[0]
        if "mask" in leaf:
            return True
        is_added = "pool" in child or "head" in child or (not prefix and child not in stacks)
        return owner not in present and is_added

    return {name for name in missing if is_head(name)}


def freeze_as(built: nn.Module, loaded: nn.Module) -> None:
    """Freeze the loaded parameters that a newly built model has frozen, such as the sine positions of
    Whisper's encoder. transformers makes all loaded parameters trainable. A resumed run would otherwise train
    parameters that were frozen before, and more of them than were predicted.
    """
    fixed = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    for name, parameter in loaded.named_parameters():
        if name in fixed:
            parameter.requires_grad_(False)
