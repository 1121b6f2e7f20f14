"""Reading and writing by torch.distributed.checkpoint, with ordinary errors and without code in its files.

Its `CheckpointException` has the errors of all processes with their tracebacks, and is no `Exception`. Its
writer reports a refusal of the system as a `RuntimeError` about positions in a file.

Its list of parts (`.metadata`) is a pickle. It is read here with the few classes that describe tensors. torch
reads the parts, with `weights_only`.
"""

from __future__ import annotations

import io
import mmap
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePath
from typing import Any

from snugfit.documents import BadDocument, read_limited
from snugfit.errors import SnugfitError

LIST_OF_PARTS = ".metadata"
"""torch's name for the file of a distributed checkpoint that lists its shards."""

LARGEST_LIST = 1 << 29
"""Largest accepted size of that list in bytes (chosen). The list of 60 weights in two processes takes 100 KB.
"""

_DESCRIBES_TENSORS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip
"""Class names that torch's list of shards may contain, by module. Paths and dtypes are allowed too."""


def write_parts(parts: dict[str, Any], folder: Path, *, group: Any, are_many: bool) -> None:
    """Write this process's parts by name into the folder, together with all processes of the group."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class NamingWriter(FileSystemWriter):
        """Writer of shards that adds the file's name to a system error, before the processes exchange their
        errors.
        """

        def write_data(self, plan: Any, planner: Any) -> Any:
            """Write this process's file of shards. Raises `OSError` if the system refuses it."""
            try:
                return super().write_data(plan, planner)
            except (OSError, RuntimeError) as fault:
                refusal = _refusal_behind(fault)
                if refusal is None:
                    raise
                # torch's error names no file. It concerns the last one that this process wrote with its
                # prefix.
                own = sorted(folder.glob(f"{plan.storage_data.prefix}*"))[-1:] or [folder]
                name = refusal.filename or str(own[0])
                raise OSError(refusal.errno, refusal.strerror, name) from fault

    how = {"process_group": group} if are_many else {"no_dist": True}
    with _one_error():
        save(parts, storage_writer=NamingWriter(folder), **how)


def read_parts(parts: dict[str, Any], folder: Path, *, group: Any, are_many: bool) -> None:
    """Read this process's shards from the folder into the tensors `parts`, together with all processes of the
    group.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _read_list(folder)

    class ListedReader(FileSystemReader):
        """Reader of a torch checkpoint whose metadata `list_of_parts` has read already."""

        def read_metadata(self, *given: Any, **more: Any) -> Any:
            """Return the metadata of the stored shards, in place of torch's own method."""
            metadata.storage_meta.load_id = self.load_id
            return metadata

        def read_data(self, plan: Any, planner: Any) -> Any:
            """Read this process's shards. Raises `SnugfitError` for one that torch has not written."""
            for index in dict.fromkeys(item.storage_index for item in plan.items):
                _refuse_packed(folder, index.fqn, metadata.storage_data[index])
            return super().read_data(plan, planner)

    with _one_error():
        load(parts, storage_reader=ListedReader(folder), process_group=group, no_dist=not are_many)


def list_of_parts(folder: Path) -> Mapping[str, Any]:
    """Return the metadata of all stored shards in the folder, by name.

    Raises `SnugfitError` for a list with anything but tensors, or with tensors larger than their files.
    """
    listed: Mapping[str, Any] = _read_list(folder).state_dict_metadata
    due = sum(prod(part.size) * part.properties.dtype.itemsize for part in listed.values())
    file_bytes = sum(file.stat().st_size for file in folder.iterdir())
    # The list of shards may claim any size, and memory is allocated before the files are read.
    if due > file_bytes:
        raise SnugfitError(
            f"{folder / LIST_OF_PARTS} names tensors of {due:,} bytes, but the files next to it have "
            f"{file_bytes:,}. Use an earlier checkpoint, or start a new run."
        )
    return listed


def _read_list(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import StorageMeta

    file = folder / LIST_OF_PARTS
    try:
        metadata = _Unpickler(io.BytesIO(read_limited(file, LARGEST_LIST))).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        # torch would unpickle any other kind of part without limits.
        if not all(hasattr(part, "chunks") for part in metadata.state_dict_metadata.values()):
            raise TypeError("a part is not a tensor")
    except _OUT_OF_A_PICKLE as fault:
        raise SnugfitError(
            f"{file} is not a list of tensors as torch writes it ({fault or type(fault).__name__}), so it "
            "was not read. Use an earlier checkpoint, or start a new run."
        ) from None
    return metadata


def _refuse_packed(folder: Path, name: str, stored: Any) -> None:
    """Raise `SnugfitError` for a shard that would take more memory than its bytes in the file."""
    file = folder / stored.relative_path
    why = ""
    # torch would follow a path that leaves the folder.
    if stored.relative_path != PurePath(stored.relative_path).name:
        why = "its file is in another folder"
    # torch writes uncompressed shards, but would expand a compressed one to any size.
    elif stored.transform_descriptors:
        why = f"it is compressed ({', '.join(map(str, stored.transform_descriptors))})"
    else:
        try:
            # A map begins at a page. `zipfile` ignores the bytes before the part.
            before = stored.offset % mmap.ALLOCATIONGRANULARITY
            length, offset = stored.length + before, stored.offset - before
            with (
                file.open("rb") as whole,
                mmap.mmap(whole.fileno(), length, access=mmap.ACCESS_READ, offset=offset) as part,
            ):
                members = zipfile.ZipFile(part).infolist()  # type: ignore[call-overload]
        except (zipfile.BadZipFile, NotImplementedError, ValueError, TypeError, OverflowError) as fault:
            why = f"it is not a file of torch's ({fault})"
        else:
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                why = "it is compressed"
            elif sum(member.file_size for member in members) > stored.length:
                why = f"it has more than its {stored.length:,} bytes"
    if why:
        raise SnugfitError(
            f"The part {name} in {file} was not read: {why}. Use an earlier checkpoint, or start a new run."
        )


_OUT_OF_A_PICKLE = (
    pickle.UnpicklingError, BadDocument, LookupError, TypeError, ValueError, AttributeError, EOFError,
    RecursionError, MemoryError, OverflowError,
)  # fmt: skip
"""Errors that reading an arbitrary pickle file may raise."""


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of torch that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of this name that a pickle refers to. Raises `UnpicklingError` for any other
        class.
        """
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        named_class = super().find_class(module, name) if module.partition(".")[0] == "pathlib" else None
        if isinstance(named_class, type) and issubclass(named_class, PurePath):
            return named_class
        if (module, name) not in _DESCRIBES_TENSORS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def _one_error() -> Iterator[None]:
    """Context that raises the error of a single process in place of torch's list of all errors. System errors
    come first.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
        try:
            yield
        except CheckpointException as fault:
            causes = [cause for _, (cause, _) in sorted(fault.failures.items())]
            refused = [cause for cause in causes if isinstance(cause, OSError)]
            raise (*refused, *causes)[0] from None


def _refusal_behind(fault: BaseException) -> OSError | None:
    """Return the `OSError` in the chain of causes of an exception, such as a full disk; None if there is
    none.
    """
    behind: BaseException | None = fault
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__context__
    return behind
