"""What the process that workers are copies of imports first: from here on, what nobody can act on is not
logged in it, nor in them, and no GPU is seen. No user's own code runs there.

A prediction asks no GPU anything. Yet libraries that transformers imports do: torchao looks up what kind of
GPU there is. A process that has asked CUDA and is then copied leaves copies in which CUDA fails with
"initialization error", so that a run on a machine with GPUs was told that it cannot be simulated.
"""

from __future__ import annotations

import os

from snugfit.hub_kernels import log_only_errors

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, which is the next thing
log_only_errors()
