"""A user's configuration as a job and a recipe to start from, with an account of every key.

    took      its meaning here
    differs   taken, with a difference here
    ignored   not taken, and why no byte or second of a step depends on it
    refused   without a counterpart, though it changes the memory or the mathematics of a step

All keys pass through one vocabulary (`techniques/counterpart.py`). The dialect's table translates keys into
it, and `TrainingArguments`' own defaults fill missing ones. Then the techniques of each slot are matched with
the arguments. A key outside every table is refused too, because a guess could hide a relevant difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snugfit.errors import UsageError, did_you_mean
from snugfit.features.exchange import installed
from snugfit.features.exchange.account import Line, Reading
from snugfit.features.exchange.command_line import parse_pairs
from snugfit.features.exchange.dialect import Dialect, as_word, dialect, flatten
from snugfit.features.exchange.document import Document, open_document
from snugfit.features.exchange.processes import (
    BY,
    COPIES,
    GPUS,
    HOSTS,
    OF_THEIR_NUMBER,
    PER_HOST,
    RAW,
    SHARDS,
    read_processes,
)
from snugfit.features.exchange.python.values import Unknown
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import advice
from snugfit.techniques.technique import Technique
from snugfit.techniques.translate import SlotReading, read_slots

MICRO_BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_JOB = "job."


def read_arguments(
    path: Path | None,
    flags: Mapping[str, Any] | None = None,
    *,
    options: Collection[str] = (),
    gpus: int | None = None,
    bfloat16: bool | None = None,
) -> Reading:
    """Return the job and the recipe in a user's file and in transformers' arguments on the command line.

    The command line overrides the file. `options` are the arguments that the run itself uses, and that become
    settings. `gpus` overrides the number in the file. `bfloat16` is the named GPU's support for it. Raises `UsageError` if the kind of file is unknown.

    A key without a counterpart raises nothing here: the result lists it in `refused`.
    """
    document = Document(path=Path("the command line"), format="shell", dialect="script", values={})
    document = open_document(path, bfloat16=bfloat16) if path else document
    return _Reader(document, flags or {}, options, gpus).reading()


def read_request(flags: Mapping[str, Any], settings: dict[str, Any]) -> Reading | None:
    """Return the user's own configuration, and transformers' arguments among the flags.

    They override a job file, and `settings` receives them. Without a configuration file, arguments for the
    run alone give None. Raises `UsageError` for values that cannot be predicted, unless a flag or the job
    file overrides them. An argument that contradicts one of ours raises it too.
    """
    from snugfit.cli.jobfile import settings_from, training_keys

    given = parse_pairs(flags.get("trainer_arguments") or ())
    options = training_keys() if "dataset" in flags else {}  # which only a command has that trains
    settings |= settings_from({key: given.pop(key) for key in [*given] if key in options}, "command line")
    if not given and not flags.get("arguments_file"):
        return None
    gpus = settings.get("gpus")
    reading = read_arguments(
        flags.get("arguments_file"),
        given,
        options=options,
        gpus=gpus if type(gpus) is int else None,
        bfloat16=_has_bfloat16(settings.get("gpu")),
    )
    reading.refuse(settings)
    settings_from({key: reading.settings[key] for key in options if key in reading.settings}, reading.path)
    for key, name in reading.by_flags.items():
        said_twice = flags.get(key) is not None or key == "recipe"
        if said_twice and settings.get(key, reading.settings[key]) != reading.settings[key]:
            raise UsageError(
                f"--{name} {given[name]} and {key.replace('_', ' ')} {settings[key]} contradict each other."
                " Give one of them."
            )
        settings[key] = reading.settings[key]
    return reading


@dataclass
class _Reader:
    """Builder of a `Reading` from one file."""

    document: Document
    flags: Mapping[str, Any]
    options: Collection[str]
    named_gpus: int | None
    gpus: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    took: list[Line] = field(default_factory=list)
    differs: list[Line] = field(default_factory=list)
    ignored: list[Line] = field(default_factory=list)
    refused: list[Line] = field(default_factory=list)
    unread: list[Line] = field(default_factory=list)

    def reading(self) -> Reading:
        table = dialect(self.document.dialect)
        written = dict(flatten(_with_parts(self.document.values)))
        given = {**table.unsaid, **written}
        for key, value in given.items():
            if key in written or not table.idle(key, given):
                self._translate(key, value, table, given)
        for rule in table.together:
            if all(given.get(key) == value for key, value in rule["when"].items()):
                origin = next(iter(rule["when"].items()))
                self.arguments |= rule["becomes"]
                self.origins |= dict.fromkeys(rule["becomes"], origin)
        for key, value in self.flags.items():
            self._translate(key, value, dialect("script"), self.flags)
        if table.note:
            self.differs.append(Line(key=table.title, value="", says=table.note))
        self._fill_defaults(table)
        self._processes()
        decided = self._recipe()
        self._job()
        for key, value in self.arguments.items():
            if key in self.origins and key not in decided:
                self._account(key, value)
        self.settings.setdefault("loop", table.loop)
        self._statements()
        return Reading(
            path=str(self.document.path),
            title=table.title,
            export=table.export,
            settings=self.settings,
            by_flags={key: name for key, name in self.said_by.items() if name in self.flags},
            took=tuple(dict.fromkeys(self.took)),
            differs=tuple(dict.fromkeys(self.differs)),
            ignored=tuple(dict.fromkeys(self.ignored)),
            refused=tuple(dict.fromkeys(self.refused)),
            unread=tuple(dict.fromkeys(self.unread)),
        )

    def _statements(self) -> None:
        """Add a script's statements that are not read or not predicted, and the defaults of its options."""
        for line, text in self.document.unread:
            self.unread.append(Line(key=f"line {line}", value=text, says="it has no counterpart here"))
        for line, text, why in self.document.refused:
            self.refused.append(Line(key=f"line {line}, {text}", value="", says=why, instead="recipe"))
        for name, value in self.document.defaults.items():
            kind = "environment variable" if name.startswith("$") else "option of the script"
            self.took.append(Line(key=name, value=f"{as_word(value)} (default)", says=f"an {kind}"))

    def _translate(self, key: str, value: Any, table: Dialect, given: Mapping[str, Any]) -> None:
        """Add a key to the common vocabulary, or to one of the accounts."""
        if key in self.options:
            self.settings[key] = value
            self._line(self.took, key, value, f"{key} of the run")
            return
        if table.auto and value == "auto":
            self._line(self.ignored, key, value, f"auto is {table.auto}")
            return
        if needed := table.idle(key, given):
            self._line(self.ignored, key, value, f"it has no effect without {needed}")
            return
        meaning = table.translate(key, value)
        of_script = self.document.format == "python" and key not in self.flags
        if meaning is None and (of_script or self._is_an_argument(key, table)):
            meaning = dialect("trainer").translate(key, value)
        if meaning is not None:
            newer = [name for name in meaning if name in given and given[name] is not None and name != key]
            for name, one in meaning.items():
                if name not in newer:
                    self.arguments[name], self.origins[name] = one, (key, value)
            if note := table.differs.get(key, {}).get(as_word(value)):
                self._line(self.differs, key, value, note)
            return
        if note := table.differs.get(key, {}).get(as_word(value)):
            self._line(self.differs, key, value, note)
        elif table.of_trainer or of_script or self._is_an_argument(key, table):
            if value is not None or key not in self.arguments:
                self.arguments[key], self.origins[key] = value, (key, value)
        else:
            self._account_in(table, key, value)

    @staticmethod
    def _is_an_argument(key: str, table: Dialect) -> bool:
        """Return True if a key that another dialect's own table lacks is one of `TrainingArguments`."""
        known = table.refusal(key) is None and table.reason_to_ignore(key) is None
        return known and key.split(".", maxsplit=1)[0] in installed.defaults()

    def _fill_defaults(self, table: Dialect) -> None:
        trainer = dialect("trainer")
        whole = {**installed.defaults(), **trainer.defaults, **table.defaults}
        for prefix, group in trainer.groups.items():
            if any(key.startswith(f"{prefix}.") for key in self.arguments):
                whole |= group
        whole |= {key: value for key, value in self.arguments.items() if not _unset(key, value, whole)}
        for key in ("lora.target_modules", "optim_target_modules"):
            if key in whole:
                whole[key] = _names(whole[key], is_pattern=key == "optim_target_modules")
        self.arguments = whole

    def _processes(self) -> None:
        """Replace the raw words about processes by the arguments that follow from them."""
        said = {key: self.arguments[key] for key in self.origins if key in self.arguments}
        processes = read_processes(self.arguments, said, self.named_gpus)
        self.gpus = processes.gpus
        origins = {key: self.origins.pop(key) for key in RAW if key in self.origins}
        for key in RAW:
            self.arguments.pop(key, None)
        for lines, pairs in ((self.refused, processes.refused), (self.differs, processes.differs)):
            for key, says in pairs:
                instead = "gpus" if says in OF_THEIR_NUMBER else "recipe"
                self._line(lines, *origins.get(key, (key, "")), says, instead=instead)
        counted = next((origins[key] for key in (GPUS, PER_HOST, SHARDS) if key in origins), None)
        if self.gpus > 1:
            self.settings["gpus"] = self.gpus
            if counted and self.named_gpus is None:
                self._line(self.took, *counted, f"{self.gpus} GPUs")
                self.said_by["gpus"] = counted[0]
        elif counted and not processes.refused:
            self._line(self.ignored, *counted, "it is one GPU")
        wrong = {key for key, _ in processes.refused}
        for key in (HOSTS, COPIES, SHARDS):
            if key in origins and origins[key] != counted and key not in wrong:
                self._line(self.took, *origins[key], f"of {self.gpus} GPUs")
        if BY in origins and not processes.words and not wrong and self.gpus == 1:
            self._line(self.ignored, *origins[BY], "it is one GPU")
        origin = origins.get(processes.asked_by) or counted or ("gpus", self.gpus)
        self.arguments |= processes.words
        self.origins |= dict.fromkeys(processes.words, origin)
        if BY not in processes.words:  # other keys about it have no effect
            for key in [key for key in self.arguments if key.startswith("parallel.")]:
                self.arguments.pop(key)
                if key in self.origins:
                    self._line(self.ignored, *self.origins.pop(key), "nothing is shared with other processes")

    def _recipe(self) -> set[str]:
        """Set the recipe in the settings, and return the arguments that decided it."""
        techniques: list[Technique] = []
        decided: set[str] = set()
        for slot in read_slots(self.arguments):
            own = [key for key in slot.keys if key in self.origins]
            decided |= set(own)
            if slot.technique is None:
                self.refused += self._unmet(slot)
                continue
            techniques.append(slot.technique)
            self._tell(slot, slot.technique, own)
        self.settings["recipe"] = str(Recipe(tuple(techniques)))
        return decided

    def _tell(self, slot: SlotReading, technique: Technique, own: list[str]) -> None:
        asked = [key for key in own if not self._is_default(key)] or ([] if technique.plain else own)
        for key in asked:
            self._line(self.took, *self.origins[key], str(technique))
            self.said_by["recipe"] = self.origins[key][0]
            if slot.note:
                self._line(self.differs, *self.origins[key], slot.note)
        if not own and not technique.plain:
            key = slot.keys[0]
            self.took.append(Line(key=key, value=f"{as_word(self.arguments[key])} (default)",
                                  says=str(technique)))  # fmt: skip

    def _unmet(self, slot: SlotReading) -> Iterator[Line]:
        """Yield the arguments for which no technique of this slot matches."""
        blamed = [key for key in slot.keys if key in self.origins and not self._is_default(key)]
        unsure = [key for key in blamed if isinstance(self.origins[key][1], Unknown)]
        for key in unsure or blamed or slot.keys[:1]:
            name, value = self.origins.get(key, (key, self.arguments.get(key)))
            if unsure:
                yield Line(key=name, value=str(value), says=_COMPUTED, instead="recipe")
                continue
            rest = [other for other in blamed if other != key]
            together = f" together with {', '.join(rest)}" if rest else ""
            names = ", ".join(one.name for one in roster.techniques() if one.slot is slot.slot)
            says = f"no {slot.slot} here does this{together}. There are {names}"
            hint = advice(value) if isinstance(value, str) else None
            yield Line(key=name, value=as_word(value), says=hint or says, instead="recipe")

    def _job(self) -> None:
        for key in [name for name in self.arguments if name.startswith(_JOB)]:
            value = self.arguments.pop(key)
            name, given = self.origins.get(key, (key, value))
            if isinstance(value, Unknown):
                field_ = key.removeprefix(_JOB)
                self.refused.append(Line(key=name, value=str(value), says=_COMPUTED, instead=field_))
                continue
            field_ = key.removeprefix(_JOB)
            self.settings[field_] = _number(value) if field_ in ("learning_rate", "clip") else value
            self.said_by[field_] = name
            self._line(self.took, name.removeprefix(_JOB), given, f"{field_} {self.settings[field_]}")
        self._batch()

    def _batch(self) -> None:
        """Set the global batch: micro-batch x accumulation, on each GPU."""
        micro, pieces = self.arguments.get(MICRO_BATCH), self.arguments.get(ACCUMULATION)
        name, given = self.origins.get(MICRO_BATCH, (MICRO_BATCH, micro))
        if micro is None:
            return
        if type(micro) is not int or type(pieces) is not int:
            unknown = isinstance(micro, Unknown) or isinstance(pieces, Unknown)
            says = _COMPUTED if unknown else "a batch must be a whole number of samples"
            self._line(self.refused, name, given, says, instead="batch_size")
            return
        whole = self.settings.setdefault("batch_size", micro * pieces * self.gpus)
        gpus = "one GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        if whole != micro * pieces * self.gpus:
            of_all = "" if self.gpus == 1 else f" on each of {gpus}"
            says = f"{micro} in {pieces} pieces{of_all} is not the global batch of {whole}"
            self._line(self.refused, name, given, says, instead="batch_size")
        else:
            default = "" if MICRO_BATCH in self.origins else " (default)"
            if not default:
                self.said_by["batch_size"] = name
            self._line(self.took, name, f"{as_word(given)}{default}", f"batch_size {whole} on {gpus}")

    def _account(self, key: str, value: Any) -> None:
        """Add an argument that decided nothing to the account: a default, an ignored key, or a refused
        one."""
        name, given = self.origins[key]
        if key in (MICRO_BATCH, ACCUMULATION) or key.startswith(_JOB) or self._is_default(key):
            return
        table = dialect(self.document.dialect)
        table = dialect("script") if name in self.flags else table
        self._account_in(table if table.of_trainer else dialect("trainer"), key, value, name, given)

    def _account_in(
        self, table: Dialect, key: str, value: Any, name: str | None = None, given: Any = None
    ) -> None:
        name, given = (name, given) if name else (key, value)
        refusal = table.refusal(key)
        if refusal and not any(value == one and type(value) is type(one) for one in refusal["but"]):
            unsure = ". Whether it is on is computed while the script runs"
            says = refusal["why"] + (unsure if isinstance(value, Unknown) else "")
            self._line(self.refused, name, given, says)
        elif reason := table.reason_to_ignore(key):
            self._line(self.ignored, name, given, reason)
        elif (
            refusal is None
            and table.unknown_keys
            and key.split(".", maxsplit=1)[0] not in installed.defaults()
        ):
            self._line(self.ignored, name, given, table.unknown_keys)
        elif refusal is None:
            known = [*installed.defaults(), *table.words(), *dialect("trainer").words()]
            guess = did_you_mean(key, known) if key not in known else ""
            self._line(self.refused, name, given, f"snugfit does not know this key.{guess}")

    def _is_default(self, key: str) -> bool:
        """Return True if an argument sets a value that is the default anyway."""
        value = self.origins[key][1] if self.origins[key][0] == key else self.arguments.get(key)
        known = {**installed.defaults(), **dialect("trainer").defaults}
        return key in known and (value == known[key] or _unset(key, value, known))

    @staticmethod
    def _line(lines: list[Line], key: str, value: Any, says: str, *, instead: str = "recipe") -> None:
        shown = str(value) if isinstance(value, Unknown) else as_word(value)
        lines.append(Line(key=key, value=shown, says=says, instead=instead))


