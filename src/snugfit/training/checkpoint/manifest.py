"""The list of a checkpoint's files with sizes and checksums (manifest), and the check of the files against
it.

    {"schema": 1, "what": "checkpoint", "snugfit": "0.1.0", "step": 30,
     "files": {"model.safetensors": {"bytes": 4096, "sha256": "..."}, ...},
     "about": {...}, "sha256": "..."}

`files` names every file, by its path inside the folder. The last `sha256` is that of all other fields,
written as JSON with sorted keys and no spaces. It detects a changed bit in the manifest itself. That rule and
the names `schema`, `what`, `snugfit` and `sha256` must be the same in every later schema. With them, an older
snugfit recognizes a newer checkpoint and does not report it as damaged.

A resumed run reads all bytes of a checkpoint in any case, so they are always compared with their checksums.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugfit.documents import LARGEST_DOCUMENT, BadDocument, read_document, write_document
from snugfit.errors import SnugfitError

SCHEMA = 1
MANIFEST = "manifest.json"

CHUNK_BYTES = 1 << 20
"""Number of bytes of a file that are read between two checks for a stop signal (chosen)."""

LARGEST_JSON = 1 << 30
"""Largest size in bytes of a JSON file other than the manifest (chosen). A log of a million steps has a fifth
of it."""

_DAMAGE = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
    errno.EIO, errno.EBADMSG, errno.EUCLEAN,
}  # fmt: skip
"""Error numbers of the operating system for a file that is missing or lost by the disk. Others, such as no
permission, do not show that the checkpoint is damaged."""


class BrokenCheckpoint(SnugfitError):
    """Error: the folder is not a complete checkpoint; the message names the file and its fault."""


class NewerCheckpoint(SnugfitError):
    """Error: the checkpoint is valid, but its schema is newer than this snugfit."""


class SaveStopped(SnugfitError):
    """Error: the save of a checkpoint was stopped on request, and left no files."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The size and the checksum of one file of a checkpoint."""

    bytes: int
    """Size of the file in bytes."""

    sha256: str
    """SHA-256 checksum of the file, in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its files match the list (manifest) in its folder."""

    folder: Path
    """Path of the checkpoint's folder."""

    step: int
    """Number of optimizer steps that the run had finished."""

    files: Mapping[str, Contents]
    """Size and checksum of each file except the manifest, by its path inside the folder."""

    about: Mapping[str, Any]
    """Description of the run that was stored in the checkpoint."""


def seal(folder: Path, step: int, about: Mapping[str, Any], stop: Callable[[], bool]) -> dict[str, Contents]:
    """Complete a checkpoint: sync every file in `folder` to the disk, and write its list of files (manifest)
    last. Raises `OSError` with the file's name if the disk refuses, and `SaveStopped` if `stop` returns True.
    """
    folders, names = [folder], []
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            folders.append(Path(entry.path))
        else:
            names.append(os.path.relpath(entry.path, folder))
    if MANIFEST in names:
        raise SnugfitError(f"{MANIFEST} is the name of a checkpoint's manifest. Rename the other file.")
    files = {name: _contents(folder, name, stop=stop, sync=True) for name in sorted(names)}
    _write_manifest(folder / MANIFEST, step, files, about)
    # Inner folders are flushed first, because outer ones refer to them.
    for inner in reversed(folders):
        sync(inner)
    return files


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def _write_manifest(path: Path, step: int, files: Mapping[str, Contents], about: Mapping[str, Any]) -> None:
    from snugfit.versions import __version__

    document = {
        "schema": SCHEMA,
        "what": "checkpoint",
        "snugfit": __version__,
        "step": step,
        "files": {name: vars(contents) for name, contents in files.items()},
        "about": about,
    }
    with _naming(path):
        write_document(path, {**document, "sha256": checksum(document)})
        # `read_document` rejects larger files, so a checkpoint with one could not be resumed.
        if path.stat().st_size > LARGEST_DOCUMENT:
            raise SnugfitError(
                f"{path.name} would have more than {LARGEST_DOCUMENT} bytes: store a shorter description."
            )


