"""The error for a failed save: the file, the reason, and the needed and free bytes.

Libraries in other languages report system errors in their own form. safetensors raises an error that is no
`OSError` and ends in `(os error 28)`. This number is the system's error number.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.manifest import BrokenCheckpoint
from snugfit.units import show_bytes

# safetensors, which is written in Rust, has the system's error number in its message.
_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)\W*$")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SaveFailed(SnugfitError):
    """Error: the operating system refused a write while a checkpoint was saved. It left no files, and earlier
    checkpoints are unchanged.
    """


def failure_cause(fault: BaseException, draft: Path) -> str | None:
    """Return a text with the file and the cause of a system error during a save; None for any other error.

    It must be called before the draft is removed.
    """
    if isinstance(fault, BrokenCheckpoint):
        return str(fault)
    refusal = _refusal(fault)
    if refusal is None:
        return None
    reason = refusal.strerror or str(refusal)
    file = _inside(refusal.filename, draft) if refusal.filename else _last_written(draft)
    return f"{file}: {reason}" if file else reason


def save_failed(final: Path, fault: BaseException, reason: str, needed_bytes: int | None) -> SaveFailed:
    """Return the error for a failed save. Call it after the incomplete files were removed, so that the free
    bytes in the message are right.
    """
    space_text = []
    if (refusal := _refusal(fault)) and refusal.errno in _DISK_FULL:
        space_text += [f"{show_bytes(needed_bytes)} are needed"] if needed_bytes is not None else []
        with suppress(OSError):
            free = shutil.disk_usage(final.parent).free
            space_text.append(f"{show_bytes(free)} are free")
            # EFBIG is the limit for one file, which is independent of the free disk space.
            if needed_bytes is not None and free > needed_bytes and refusal.errno != errno.EFBIG:
                space_text = ["there is room for its bytes: see the quota, and the number of files (df -i)"]
    figures = f" ({', '.join(space_text)})" if space_text else ""
    return SaveFailed(f"{final} could not be saved: {reason}{figures}. Earlier checkpoints are unchanged.")


def _refusal(fault: BaseException) -> OSError | None:
    if isinstance(fault, OSError):
        return fault
    if isinstance(fault, Exception) and (number := _OS_ERROR.search(str(fault))):
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return None


def _inside(filename: object, draft: Path) -> str:
    path = Path(os.fsdecode(filename) if isinstance(filename, str | bytes) else str(filename))
    if path == draft:
        return ""
    return str(path.relative_to(draft) if path.is_relative_to(draft) else path)


def _last_written(draft: Path) -> str:
    """Return the file at which a write failed: the one that changed last."""
    with suppress(OSError):
        files = [path for path in draft.rglob("*") if path.is_file()]
        if files:
            return str(max(files, key=lambda path: path.stat().st_mtime_ns).relative_to(draft))
    return ""
