"""Loading with transformers' `from_pretrained`, from a folder or the hub's cache, with one clear error.

No request goes to the hub, and code that comes with a tokenizer or processor never runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from snugfit.errors import UsageError, one_line


def load_pretrained(
    name_or_folder: str | os.PathLike[str],
    load: Callable[..., Any],
    noun: str,
    *,
    word: str,
    patterns: Sequence[str],
    file: str,
) -> Any:
    """Return the result of `load` for the name or folder. Raises `UsageError` if nothing can be loaded from
    it.

    `noun` and `word` name the object in error messages, and `file` is the usual file in its folder. A folder
    is accepted if it has a file that matches one of the `patterns`.
    """
    from huggingface_hub import constants

    name = os.path.expanduser(os.fspath(name_or_folder))
    folder = Path(name)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in patterns):
        raise UsageError(
            f"{folder}: this folder has no {noun} ({file}). {word}.save_pretrained({name!r}) writes one."
        )
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "/"))):
        raise UsageError(
            f"{folder}: the {word} is a folder with a {file}, or a name on the hub. Give one of these."
        )
    try:
        # With `local_files_only`, huggingface_hub still opens sockets. It builds the headers of a request
        # that it never sends, and queries a list of coding agents for them.
        with patch.object(constants, "HF_HUB_OFFLINE", True):
            return load(name, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # OSError, ValueError, or any error that a broken file causes
        cure = f"Give a folder with a {file}"
        if not folder.is_dir():
            raise UsageError(
                f"No folder {name!r}, and the local cache of the hub has no {noun} of that name (no request "
                f"goes to the hub). {cure}."
            ) from None
        raise UsageError(
            f"{name}: transformers cannot load its {noun} ({one_line(error, 300)}). {cure}."
        ) from None
