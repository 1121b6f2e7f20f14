"""The ledger: a folder of measurements, with one folder for each run.

snugfit-runs/20261120T135000Z-bert-large-uncased-bf16-3f9a1c/ measurement.json the Measurement stderr.txt the
end of the measured process's output

A run's folder is written under a hidden name and renamed when it is complete. So every visible folder is
complete. Its name holds only letters, digits and dashes. So no name of a model or recipe can lead out of the
ledger.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from snugfit.documents import write_document, write_whole
from snugfit.errors import SnugfitError, UsageError
from snugfit.results.measurement import Measurement
from snugfit.user_files import writable_folder

MEASUREMENT, OUTPUT = "measurement.json", "stderr.txt"


@contextmanager
def open_ledger(root: Path) -> Iterator[None]:
    """Context in which the folder of measurements (the ledger) exists. Raises `UsageError` before the
    measurement starts if it cannot be created.

    A run without a measurement (a user's mistake, Ctrl-C) leaves no new folder behind.
    """
    absent = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise UsageError(
            f"The folder for measured runs, {root}, cannot be created: {refusal.strerror}. Name "
            "another folder."
        ) from None
    try:
        writable_folder(root)
        yield
    except BaseException:
        with suppress(OSError):  # non-empty folders and those above them stay
            # The deepest folder comes first, because `rmdir` removes only empty folders.
            for folder in absent:
                folder.rmdir()
        raise


def write(root: Path, measurement: Measurement, output: str) -> Path:
    """Write a measurement and the process's output, all or nothing, and return the run's folder."""
    name = _name(measurement)
    draft = root / f".{name}"
    try:
        draft.mkdir()
        write_whole(draft / OUTPUT, output)
        write_document(draft / MEASUREMENT, measurement.to_json())
        draft.rename(root / name)
    except OSError as refusal:
        shutil.rmtree(draft, ignore_errors=True)
        raise SnugfitError(
            f"The measurement could not be saved in {root}: {refusal.strerror}. Name another folder, or none."
        ) from None
    return root / name


def _name(measurement: Measurement) -> str:
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    subject = slug(f"{measurement.job.model.name}-{measurement.recipe}")
    # Two runs of the same recipe may end within the same second.
    return f"{moment}-{subject}-{secrets.token_hex(3)}"


def slug(text: str) -> str:
    """Return at most 48 lower-case letters, digits and dashes of a text; never empty."""
    dashed = re.sub(r"[^a-z0-9]+", "-", text.lower())
    # The cut may leave a dash at the end of the name.
    return dashed.strip("-")[:48].strip("-") or "run"
