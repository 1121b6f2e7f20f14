"""The measured process's environment: ours without secrets, with one device and the recipe's allocator.

A list of what is allowed would lose what makes a user's machine work (library paths, CUDA's and the threads'
settings), so variables are handed on except those whose names say that they hold a secret: a measurement
opens no socket and has no use for them.

Images often tell Python to keep no bytecode. Each measured process would then compile torch and transformers
again, so bytecode goes to the user's folder of caches.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_SECRET = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name, and its name before torch 2.9, which is still read."""


def child_environment(
    inherited: Mapping[str, str], *, visibility: Mapping[str, str], expandable_segments: bool
) -> dict[str, str]:
    """What the child gets. The allocator is the recipe's alone, never the shell's."""
    kept = {
        name: value for name, value in inherited.items() if not _SECRET.search(name) and name not in ALLOCATOR
    }
    if kept.pop("PYTHONDONTWRITEBYTECODE", ""):
        cache = inherited.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        kept.setdefault("PYTHONPYCACHEPREFIX", str(Path(cache) / "snugfit" / "bytecode"))
    if expandable_segments:
        kept |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")
    ours = Path(__file__).resolve().parents[2]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    if ours not in installed:  # a source tree: the child must find the same snugfit
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ours), kept.get("PYTHONPATH")]))
    return {**kept, **visibility, "HF_HUB_OFFLINE": "1"}
