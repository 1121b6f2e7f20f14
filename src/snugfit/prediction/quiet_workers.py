"""Suppression of logs and hiding of GPUs in the fork server that starts worker processes.

Log lines that need no action by users are suppressed in this process and in the workers. No user's own code
runs in the fork server.

Workers answer through pipes. DeepSpeed prints to stdout when transformers imports it, which would mix with
the parent's output. So a worker's stdout is its stderr.

A prediction queries no GPU. Yet libraries that transformers imports do: torchao looks up the kind of GPU. In
forks of a process that has queried CUDA, CUDA fails with "initialization error". A simulation on a machine
with GPUs failed for this reason before this module existed.
"""

from __future__ import annotations

import gc
import logging
import os
from contextlib import suppress

from snugfit.deferred_imports import hasten_import
from snugfit.hub_kernels import log_only_errors
from snugfit.prediction.worker_pool import FEW_COLLECTIONS

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any import of torch
with suppress(OSError):  # stderr may be closed
    os.dup2(2, 1)
hasten_import()
log_only_errors()
# DeepSpeed's logger would print the accelerator that it finds, if the simulated loop is the Trainer's.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
gc.set_threshold(*FEW_COLLECTIONS)
