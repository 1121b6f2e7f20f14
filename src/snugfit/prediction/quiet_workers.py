"""Suppression of logs and hiding of GPUs in the fork server that starts worker processes.

Log lines about which users can do nothing are suppressed from here on, in this process and in the workers. No
user's own code runs there.

Workers answer through pipes. DeepSpeed prints to stdout when transformers imports it, which would precede the
parent's answer, so their stdout is stderr.

A prediction queries no GPU. Yet libraries that transformers imports do: torchao looks up the kind of GPU.
Copies of a process that has queried CUDA fail in CUDA with "initialization error". On a machine with GPUs, a
run was therefore reported as impossible to simulate.
"""

from __future__ import annotations

import gc
import logging
import os
from contextlib import suppress

from snugfit.deferred_imports import hasten_import
from snugfit.hub_kernels import log_only_errors
from snugfit.prediction.worker_pool import FEW_COLLECTIONS

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, which is the next thing
with suppress(OSError):  # stderr may be closed
    os.dup2(2, 1)
hasten_import()
log_only_errors()
# Its own logger prints the accelerator that it finds, when the simulated loop is the Trainer's.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
gc.set_threshold(*FEW_COLLECTIONS)
