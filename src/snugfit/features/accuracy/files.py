"""Reading and writing of result files of `snugfit accuracy`, and reading of calibrated hardware rates."""

from __future__ import annotations

from pathlib import Path

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import SnugfitError, UsageError
from snugfit.features.accuracy.compared_runs import READABLE, Accuracy
from snugfit.job.gpu import Gpu
from snugfit.prediction.rates import Rates

MAX_BYTES = 64 << 20
"""Largest accepted size of a result file in bytes."""


def read(file: Path) -> Accuracy:
    """Read the result of `snugfit accuracy` from a file. Raises `UsageError` for a missing, damaged or other
    file.
    """
    try:
        document = read_document(file, limit=MAX_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file.") from None
    except BadDocument as fault:
        raise _no_result(file, str(fault)) from None
    document_kind, schema = document.get("what"), document.get("schema")
    if document_kind != "accuracy":
        raise _no_result(
            file, f'its key "what" says {document_kind!r}' if document_kind else 'it has no key "what"'
        )
    if schema not in READABLE:
        readable = " and ".join(map(str, READABLE))
        raise _no_result(file, f"it is of schema {schema!r}, but this snugfit reads {readable}")
    try:
        return Accuracy.from_json(document)
    except KeyError as fault:
        raise _no_result(file, f"it has no {fault}") from None
    except SnugfitError as fault:
        raise _no_result(file, str(fault)) from None
    except (AttributeError, TypeError, ValueError) as fault:
        raise _no_result(file, f"it is damaged ({fault})") from None


def write(result: Accuracy, file: Path) -> None:
    """Write the result of `snugfit accuracy` to a file atomically. Raises `SnugfitError` when the file cannot
    be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_document(file, result.to_json())
    except OSError as error:
        raise SnugfitError(f"{file}: cannot be written ({error.strerror}). Name another folder.") from None


def read_rates(file: Path, gpu: Gpu) -> Rates:
    """Read the hardware rates (such as bytes per second) of a calibration file. Raises `UsageError` if the
    file has none, or those of another GPU.
    """
    try:
        document = read_document(file)
        rates = Rates.from_json(document["rates"])
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file.") from None
    except (BadDocument, KeyError, TypeError, ValueError, AttributeError) as fault:
        raise UsageError(
            f"{file} is not a calibration ({type(fault).__name__}: {fault}). Name a file that `snugfit "
            "calibrate` wrote."
        ) from None
    if rates.gpu != gpu.key:
        raise UsageError(
            f"{file} has the rates of {rates.gpu}, but the runs are of {gpu.key}. Give a calibration of "
            "that GPU."
        )
    return rates


def _no_result(file: Path, cause: str) -> UsageError:
    return UsageError(
        f"{file} is not a result of `snugfit accuracy`: {cause.rstrip('.')}. Name an accuracy-*.json, or its "
        "folder."
    )
