"""Imports of packages that would fetch compiled kernels from the hub while they are imported.

bitsandbytes 0.50 does so on CPUs with AVX512-BF16 when the package `kernels` is installed. The kernels are
for 4-bit products of inference. Without `kernels` it logs a warning. peft imports bitsandbytes, and
accelerate and the HF Trainer import peft.

Predicting runs no code from the hub and opens no socket, so during such an import `kernels` cannot be found.

peft and transformers' code of models also import torchao where it is installed. torchao logs the missing
kernels of other GPUs, and causes torch to log its deprecations. Users can do nothing about these lines. They
are suppressed during such an import, and in the worker processes of a search.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Hashable, Iterator
from importlib.util import find_spec


@contextlib.contextmanager
def no_hub_kernels() -> Iterator[None]:
    """Context in which the package `kernels` cannot be imported, so that no kernel is downloaded. Warnings
    about it are hidden.
    """
    absent = object()
    before: object = sys.modules.get("kernels", absent)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        with only_errors():
            yield
    finally:
        del sys.modules["kernels"]
        if before is not absent:
            sys.modules["kernels"] = before  # type: ignore[assignment]


_IMPORTED: set[Hashable] = set()
"""Keys of the imports that already ran in this process within `only_errors`."""


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Context in which these loggers log only errors.

    Each change of a logger's level clears the cached levels of thousands of other loggers.
    """
    loggers = (logging.getLogger(name) for name in names)
    levels = {logger: logger.level for logger in loggers if logger.level != logging.ERROR}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def only_errors(once: Hashable = None) -> Iterator[None]:
    """Context in which bitsandbytes, torchao and the torch module that logs for torchao log only errors. A
    `once` key of an earlier call leaves the loggers unchanged, since a change is slow.
    """
    if once in _IMPORTED:
        yield
        return
    with quiet(*_QUIETED_LOGGERS):
        yield
    if once is not None:
        _IMPORTED.add(once)


def log_only_errors() -> None:
    """Let the loggers of `only_errors` log only errors for the rest of the process."""
    for name in _QUIETED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


_QUIETED_LOGGERS = ("bitsandbytes", "torchao", "torch.utils._pytree")


def import_torchao() -> None:
    """Import torchao's 8-bit floats, where torchao is installed."""
    if find_spec("torchao") is not None:
        with only_errors():
            importlib.import_module("torchao.float8")


def import_peft() -> None:
    """Import peft, where it is installed, before accelerate or the HF Trainer does so within a step."""
    _import_without_hub("peft")


def import_bitsandbytes() -> None:
    """Import bitsandbytes, where it is installed."""
    _import_without_hub("bitsandbytes")


def _import_without_hub(package: str) -> None:
    if package not in sys.modules and find_spec(package) is not None:
        with no_hub_kernels():
            importlib.import_module(package)
