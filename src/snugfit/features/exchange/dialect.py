"""Tables of the keys in other libraries' configuration files (dialects), one file for each library in
`dialects/`.

A table translates a library's keys into common names. They are transformers' arguments by dotted name
(`techniques/counterpart.py`), and `job.*` for fields of the training job. A table also lists keys that
snugfit ignores, and keys that it refuses, each with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

DIALECTS = (
    "axolotl", "llamafactory", "accelerate", "deepspeed", "sft", "dpo", "reward", "kto", "orpo", "cpo",
    "rloo", "grpo", "script", "trainer", "loop",
)  # fmt: skip
"""Names of the dialects (libraries with their own keys) in the order in which a file is compared with them.
Those with the most specific keys come first.
"""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The keys of one library's configuration files, and their meaning for snugfit."""

    title: str
    """Name of this kind of file in messages."""

    source: str
    """Documentation or source code that this table of keys was written from."""

    loop: str
    """Name of the training loop that runs such a file."""

    known_by: list[str]
    """Top-level keys that identify such a file: keys that only it has, or that every one has."""

    becomes: Mapping[str, Any]
    """Meaning of each key: another key, or the resulting arguments by value. The value `*` matches any other
    one.
    """

    ignored: Mapping[str, list[str]]
    """Keys without effect on memory and time, by the reason."""

    refused: list[dict[str, Any]]
    """Keys that snugfit refuses.

    `keys` are patterns of `fnmatch`, `but` lists values without effect, and `why` is the reason. `job` names
    a training method that is not predicted. `instead` is the flag that replaces a method.
    """

    only_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys without effect unless another key has a certain value. Each key, with the keys and values that it
    needs; both may be patterns.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that are used if a key is missing, in addition to the defaults of `TrainingArguments`."""

    export: str = ""
    """Value of `snugfit export --to` for users of such a file; empty for `hf`."""

    four_bits: Mapping[str, Any] = field(default_factory=dict)
    """Parts of module names with special treatment if weights are in 4 bits, by `model_type` (`*` for any
    other). `recast`: embeddings and heads that are cast back to the dtype of the computation. `whole`: layers
    that stay unquantized.
    """

    together: list[dict[str, Any]] = field(default_factory=list)
    """Meanings of several keys together. If all values of `when` are present, the arguments of `becomes` are
    added, and those of `defaults` that no key has set.
    """

    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults that are used if any key of a group is present, by group."""

    differs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Differences between the library's and snugfit's meaning, by key and value."""

    auto: str = ""
    """Meaning of the value `auto`; empty without a special meaning."""

    extends: str = ""
    """Another dialect whose keys may also appear in such files; empty for none."""

    unsaid: Mapping[str, Any] = field(default_factory=dict)
    """Values that the library uses for keys that are missing in the file."""

    multiples: Mapping[str, Any] = field(default_factory=dict)
    """Another key and a factor for keys that are missing in the file: the value is their product."""

    unsure: list[str] = field(default_factory=list)
    """Keys whose defaults depend on the user's training script."""

    note: str = ""
    """Difference between the library and snugfit that applies to every such file; empty for none."""

    @property
    def of_trainer(self) -> bool:
        """Return True if most keys of this library's configuration are `TrainingArguments`."""
        return self is dialect("trainer") or bool(self.extends)

    def translate(self, key: str, value: Any) -> dict[str, Any] | None:
        """Return this configuration key and value as `TrainingArguments`, by name; None if there is no
        translation.
        """
        meaning = self.becomes.get(key)
        if isinstance(meaning, str):
            return {meaning: value}
        if meaning is not None and (written := as_word(value)) in meaning:
            return dict(meaning[written])
        if meaning is not None and "*" in meaning:
            other = meaning["*"]
            return dict(other) if isinstance(other, Mapping) else {other: value}
        is_grouped = value is not None and any(key in group for group in self.groups.values())
        return {key: value} if is_grouped else None

    def difference(self, key: str, value: Any) -> str | None:
        """Return the difference between a configuration key's meaning in its library and in snugfit. In the
        table, `*` matches any value that is not empty.
        """
        notes = self.differs.get(key, {})
        return notes.get(as_word(value)) or (notes.get("*") if value else None)

    def idle(self, key: str, document: Mapping[str, Any]) -> str | None:
        """Return the other setting, as `key = value`, without which this key has no effect. Return None if
        the key has an effect.
        """
        for pattern, needed in self.only_with.items():
            # A key may match the pattern and be the required key. It does not require itself.
            if fnmatchcase(key, pattern) and key not in needed:
                for other, value in needed.items():
                    values = value if isinstance(value, list) else [value]
                    if not any(fnmatchcase(name, other) and document[name] in values for name in document):
                        return f"{other} = {' or '.join(map(as_word, values))}"
        return None

    def reason_to_ignore(self, key: str) -> str | None:
        """Return the reason why snugfit may ignore this configuration key; None when it may not."""
        return next((why for why, keys in self.ignored.items() if _matches(key, keys)), None)

    def refusal(self, key: str) -> Mapping[str, Any] | None:
        """Return the table's entry for a refused configuration key, with the reason; None for other keys."""
        return next((one for one in self.refused if _matches(key, one["keys"])), None)

    def words(self) -> list[str]:
        """Return all exact keys of the table, with which a misspelt key is compared. Patterns are left
        out.
        """
        lists = [*self.ignored.values(), *(one["keys"] for one in self.refused), list(self.becomes)]
        return sorted({key for keys in lists for key in keys if "*" not in key})


@cache
def dialect(name: str) -> Dialect:
    """Return the table of configuration keys for the library called `name`, read once per process.

    Keys that are refused for the Trainer are refused in every library that has its arguments.
    """
    table = dict(load_table(name))
    if "extends" in table:
        base = dialect(table["extends"])
        for key in ("becomes", "defaults", "groups", "differs", "only_with", "unsaid"):
            table[key] = {**getattr(base, key), **table.get(key, {})}
        table["together"] = [*base.together, *table.get("together", ())]
        own = table.get("ignored", {})
        table["ignored"] = own | {why: [*own.get(why, ()), *keys] for why, keys in base.ignored.items()}
        table["refused"] = [*table.get("refused", ()), *base.refused]
    return Dialect(**table)


def recognise(document: Mapping[str, Any]) -> str | None:
    """Return the name of the library whose configuration files have these top-level keys; None if no library
    has them.
    """
    return next((name for name in DIALECTS if set(dialect(name).known_by) & set(document)), None)


def flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry of a nested mapping, in order. A list is a value, and
    so is an empty mapping.
    """
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def every_key(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys of a nested mapping, nested ones with dots, each with its value."""
    for key, value in document.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from every_key(value, f"{prefix}{key}.")


def as_word(value: Any) -> str:
    """Return a configuration value as text for tables and messages: text unchanged, the rest as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def _matches(key: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


@cache
def load_table(name: str) -> Any:
    """Return the content of a JSON file in the folder `dialects/`, which is read once per process."""
    file = files("snugfit.features.exchange").joinpath("dialects", f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def words_of(table: str) -> Any:
    """Return one table of `dialects/names.json`, which has names of libraries, tools and commands."""
    return load_table("names")[table]
