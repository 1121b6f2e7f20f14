"""The ledger: what was measured, one folder a run, and the files are the truth.

    snugfit-runs/20261120T135000Z-bert-large-uncased-bf16-3f9a1c/
        measurement.json      the Measurement
        stderr.txt            the last words of the measured process

A run's folder is prepared under a hidden name and renamed when it is complete, so that a folder that can be
seen is whole. Names are made of what was measured with everything but letters, digits and dashes taken out:
nothing a model or a recipe is called can name a place outside the ledger.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from snugfit.documents import BadDocument, read_document, write_document, write_whole
from snugfit.errors import SnugfitError, UsageError
from snugfit.results.measurement import SCHEMA, Measurement

MEASUREMENT, WORDS = "measurement.json", "stderr.txt"


class BrokenRun(SnugfitError):
    """A folder of the ledger that holds no measurement; the message says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One folder of the ledger."""

    folder: Path
    """Where it stands."""

    measurement: Measurement | None
    """What it holds, or None when it is broken."""

    fault: str = ""
    """What is broken."""


@contextmanager
def prepared(root: Path) -> Iterator[None]:
    """Makes the ledger's folder for a run, or says before anything is measured why nothing could be kept
    there. A run that leaves nothing to keep (a user's mistake, Ctrl-C) leaves no new folder either."""
    absent = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as refusal:
        raise UsageError(f"The ledger {root} cannot be made: {refusal.strerror}. Try another.") from None
    try:
        _refuse_unwritable(root)
        yield
    except BaseException:
        with suppress(OSError):  # as soon as one holds something, it and those above it stay
            for folder in absent:
                folder.rmdir()
        raise


def _refuse_unwritable(root: Path) -> None:
    """Tried rather than asked: a superuser may write everywhere, and /proc takes no file from anyone."""
    try:
        tempfile.TemporaryFile(dir=root).close()
    except OSError as refusal:
        raise UsageError(
            f"The ledger {root} cannot be written to: {refusal.strerror}. Give another folder, or none."
        ) from None


def write(root: Path, measurement: Measurement, words: str) -> Path:
    """Keeps a measurement, whole or not at all, and gives its folder."""
    name = _name(measurement)
    draft = root / f".{name}"
    try:
        draft.mkdir()
        write_whole(draft / WORDS, words)
        write_document(draft / MEASUREMENT, measurement.to_json())
        draft.rename(root / name)
    except OSError as refusal:
        shutil.rmtree(draft, ignore_errors=True)
        raise SnugfitError(f"The measurement could not be kept in {root}: {refusal.strerror}.") from None
    return root / name


def read(folder: Path) -> Measurement:
    """The measurement of one run. Raises `BrokenRun` when there is none, or none of ours."""
    try:
        document = read_document(folder / MEASUREMENT)
    except FileNotFoundError:
        raise BrokenRun(f"{folder} holds no {MEASUREMENT}.") from None
    except BadDocument as fault:
        raise BrokenRun(f"{folder}: {fault}.") from None
    if document.get("schema") != SCHEMA or document.get("what") != "measurement":
        raise BrokenRun(
            f"{folder} was written as {document.get('what')!r}, schema {document.get('schema')!r};"
            f" this snugfit reads measurements of schema {SCHEMA}."
        )
    try:
        return Measurement.from_json(document)
    except SnugfitError as fault:
        raise BrokenRun(f"{folder}: {fault}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise BrokenRun(f"{folder}: {type(fault).__name__} {fault}.") from None


def runs(root: Path) -> list[Run]:
    """Every run of the ledger, oldest first; broken ones are told, not fatal."""
    if not root.is_dir():
        return []
    found = []
    for folder in sorted(path for path in root.iterdir() if not path.name.startswith(".") and path.is_dir()):
        try:
            found.append(Run(folder=folder, measurement=read(folder)))
        except BrokenRun as fault:
            found.append(Run(folder=folder, measurement=None, fault=str(fault)))
    return found


def _name(measurement: Measurement) -> str:
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    words = f"{measurement.job.model.name}-{measurement.recipe}"
    return f"{moment}-{slug(words)}-{secrets.token_hex(3)}"


def slug(text: str) -> str:
    """At most 48 lower-case letters, digits and dashes of a text, never none."""
    dashed = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return dashed.strip("-")[:48].strip("-") or "run"