def checksum(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its field `sha256`; every schema uses the same rule."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sync(path: Path) -> None:
    """Write a file's buffers, or a folder's entries, to the disk (`fsync`).

    Some file systems reject `fsync` for folders and write them by themselves; that error is ignored.
    """
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as refusal:
            if refusal.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context that adds this file's name to system errors (`OSError`)."""
    try:
        yield
    except OSError as refusal:
        refusal.filename = str(path)
        raise


def _contents(folder: Path, name: str, *, stop: Callable[[], bool], sync: bool) -> Contents:
    """Return the size and checksum of a regular file; call `stop` after each block of the file."""
    path = folder / name
    digest, total, piece = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with _naming(path):
        _plain(folder, name)
        # The file may have become a link or a pipe: a link raises an error, a pipe does not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            while True:
                if stop():
                    raise SaveStopped(
                        f"The save of {folder.name} was stopped. Earlier checkpoints are unchanged."
                    )
                if not (count := file.readinto(piece) or 0):
                    break
                digest.update(piece[:count])
                total += count
            if sync:
                os.fsync(descriptor)
    return Contents(bytes=total, sha256=digest.hexdigest())


def _plain(folder: Path, name: str) -> os.stat_result:
    """Return the `stat` of a checkpoint's file. Raises `BrokenCheckpoint` unless it is a regular file in
    regular folders.
    """
    parent = folder
    for part in name.split("/")[:-1]:
        parent /= part
        if not stat.S_ISDIR(os.lstat(parent).st_mode):
            raise BrokenCheckpoint(
                f"{name} is reached through {part}, which is {_kind(os.lstat(parent).st_mode)}"
            )
    state = os.lstat(folder / name)
    if not stat.S_ISREG(state.st_mode):
        raise BrokenCheckpoint(f"{name} is {_kind(state.st_mode)}, not a plain file")
    return state


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a link"
    return "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "a special file"


def check_sizes(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint if its manifest is valid and every file has the listed size; file contents are
    not read.

    Raises the errors of `verify`.
    """
    try:
        mode = os.lstat(folder).st_mode
        if not stat.S_ISDIR(mode):
            raise BrokenCheckpoint(f"it is {_kind(mode)}, not a folder")
        _plain(folder, MANIFEST)
        os.close(os.open(folder / MANIFEST, os.O_RDONLY))
        checkpoint = _read_manifest(folder, step)
        for name, due in checkpoint.files.items():
            size = _plain(folder, name).st_size
            if name.endswith(".json") and size > LARGEST_JSON:
                raise BrokenCheckpoint(f"{name} has {size:,} bytes, and at most {LARGEST_JSON:,} are read")
            if size != due.bytes:
                raise BrokenCheckpoint(f"{name} has {size} bytes, but {due.bytes} are expected")
    except OSError as refusal:
        raise _error_of(refusal, folder) from None
    return checkpoint


def verify(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint if its manifest is valid and every file has the listed size and checksum.

    Raises `BrokenCheckpoint`, `NewerCheckpoint`, or `SnugfitError` if this process cannot read it.
    """
    checkpoint = check_sizes(folder, step)
    for name, due in checkpoint.files.items():
        try:
            contents = _contents(folder, name, stop=lambda: False, sync=False)
        except OSError as refusal:
            raise _error_of(refusal, folder) from None
        if contents != due:
            raise BrokenCheckpoint(f"{name} does not have the checksum of its manifest")
    return checkpoint


def _error_of(refusal: OSError, folder: Path) -> SnugfitError:
    name = os.path.relpath(refusal.filename, folder) if refusal.filename else "a file"
    if refusal.errno == errno.ENOENT:
        another = " (a checkpoint that snugfit did not write has none)" if name == MANIFEST else ""
        return BrokenCheckpoint(f"{name} is missing{another}")
    if refusal.errno in _DAMAGE:
        return BrokenCheckpoint(f"{name} cannot be read: {refusal.strerror}")
    return SnugfitError(
        f"{folder / name} cannot be read: {refusal.strerror}, so {folder.name} was not checked. "
        "Nothing was changed. Make it readable, or name another folder."
    )


def _read_manifest(folder: Path, step: int) -> Checkpoint:
    try:
        document = read_document(folder / MANIFEST)
        own = document.pop("sha256", None)
        if document.get("what") != "checkpoint" or own != checksum(document):
            raise BrokenCheckpoint(f"{MANIFEST} is damaged, or not written by snugfit")
    except BadDocument as fault:
        raise BrokenCheckpoint(str(fault)) from None
    except RecursionError:
        raise BrokenCheckpoint(f"{MANIFEST} is nested too deeply") from None
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise NewerCheckpoint(
            f"{folder} was written by snugfit {document.get('snugfit')} (schema {schema}), but this "
            f"version reads schema {SCHEMA}. Upgrade (pip install -U snugfit), or name another folder."
        )
    files, about = document.get("files"), document.get("about")
    if schema != SCHEMA or not isinstance(about, dict) or not isinstance(files, dict):
        raise BrokenCheckpoint(f"{MANIFEST} was not written by snugfit")
    if document.get("step") != step:
        raise BrokenCheckpoint(f"{MANIFEST} is of step {document.get('step')}")
    contents = {name: _contents_of(name, fields) for name, fields in files.items()}
    return Checkpoint(folder=folder, step=step, files=contents, about=about)


def _contents_of(name: str, fields: object) -> Contents:
    if not _is_inside(name):
        raise BrokenCheckpoint(f"{MANIFEST} names {name!r}, which is not a file inside the checkpoint")
    match fields:
        case {"bytes": int(count), "sha256": str(digits)}:
            return Contents(bytes=count, sha256=digits)
    raise BrokenCheckpoint(f"{MANIFEST} does not describe {name}")


def _is_inside(name: str) -> bool:
    try:
        # JSON may contain a lone surrogate, but a file name cannot.
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))
