"""Reading of another library's training configuration as a job and a recipe, with a list of each key and its
use.

    took      the key is used, with this meaning
    differs   the key is used, with a difference to its library
    ignored   the key is not used, because no byte or second of a step depends on it
    refused   snugfit has no such setting, but the key changes a step's memory or mathematics

The library's table translates all keys to common names (`techniques/counterpart.py`). The defaults of
`TrainingArguments` fill missing ones. Then the technique of each slot (such as the optimizer) is found from
the arguments. A key outside every table is refused too, because a guess could hide a relevant difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snugfit.errors import UsageError, did_you_mean, nearest
from snugfit.features.exchange import installed
from snugfit.features.exchange.account import Line, Reading
from snugfit.features.exchange.command_line import parse_pairs
from snugfit.features.exchange.dialect import Dialect, as_word, dialect, flatten
from snugfit.features.exchange.document import Document, open_documents
from snugfit.features.exchange.module_names import PATTERNS, TRAINED, read_names
from snugfit.features.exchange.processes import (
    BUCKET,
    BY,
    COPIES,
    GPUS,
    HOSTS,
    OF_THEIR_NUMBER,
    PER_HOST,
    RAW,
    SHARDS,
    STAGE,
    read_processes,
)
from snugfit.features.exchange.python.values import Unknown
from snugfit.job.inputs import has_sequence, has_target
from snugfit.job.job import Job
from snugfit.job.names import unquantized_name
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import advice
from snugfit.techniques.technique import Technique
from snugfit.techniques.translate import SlotReading, read_slots

MISSPELT = 0.9
"""Least similarity to a known key (0 to 1) at which an unknown key counts as misspelt. Below it, the key
counts as the user's own.
"""

MICRO_BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
BATCH_OF_GPU = "job.batch_of_gpu"
"""Argument with the samples per step on one GPU. The number of accumulation steps follows from it."""
PROMPT = "job.prompt_length"
"""Argument with the tokens of a prompt. A sequence is a prompt with its answer."""
_JOB = "job."


def read_arguments(
    paths: Path | Sequence[Path] | None,
    flags: Mapping[str, Any] | None = None,
    *,
    options: Collection[str] = (),
    gpus: int | None = None,
    bfloat16: bool | None = None,
) -> Reading:
    """Return the job and the recipe in a user's files and in transformers' arguments on the command line.

    The command line overrides the files, and a run's own file overrides its launcher's. `options` are
    arguments that become settings of the run itself. `gpus` overrides the number in the files. `bfloat16` is
    True if the named GPU supports it. Raises `UsageError` if the kind of file is unknown.

    A key without a counterpart raises nothing here: the result lists it in `refused`.
    """
    named = [paths] if isinstance(paths, Path) else list(paths or ())
    documents = open_documents(named, bfloat16=bfloat16) or [
        Document(path=Path("the command line"), format="shell", dialect="script", values={})
    ]
    return _Reader(documents, flags or {}, options, gpus).reading()


def read_request(flags: Mapping[str, Any], settings: dict[str, Any]) -> Reading | None:
    """Return the user's configuration file together with transformers' arguments among the flags.

    They override a job file and are added to `settings`. Return None without a file if the flags only concern
    the run. Raises `UsageError` for values that cannot be predicted, unless a flag or the job file overrides
    them. Raises it also for an argument that contradicts an option of snugfit.
    """
    from snugfit.cli.jobfile import settings_from, training_keys

    given = parse_pairs(flags.get("trainer_arguments") or ())
    options = training_keys() if "dataset" in flags else {}  # only commands that train have this option
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
    reading = replace(reading, unread=(*reading.unread, *_assumptions(reading, {**settings, **flags})))
    # This call only checks the values. Its result is not needed.
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
    """Builds the settings and the list of keys (`Reading`) from the configuration files of one run."""

    documents: Sequence[Document]
    """The user's configuration files. Those of the launcher come first, that of the training run last."""
    flags: Mapping[str, Any]
    options: Collection[str]
    named_gpus: int | None
    gpus: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[str, Any]] = field(default_factory=dict)
    tables: dict[str, Dialect] = field(default_factory=dict)
    """The dialect in which each argument's key was read, by argument."""
    settings: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    took: list[Line] = field(default_factory=list)
    differs: list[Line] = field(default_factory=list)
    ignored: list[Line] = field(default_factory=list)
    refused: list[Line] = field(default_factory=list)
    unread: list[Line] = field(default_factory=list)

    @property
    def document(self) -> Document:
        """The configuration file of the run itself, the last of `documents`."""
        return self.documents[-1]

    def reading(self) -> Reading:
        for document in self.documents:
            self._read(document)
        table = dialect(self.document.dialect)
        for key, value in self.flags.items():
            self._translate(key, value, dialect("script"), self.flags)
        if table.note:
            self.differs.append(Line(key=table.title, value="", says=table.note))
        self._unquantized_model()
        self._accumulation()
        self._fill_defaults(table)
        # Before the recipe, because some techniques follow from the number of processes.
        self._processes()
        decided = self._recipe()
        self._job()
        for key, value in self.arguments.items():
            if key in self.origins and key not in decided:
                self._account(key, value)
        self._loop(table.loop)
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

    def _read(self, document: Document) -> None:
        """Translate the keys of one configuration file to the common arguments of all libraries."""
        table = dialect(document.dialect)
        written = dict(flatten(_with_parts(document.values)))
        of_commands = dialect("script").unsaid if document.format == "shell" else {}
        # Only a shell command has a launcher, whose defaults then apply.
        unsaid = {key: value for key, value in of_commands.items() if key.startswith("launcher.")}
        given = {**unsaid, **table.unsaid, **written}
        for key, (other, factor) in table.multiples.items():
            if given.get(key) is None and isinstance(given.get(other), int):
                given[key] = factor * given[other]
        of_script = document.format == "python"
        # List elements come first, so that a separate key overrides them.
        for key in sorted(given, key=lambda key: f"{key}[]" not in table.becomes):
            of_key = dialect("script") if key.startswith("launcher.") else table
            if key in written or not of_key.idle(key, given):
                for name, value in _elements(key, given[key], of_key):
                    self._translate(name, value, of_key, given, of_script=of_script)
        for rule in table.together:
            if all(given.get(key) == value for key, value in rule["when"].items()):
                usual = rule.get("defaults", {}).items()
                unset = {name: value for name, value in usual if name not in self.arguments}
                self._add({**rule.get("becomes", {}), **unset}, next(iter(rule["when"].items())), table)

    def _add(
        self, arguments: Mapping[str, Any], origin: tuple[str, Any], table: Dialect | None = None
    ) -> None:
        """Add arguments that follow from one key of a file, `origin`, whose meaning `table` gives."""
        self.arguments |= arguments
        self.origins |= dict.fromkeys(arguments, origin)
        if table is not None:
            self.tables |= dict.fromkeys(arguments, table)

    def _unquantized_model(self) -> None:
        """Replace a hub name of a 4-bit bitsandbytes model by the 16-bit model with the technique qlora.

        Raise an error for names of other quantized models.
        """
        name = self.arguments.get("job.model")
        if not isinstance(name, str) or unquantized_name(name) is None:
            return
        origin = self.origins["job.model"]
        if "bnb-4bit" not in name.lower():
            says = "of quantized weights only those of bitsandbytes are predicted"
            job = "training on weights of this format"
            self._line(self.refused, *origin, says, instead="model", job=job)
            return
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        words = {f"model.quantization_config.{key}": value for key, value in bits.items()}
        self._add({"job.model": unquantized_name(name), **words}, origin)

    def _accumulation(self) -> None:
        """Set gradient accumulation to the quotient of the batch per GPU and the micro-batch, if a file gives
        both.
        """
        whole, origin = self.arguments.pop(BATCH_OF_GPU, None), self.origins.pop(BATCH_OF_GPU, None)
        micro = self.arguments.get(MICRO_BATCH)
        if origin is None:
            return
        if type(whole) is int and type(micro) is int and micro and ACCUMULATION not in self.arguments:
            self._add({ACCUMULATION: whole // micro}, origin)
        else:
            self._line(self.ignored, *origin, "the micro-batch and the accumulation set the batch")

    def _loop(self, loop: str) -> None:
        """Set the training loop in the settings. On several GPUs, DeepSpeed's engine is predicted in
        snugfit's plain loop only.
        """
        if self.gpus > 1 and STAGE in self.arguments and loop != "plain":
            key = self.origins.get(STAGE, (STAGE, ""))
            self._line(self.differs, *key, f"predicted in snugfit's own loop, not in that of the {loop}")
            loop = "plain"
        self.settings.setdefault("loop", loop)

    def _statements(self) -> None:
        """List a script's statements that are not read or not predicted, and the assumed defaults of its
        options.
        """
        for line, text in self.document.unread:
            self.unread.append(Line(key=f"line {line}", value=text, says="snugfit has no counterpart of it"))
        for line, text, why in self.document.refused:
            self.refused.append(Line(key=f"line {line}, {text}", value="", says=why, instead="recipe"))
        given = self.document.values
        unsure = [key for key in dialect(self.document.dialect).unsure if key not in given]
        if self.document.format in ("yaml", "json") and unsure and "fp16" not in given:
            says = "not given: the script that reads this file has a default of its own"
            self.unread.append(Line(key=", ".join(unsure), value="not given", says=says))
        for name, value in self.document.defaults.items():
            kind = "environment variable" if name.startswith("$") else "option of the script"
            self.took.append(Line(key=name, value=f"{as_word(value)} (default)", says=f"an {kind}"))

    def _translate(
        self, key: str, value: Any, table: Dialect, given: Mapping[str, Any], *, of_script: bool = False
    ) -> None:
        """Translate a key of a configuration file to the common arguments of all libraries, or list it as
        unused.
        """
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
        if meaning is None and (of_script or self._is_an_argument(key, table)):
            meaning = dialect("trainer").translate(key, value)
        if meaning is not None:
            # If a file has both the old and the new name of a key, the new one is used.
            newer = [name for name in meaning if name in given and given[name] is not None and name != key]
            self._add({name: one for name, one in meaning.items() if name not in newer}, (key, value), table)
            if note := table.difference(key, value):
                self._line(self.differs, key, value, note)
            return
        if note := table.difference(key, value):
            self._line(self.differs, key, value, note)
        elif table.of_trainer or of_script or self._is_an_argument(key, table):
            # None does not override a value from another key.
            if value is not None or key not in self.arguments:
                self._add({key: value}, (key, value), table)
        else:
            self._account_in(table, key, value)

    @staticmethod
    def _is_an_argument(key: str, table: Dialect) -> bool:
        """Return True if a key that is missing in the library's own table is one of `TrainingArguments`."""
        known = table.refusal(key) is None and table.reason_to_ignore(key) is None
        return known and key.split(".", maxsplit=1)[0] in installed.defaults()

    def _fill_defaults(self, table: Dialect) -> None:
        trainer = dialect("trainer")
        whole = {**installed.defaults(), **trainer.defaults, **table.defaults}
        for prefix, group in trainer.groups.items():
            if any(key.startswith(f"{prefix}.") for key in self.arguments):
                whole |= group
        whole |= {key: value for key, value in self.arguments.items() if not _unset(key, value, whole)}
        self.arguments = read_names(whole)
        for raw, key in ((TRAINED, "frozen.only"), *((f"{one}.", one) for one in PATTERNS)):
            # `read_names` has merged these keys into one, so the origin of their value moves there too.
            for name in [name for name in self.origins if name.startswith(raw)]:
                origin, table = self.origins.pop(name), self.tables.pop(name)
                self.origins.setdefault(key, origin)
                self.tables.setdefault(key, table)

    def _processes(self) -> None:
        """Replace the raw values on training processes by arguments of the parallel techniques."""
        said = {key: self.arguments[key] for key in self.origins if key in self.arguments}
        processes = read_processes(self.arguments, said, self.named_gpus)
        self.gpus = processes.gpus
        origins = {key: self.origins.pop(key) for key in RAW if key in self.origins}
        for key in RAW:
            self.arguments.pop(key, None)
        for name in ("refused", "differs", "unread"):
            pairs: list[tuple[str, str]] = getattr(processes, name)
            for key, says in pairs:
                instead = "gpus" if says in OF_THEIR_NUMBER else "recipe"
                origin = origins.get(key) or self.origins.get(key, (key, ""))
                self._line(getattr(self, name), *origin, says, instead=instead)
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
        self._add(processes.words, origin)
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Drop the arguments of parallel techniques (such as FSDP) that the run does not use."""
        for prefix, decides in (("parallel.", BY), (BUCKET, STAGE)):
            idle = [key for key in self.arguments if key.startswith(prefix) and decides not in self.arguments]
            for key in idle:
                self.arguments.pop(key)
                if key in self.origins:
                    self._line(self.ignored, *self.origins.pop(key), "nothing is shared with other processes")
        # JSON files may write a number of elements as 5e8.
        if isinstance(bucket := _number(self.arguments.get(BUCKET)), float) and bucket.is_integer():
            self.arguments[BUCKET] = int(bucket)

    def _recipe(self) -> set[str]:
        """Set the recipe (the technique of each slot) that the arguments describe. Return the names of the
        arguments that it covers.
        """
        techniques: list[Technique] = []
        decided: set[str] = set()
        if self.arguments.get("frozen") and self.arguments.get("lora.r") is not None:
            for key in [key for key in self.origins if key.partition(".")[0] == "frozen"]:
                says = "adapters freeze all other weights, so leave this or the adapters out"
                self._line(self.refused, *self.origins.pop(key), says)
        for slot in read_slots(self.arguments):
            own = [key for key in slot.keys if key in self.origins]
            decided |= set(own)
            if slot.technique is None:
                self.refused += self._unmet(slot)
                continue
            techniques.append(slot.technique)
            self._add_taken(slot, slot.technique, own)
        self.settings["recipe"] = str(Recipe(tuple(techniques)))
        return decided

    def _add_taken(self, slot: SlotReading, technique: Technique, own: list[str]) -> None:
        # A default is not listed, unless it decides a technique other than the plain one.
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
        """Yield the arguments of a slot (choice of a recipe, such as precision) that match none of its
        techniques.
        """
        blamed = [key for key in slot.keys if key in self.origins and not self._is_default(key)]
        unsure = [key for key in blamed if isinstance(self.origins[key][1], Unknown)]
        invalid = [key for key in blamed if key in slot.faults]
        for key in unsure or invalid or blamed or slot.keys[:1]:
            name, value = self.origins.get(key, (key, self.arguments.get(key)))
            if unsure:
                yield Line(key=name, value=str(value), says=_COMPUTED, instead="recipe")
                continue
            rest = [other for other in blamed if other != key]
            together = f" together with {', '.join(rest)}" if rest else ""
            names = ", ".join(one.name for one in roster.techniques() if one.slot is slot.slot)
            says = f"no {slot.slot} does this here{together}. Techniques there: {names}"
            hint = slot.faults.get(key) or (advice(value) if isinstance(value, str) else None)
            yield Line(key=name, value=as_word(value), says=hint or says, instead="recipe")

    def _job(self) -> None:
        for key in [name for name in self.arguments if name.startswith(_JOB)]:
            value = self.arguments.pop(key)
            name, given = self.origins.get(key, (key, value))
            if isinstance(value, Unknown):
                self._unknown_fact(key.removeprefix(_JOB), name, value)
                continue
            field_ = key.removeprefix(_JOB)
            self.settings[field_] = _number(value) if field_ in ("learning_rate", "clip") else value
            self.said_by[field_] = name
            self._line(self.took, name.removeprefix(_JOB), given, f"{field_} {self.settings[field_]}")
        self.said_by.pop(PROMPT.removeprefix(_JOB), None)
        if prompt := self.settings.pop(PROMPT.removeprefix(_JOB), 0):
            self.settings.setdefault("sequence_length", prompt + self.settings.get("completion_length", 0))
        self._batch()

    def _unknown_fact(self, key: str, name: str, value: Unknown) -> None:
        """Record that a setting of the job, such as the sequence length, is unknown because the script
        computes it.
        """
        if key == "learning_rate":
            self._line(self.ignored, name, value, "a hyperparameter: it changes no byte of a step")
        elif key == "labels":
            says = "it is computed while the script runs; the model's own number is assumed"
            self._line(self.unread, name, value, says)
        else:
            self._line(self.refused, name, value, _COMPUTED, instead=key)

    def _batch(self) -> None:
        """Set the global batch size: micro-batch x accumulation steps x GPUs."""
        micro, pieces = self.arguments.get(MICRO_BATCH), self.arguments.get(ACCUMULATION)
        name, given = self.origins.get(MICRO_BATCH, (MICRO_BATCH, micro))
        if micro is None:
            return
        if type(micro) is not int or type(pieces) is not int:
            unknown = isinstance(micro, Unknown) or isinstance(pieces, Unknown)
            says = _COMPUTED if unknown else "a batch must be a whole number of samples"
            self._line(self.refused, name, given, says, instead="batch_size")
            return
        # A global batch size in the file comes before this product. A contradiction is refused below.
        whole = self.settings.setdefault("batch_size", micro * pieces * self.gpus)
        gpus = "one GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        if whole != micro * pieces * self.gpus:
            of_all = "" if self.gpus == 1 else f" on each of {gpus}"
            says = f"{micro} samples in {pieces} micro-batches{of_all} are not the global batch of {whole}"
            self._line(self.refused, name, given, says, instead="batch_size")
        else:
            default = "" if MICRO_BATCH in self.origins else " (default)"
            if not default:
                self.said_by["batch_size"] = name
            self._line(self.took, name, f"{as_word(given)}{default}", f"batch_size {whole} on {gpus}")

    def _account(self, key: str, value: Any) -> None:
        """Record the use of an argument without effect on the job or recipe: it is a default, is ignored, or
        is not supported.
        """
        name, given = self.origins[key]
        if key in (MICRO_BATCH, ACCUMULATION) or key.startswith(_JOB) or self._is_default(key):
            return
        table = self.tables.get(key, dialect(self.document.dialect))
        self._account_in(table if table.of_trainer else dialect("trainer"), key, value, name, given)

    def _account_in(
        self, table: Dialect, key: str, value: Any, name: str | None = None, given: Any = None
    ) -> None:
        name, given = (name, given) if name else (key, value)
        refusal = table.refusal(key)
        # In Python, True == 1, so types are compared too.
        if refusal and not any(value == one and type(value) is type(one) for one in refusal["but"]):
            unsure = ". Its value is computed while the script runs"
            says = refusal["why"] + (unsure if isinstance(value, Unknown) else "")
            job = refusal.get("job", "")
            instead = refusal.get("instead", "" if job else "recipe")
            self._line(self.refused, name, given, says, instead=instead, job=job)
        elif reason := table.reason_to_ignore(key):
            self._line(self.ignored, name, given, reason)
        elif refusal is None:
            self._unknown(table, key, name, given)

    def _unknown(self, table: Dialect, key: str, name: str, given: Any) -> None:
        """List a key that is in no table as unknown. If its name mentions memory, it is refused."""
        known = [*installed.defaults(), *table.words(), *dialect("trainer").words()]
        near = nearest(key, known, cutoff=MISSPELT) if key not in known else []
        guess = did_you_mean(key, near or known) if key not in known else ""
        says = f"snugfit does not know this key.{guess}"
        if near and table.of_trainer and self.document.dialect not in ("script", "loop"):
            # `TrainingArguments` would refuse this key too.
            self._line(self.refused, name, given, says, instead="")
        elif given in (None, False, "", "None", "null") or given in ([], {}):
            self._line(self.ignored, name, given, "it is empty or off, and sets nothing")
        elif _OF_MEMORY.search(key.lower()):
            self._line(self.refused, name, given, says)
        else:
            self._line(self.unread, name, given, says)

    def _is_default(self, key: str) -> bool:
        """Return True if an argument in a configuration file has its default value."""
        value = self.origins[key][1] if self.origins[key][0] == key else self.arguments.get(key)
        known = {**installed.defaults(), **dialect("trainer").defaults}
        return key in known and (value == known[key] or _unset(key, value, known))

    @staticmethod
    def _line(
        lines: list[Line], key: str, value: Any, says: str, *, instead: str = "recipe", job: str = ""
    ) -> None:
        shown = str(value) if isinstance(value, Unknown) else as_word(value)
        lines.append(Line(key=key, value=shown, says=says, instead=instead, job=job))


def _assumptions(reading: Reading, given: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the sizes, such as the sequence length, that snugfit assumes because neither the files nor the
    user set them.
    """
    task = str(given.get("task") or reading.settings.get("task") or "")
    sizes = (
        ("sequence_length", bool(task) and has_sequence(task), "tokens", "lengths"),
        ("target_length", bool(task) and has_target(task), "tokens", ""),
        ("batch_size", "model" in reading.settings, "samples", "largest"),
    )
    for size, is_needed, unit, otherwise in sizes:
        named = any(given.get(key) is not None for key in (size, otherwise, "job_file"))
        if is_needed and not named and size not in reading.settings:
            assumed = f"{getattr(Job, size)} {unit}"
            says = f"not in this file: {assumed} are assumed; set --{size.replace('_', '-')}"
            yield Line(key=size.replace("_", " "), value="not given", says=says)


def _has_bfloat16(gpu: Any) -> bool | None:
    """Return True if the named GPU supports bfloat16; None without a named GPU."""
    if gpu is None:
        return None
    from snugfit.job.gpu import find_gpu

    capability = find_gpu(gpu).compute_capability
    # Ampere (compute capability 8.0) is the first generation with bfloat16 units.
    return None if capability is None else capability >= (8, 0)


def _elements(key: str, value: Any, table: Dialect) -> Iterator[tuple[str, Any]]:
    """Yield a key with its value. If the table translates list elements, yield the key with each element."""
    of_each = f"{key}[]"
    if isinstance(value, list) and of_each in table.becomes:
        yield from ((of_each, one) for one in value)
    else:
        yield key, value


_OF_MEMORY = re.compile(
    r"4bit|8bit|16bit|quant|lora|peft|flash|attn|attention|liger|offload|checkpoint|fsdp|deepspeed|tokens|resize|pack|"
    r"freeze|frozen|bf16|fp16|fp8|zero|parallel|expert|compile"
)
"""Words in the names of keys that concern memory. An unknown key with one of them is refused."""

_COMPUTED = "it is computed while the script runs. Set it with a flag, or write the value"


def _with_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' arguments with the text of `optim_args` split into its settings.

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
    """Convert a configuration's text to a number. PyYAML reads `1e-5` as text, which the libraries convert
    later.
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _unset(key: str, value: Any, known: Mapping[str, Any]) -> bool:
    """Return True if a key's value is None and its default is not, as in a file of `to_json_string`. Such a
    key counts as unset.
    """
    return value is None and known.get(key) is not None
