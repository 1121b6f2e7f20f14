"""Import the modules that simulations of adapters need, before a plan's worker processes are forked.

A forked worker inherits the imported modules, so their import time of some seconds is spent once. The modules
are peft, and transformers' patterns for renaming older weights. peft compiles these thousand patterns at
first use, which takes as long as the import. peft imports bitsandbytes, which would make torch load its
compiler for operators that no simulation runs. Workers import bitsandbytes without the compiler.
"""

from __future__ import annotations

import contextlib
import os
from unittest.mock import patch

from snugfit.hub_kernels import import_peft


def load() -> None:
    """Import peft, and let transformers compile the regular expressions with which it renames older weights.

    Worker processes that are forked later inherit both.
    """
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        import_peft()
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


load()
