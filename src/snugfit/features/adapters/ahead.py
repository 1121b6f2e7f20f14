"""What rehearsals with adapters need, loaded where this is imported: by the process that a plan's workers are
copies of, so that it takes its seconds once.

Beside peft these are transformers' names of older weights, a thousand patterns that peft asks for and that
are compiled when it first does, which takes as long again. bitsandbytes, which peft imports, would have torch
load its compiler, for operators that no rehearsal runs; workers import it without that.
"""

from __future__ import annotations

import contextlib
import os
from unittest.mock import patch

from snugfit.hub_kernels import import_peft


def load() -> None:
    """Loads peft, and the names where transformers has such a module."""
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        import_peft()
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


load()
