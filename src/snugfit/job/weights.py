"""Where a model's trained weights are, and whether they may be read.

Weights must be safetensors in a folder with a config.json: reading a pickle runs code. An index may name
files of its own folder only (transformers follows `../` out of it), and a tensor is a name and never a path.
The safetensors library checks the content of a file when it is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import ModelError
from snugfit.job.find import cached_file

if TYPE_CHECKING:
    from torch import nn

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LARGEST_INDEX = 64 << 20
"""Bytes; the index of a model of 2,000 layers has two million."""


def find_weights(name: str | os.PathLike[str]) -> Path:
    """The folder of safetensors that `name` stands for: a folder, or a hub id of the local cache.

    Raises `ModelError` when there is none, or when one of its files may not be read.
    """
    folder = Path(os.path.expanduser(os.fspath(name)))
    if not folder.is_dir():
        folder = _cached_folder(os.fspath(name))
    files = list(_files(folder))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder}: {file.name} is named by {INDEX} and is not there.")
        if file.name != SINGLE and not _is_of(folder, file):
            raise ModelError(
                f"{folder}: {file.name} is named by {INDEX} and is a link to {file.resolve()}, outside of the"
                " folder: an index names files of its own folder only. Put the file there."
            )
    return folder


def _files(folder: Path) -> Iterator[Path]:
    if (folder / SINGLE).exists():
        yield folder / SINGLE
        return
    if (folder / INDEX).exists():
        yield from (folder / shard for shard in _shards(folder / INDEX))
        return
    if any((folder / pickled).exists() for pickled in PICKLED):
        raise ModelError(
            f"{folder} holds its weights as a pickle, which runs code when it is read. Convert it: load it"
            " where you trust it, then model.save_pretrained(folder) writes safetensors."
        )
    raise ModelError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}.")


def _is_of(folder: Path, file: Path) -> bool:
    """Whether the file lies in the folder; in the hub's cache, where a snapshot's files are links, in the
    folder of its model."""
    own = folder.resolve()
    root = own.parents[1] if own.parent.name == "snapshots" else own
    return file.resolve().is_relative_to(root)


def _shards(index: Path) -> list[str]:
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise ModelError(f"{index} is larger than {LARGEST_INDEX:,} bytes, which no index is.")
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise ModelError(f"{index} is no index of weights: {fault}") from None
    for shard in shards:
        if (
            not isinstance(shard, str)
            or not shard
            or shard != os.path.basename(shard)
            or shard in (".", "..")
        ):
            raise ModelError(f"{index} names {shard!r}: an index names files of its own folder only.")
    return sorted(shards)


def _cached_folder(name: str) -> Path:
    with suppress(ValueError):
        if file := cached_file(name, SINGLE) or cached_file(name, INDEX):
            return file.parent
    raise ModelError(
        f"{name}: no folder with weights, and none of the hub's models in the local cache. Give the folder of"
        " a model that was saved with save_pretrained, or download it first: hf download NAME."
    )


def freeze_as(built: nn.Module, loaded: nn.Module) -> None:
    """Freezes the parameters that an architecture is built with frozen (the sine positions of Whisper's
    encoder): transformers makes trainable ones of all that it loads. Otherwise a run that is resumed would
    train what it did not train before, and more than was predicted."""
    fixed = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    for name, parameter in loaded.named_parameters():
        if name in fixed:
            parameter.requires_grad_(False)