def _has_bfloat16(gpu: Any) -> bool | None:
    """Return the named GPU's support for bfloat16; None without a named GPU."""
    if gpu is None:
        return None
    from snugfit.job.gpu import find_gpu

    return find_gpu(gpu).capability >= (8, 0)


_COMPUTED = "it is computed while the script runs. Set it with a flag, or write the value"


def _names(value: Any, *, is_pattern: bool) -> Any:
    """Return the names of modules, one by one.

    A text that transformers reads as a pattern (`is_pattern`) stays a text, except its word for all linear
    layers.
    """
    if isinstance(value, str) and is_pattern:
        word = value.replace("_", "-")
        return (word,) if word == "all-linear" else value
    if isinstance(value, list | str):
        return tuple(map(str, value.split(",") if isinstance(value, str) else value))
    return value


def _with_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with `optim_args` in parts.

    transformers stores `momentum=0.9,nesterov=true` in one text.
    """
    parts = values.get("optim_args")
    if not isinstance(parts, str) or "=" not in parts:
        return dict(values)
    pairs = (part.partition("=")[::2] for part in parts.replace(" ", "").split(","))
    return {
        **values,
        "optim_args": {name: int(value) if value.isdecimal() else _number(value) for name, value in pairs},
    }


def _number(value: Any) -> Any:
    """Return the number that a text contains: PyYAML reads `1e-5` as text, and the libraries convert it
    later."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _unset(key: str, value: Any, known: Mapping[str, Any]) -> bool:
    """Return True for None in place of a default: a file that `to_json_string` wrote is full of these."""
    return value is None and known.get(key) is not None
