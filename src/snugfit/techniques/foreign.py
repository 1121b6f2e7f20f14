"""Words of other libraries: what to write here instead.

One table, `foreign_names.json`, for both uses of such a word: as a key of a job file (the command line reads
`keys` and `same`) and as a word of a recipe (`advice`). A word for a technique that snugfit has stands in
that technique's `elsewhere`, not here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class ForeignNames:
    """The table of other libraries' names, as `foreign_names.json` has it."""

    about: str
    """Where the names come from."""

    same: dict[str, str]
    """Keys that mean the same as one of ours."""

    keys: dict[str, str]
    """Other keys, with what to write in a job file."""

    techniques: dict[str, str]
    """Techniques that snugfit does not have, with the reason."""


@cache
def foreign_names() -> ForeignNames:
    """The table, read once a process."""
    text = files("snugfit.techniques").joinpath("foreign_names.json").read_text(encoding="utf-8")
    return ForeignNames(**json.loads(text))


def advice(word: str) -> str | None:
    """What to write instead of `word` in a recipe; None when no library is known to call anything so."""
    names = foreign_names()
    if word.lower() in names.techniques:
        return names.techniques[word.lower()]
    if word == "batch_size":
        return "it is part of the job, not of the recipe; 'micro_batches(n)' cuts the batch into n pieces."
    if names.same.get(word, word) in {field.name for field in fields(Job)}:
        return "it is part of the job, not of the recipe."
    if word in names.keys:
        return f"this is an argument of another trainer, not a technique: {names.keys[word]}."
    return None
