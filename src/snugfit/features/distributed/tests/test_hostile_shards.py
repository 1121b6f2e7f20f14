"""Hostile shards: a read runs no code, uses bounded memory and raises one error."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from snugfit.errors import SnugfitError
from snugfit.features.distributed.checkpoint.torch_checkpoint import (
    LIST_OF_PARTS,
    list_of_parts,
    read_parts,
    write_parts,
)
from test_hostile_checkpoints import RunsCode


def named_bytes() -> Metadata:
    """Return metadata in which a weight is stored as bytes; torch would unpickle them without a check."""
    return Metadata({"a": BytesStorageMetadata()}, storage_data={MetadataIndex("a"): _StorageInfo("x", 0, 1)})


def tensor_of(*size: int) -> Metadata:
    """Return metadata of one tensor of this size."""
    kept = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks=[])
    return Metadata({"a": kept}, storage_data={})


def test_torchs_list_of_parts_runs_no_code(tmp_path: Path) -> None:
    """The reader takes neither a function named in the file nor a weight whose stored type is bytes."""
    write_parts({"a": torch.arange(4.0)}, tmp_path, group=None, are_many=False)
    assert list(list_of_parts(tmp_path)) == ["a"]
    values = {"a": torch.zeros(4)}
    read_parts(values, tmp_path, group=None, are_many=False)
    assert values["a"].tolist() == [0, 1, 2, 3]
    dotted = b"\x80\x04\x8c\x2etorch.distributed.checkpoint.metadata\x8c\x09os.getcwd\x93)R."
    hostile = [pickle.dumps(RunsCode(tmp_path / "marker")), pickle.dumps(named_bytes()), dotted, b"", b"\x80"]
    for content in hostile:
        (tmp_path / LIST_OF_PARTS).write_bytes(content)
        for read in (list_of_parts, lambda at: read_parts(values, at, group=None, are_many=False)):
            with pytest.raises(SnugfitError, match=r"\.metadata is not a list of tensors.*was not read"):
                read(tmp_path)
    assert not (tmp_path / "marker").exists()


def test_torchs_list_claims_no_more_than_its_files_have(tmp_path: Path) -> None:
    (tmp_path / LIST_OF_PARTS).write_bytes(pickle.dumps(tensor_of(1 << 40)))
    with pytest.raises(SnugfitError, match=r"names tensors of 4,398,046,511,104 bytes, but the files"):
        list_of_parts(tmp_path)


def deflated(part: bytes) -> bytes:
    """Return the torch file with its numbers replaced by 16 MiB of compressed zeros."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(part)) as before, zipfile.ZipFile(packed, "w") as after:
        for member in before.infolist():
            is_data = member.filename.endswith("data/0")
            how = zipfile.ZIP_DEFLATED if is_data else zipfile.ZIP_STORED
            after.writestr(member.filename, bytes(1 << 24) if is_data else before.read(member), how)
    return packed.getvalue()


def pointing_twice(part: bytes) -> bytes:
    """Return the same torch file with a directory that lists its largest member a hundred times."""
    packed = io.BytesIO(part)
    with zipfile.ZipFile(packed, "a") as file:
        largest = max(file.infolist(), key=lambda member: member.file_size)
        file.filelist += [largest] * 100
        file._didModify = True  # type: ignore[attr-defined]  # the directory is written anew
    return packed.getvalue()


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        (deflated, {}, "it is compressed"),
        (pointing_twice, {}, "it has more than its [0-9,]+ bytes"),
        (lambda part: pickle.dumps(torch.zeros(4)), {}, "it is not a file of torch's"),
        (lambda part: part, {"transform_descriptors": ["stream.zstd"]}, r"it is compressed \(stream\.zstd\)"),
        (lambda part: part, {"relative_path": "../elsewhere"}, "its file is in another folder"),
    ],
)
def test_a_part_that_would_grow_in_memory_is_not_given_to_torch(
    change: Callable[[bytes], bytes],
    more: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_parts({"a": torch.arange(4.0)}, tmp_path, group=None, are_many=False)
    values = {"a": torch.zeros(4)}
    read_parts(values, tmp_path, group=None, are_many=False)
    assert values["a"].tolist() == [0, 1, 2, 3]
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(change(file.read_bytes()))
    listed = pickle.loads((tmp_path / LIST_OF_PARTS).read_bytes())
    more = {"length": file.stat().st_size, **more}
    listed.storage_data = {index: replace(place, **more) for index, place in listed.storage_data.items()}
    (tmp_path / LIST_OF_PARTS).write_bytes(pickle.dumps(listed))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch reads it"))
    with pytest.raises(SnugfitError, match=rf"The part a in .* was not read: {says}.*earlier checkpoint"):
        read_parts(values, tmp_path, group=None, are_many=False)
