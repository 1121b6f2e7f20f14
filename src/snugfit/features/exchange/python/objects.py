"""Classification of a script's objects (such as model, trainer or optimizer), and of the statements that
change them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from snugfit.features.exchange.dialect import dialect, words_of
from snugfit.features.exchange.python.evaluate import USUAL_NAMES
from snugfit.features.exchange.python.values import Assignment, Class, ForeignCall, Member, Name, Unknown
from snugfit.job.architectures import class_names, heads, model_types
from snugfit.job.inputs import added_task

MODEL, PART, TRAINER, OPTIMIZER = "model", "part of the model", "trainer", "optimizer"
TOKENIZER, LOADER, ACCELERATOR = "tokenizer", "loader", "accelerator"

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
"""Classes of unsloth that create models by `from_pretrained` and `get_peft_model`."""

LIGER = "AutoLigerKernelForCausalLM"

LOADERS = ("from_pretrained", "from_config", "_from_config")

OF_PREFERENCES = ("DPO", "Reward", "KTO", "ORPO", "CPO", "GRPO", "RLOO")
"""First parts of the names of TRL's classes for training on preferences and on generated answers."""

TRAINERS = (
    "Trainer", "Seq2SeqTrainer", "SFTTrainer", "UnslothTrainer", *(f"{one}Trainer" for one in OF_PREFERENCES)
)  # fmt: skip
"""Trainer classes whose training step is that of transformers' Trainer."""

ARGUMENTS = (
    "TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "UnslothTrainingArguments",
    *(f"{one}Config" for one in OF_PREFERENCES),
)  # fmt: skip


def kind_of(value: Any) -> str:
    """Return the role of an object in a training script, such as `model` or `trainer`; empty for any other
    object.
    """
    if isinstance(value, ForeignCall):
        if isinstance(value.function, Name) and value.function.last in words_of("lists"):
            return PART if any(kind_of(one) in (MODEL, PART) for one in value.positional) else ""
        return _kind_of_method(value) if isinstance(value.function, Member) else _kind_of_function(value)
    if isinstance(value, Unknown):
        return value.text if value.text in USUAL_NAMES else ""
    return _kind_of_member(value) if isinstance(value, Member) else ""


def may_be_part(value: Any) -> bool:
    """Return True if a value of the script may belong to the model: it comes from an unknown object or a
    list.
    """
    while isinstance(value, Member | ForeignCall):
        value = value.of if isinstance(value, Member) else value.function
    return isinstance(value, Unknown | list | tuple | dict)


def _kind_of_member(member: Member) -> str:
    of = member.of
    if isinstance(of, ForeignCall) and member.name.startswith("["):
        # accelerate's `prepare` returns its arguments in their order.
        prepared = of.name == "prepare" and kind_of(of.of) == ACCELERATOR
        number = member.name.strip("[]")
        if prepared:
            return kind_of(of.positional[int(number)]) if number.isdecimal() and of.positional else ""
        # unsloth's `from_pretrained` returns the model and its tokenizer.
        if of.owner in UNSLOTH:
            return MODEL if number == "0" else TOKENIZER
    kind = kind_of(of)
    if (kind, member.name) in ((TRAINER, "model"), (MODEL, "module")):
        return MODEL
    return PART if kind in (MODEL, PART) else ""


def _kind_of_method(call: ForeignCall) -> str:
    of = kind_of(call.of)
    if of == ACCELERATOR:
        passes_on = call.name in words_of("wrappers") or (
            call.name == "prepare" and len(call.positional) == 1
        )
        return kind_of(call.positional[0]) if passes_on and call.positional else ""
    if of == MODEL:
        return MODEL if call.name in words_of("methods of a model") else PART
    return of if of == PART else ""


def _kind_of_function(call: ForeignCall) -> str:
    if isinstance(call.function, Class):
        return TRAINER if base_trainer(call.function) else ""
    if call.owner in UNSLOTH or model_class(call):
        return MODEL
    if call.name in words_of("wrappers"):
        first = call.arguments[:1]
        return kind_of(first[0]) if first else ""
    if call.name == "from_pretrained" and call.owner.endswith(tuple(words_of("tokenizers"))):
        return TOKENIZER
    # A trainer of the package tokenizers trains a tokenizer.
    if call.library == "tokenizers":
        return ""
    kinds = {"Accelerator": ACCELERATOR, "DataLoader": LOADER}
    return TRAINER if call.name.endswith("Trainer") else kinds.get(call.name, OPTIMIZER * is_optimizer(call))


def base_trainer(script_class: Class) -> str:
    """Return the library's trainer class from which a class of the script derives; empty if there is none."""
    return next((name for name in script_class.library_bases if name.endswith("Trainer")), "")


def dialect_of(name: str) -> str:
    """Return the dialect (table of keys) of a trainer or of a class of its arguments, by the class's name."""
    stem = name.removesuffix("Trainer").removesuffix("Config")
    tables: dict[str, str] = words_of("dialects of trainers")
    return tables.get(stem, "trainer")


OF_LOSSES = ("beta", "loss_type", "max_length", "simpo_gamma", "precompute_ref_log_probs")
"""Arguments of older trainers on preferences that are read."""


def preferences_of(trainer: ForeignCall | None, name: str) -> dict[str, Any]:
    """Return the task of a trainer on preferences, and the settings of its loss; empty for other trainers.

    `name` is the trainer's dialect. Older versions of TRL take settings of the loss as arguments of the
    trainer.
    """
    if name == "sft" or name not in words_of("dialects of trainers").values():
        return {}
    given = {} if trainer is None else trainer.named
    own = {key: given[key] for key in OF_LOSSES if key in given}
    return {"job.task": dialect(name).defaults["job.task"], **own}


def is_optimizer(call: ForeignCall) -> bool:
    """Return True for a call that creates an optimizer of a model's parameters."""
    takes = [
        *call.positional[:1],
        *(call.named[key] for key in ("params", "parameters") if key in call.named),
    ]
    # Optimizers are classes; functions such as `clip_grad_norm_` take parameters too.
    return isinstance(call.function, Name) and call.name[:1].isupper() and any(map(_holds_parameters, takes))


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_parameters, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_parameters, value))
    if isinstance(value, ForeignCall) and value.name == "filter":
        return any(map(_holds_parameters, value.positional))
    if isinstance(value, Member):
        return _holds_parameters(value.of)
    return isinstance(value, ForeignCall) and value.name in ("parameters", "named_parameters")


def calls_in(value: Any) -> Iterator[ForeignCall]:
    """Yield the calls that created an object of the script, the outermost first."""
    while True:
        if isinstance(value, ForeignCall):
            yield value
            first = value.arguments[:1]
            passes_on = isinstance(value.function, Name) or value.of is not None
            if passes_on and value.name in words_of("wrappers"):
                value = first[0] if first else None
            else:
                value = value.of
        elif isinstance(value, Member):
            of = value.of
            if isinstance(of, ForeignCall) and of.name == "prepare" and value.name.strip("[]").isdecimal():
                number = int(value.name.strip("[]"))
                value = of.positional[number] if number < len(of.positional) else None
            else:
                value = of
        else:
            return


def model_class(call: ForeignCall) -> str:
    """Return the class of the model that a call loads, or creates from a config; empty for other calls."""
    if call.name in LOADERS:
        return call.owner if is_model_class(call.owner) else ""
    is_own = call.library == "transformers" and call.name in _classes()
    return call.name if is_own and isinstance(call.function, Name) else ""


def is_model_class(name: str) -> bool:
    """Return True for the name of a model class of transformers or Liger."""
    return name.startswith("AutoModel") or name == LIGER or name in _classes() or "For" in name[1:-1]


def task_of_class(name: str) -> str | None:
    """Return the training task of a model class, such as an auto class; None for other classes."""
    if name == LIGER:
        return "causal-lm"
    return {heads()[task][0]: task for task in _tasks()}.get(name) or _classes().get(name)


def _tasks() -> list[str]:
    """Return the tasks in the order in which later ones override earlier ones with the same model class."""
    # Masked language modeling is BART's pretraining, and a further loss of a head implies no class.
    return sorted(heads(), key=lambda task: (not added_task(task).is_objective, task != "masked-lm"))


@cache
def _classes() -> dict[str, str]:
    """Return the training task of each model class of transformers. If two tasks share a class (BART's),
    masked language modelling is left out.
    """
    return {
        name: task
        for task in _tasks()
        for model_type in model_types()
        for name in class_names(task, model_type)
    }


def makes_model(call: ForeignCall) -> bool:
    """Return True for a call that creates a model of transformers."""
    if call.owner in UNSLOTH:
        return call.name == "from_pretrained"
    return isinstance(call.function, Name) and bool(model_class(call))


def config_name(call: ForeignCall) -> str | None:
    """Return the hub name or path of the config from which a call creates a model."""
    for value in call.arguments:
        for one in calls_in(value):
            if one.owner.endswith("Config") and one.positional and isinstance(one.positional[0], str):
                return one.positional[0]
    return None


def file_of(value: Any) -> str | None:
    """Return the path of the configuration file from which a script loads its arguments."""
    for call in calls_in(value):
        for inner in (*call.positional, call):
            if isinstance(inner, ForeignCall) and inner.name == "open" and inner.positional:
                return inner.positional[0] if isinstance(inner.positional[0], str) else None
    return None


def touches(event: ForeignCall | Assignment) -> bool:
    """Return True for a call or an assignment of a script that may change the training step."""
    return _is_relevant_call(event) if isinstance(event, ForeignCall) else _is_relevant_assignment(event)


def _is_relevant_call(call: ForeignCall) -> bool:
    if isinstance(call.function, Member):
        of = kind_of(call.of)
        if not of and call.name == "requires_grad_":
            return may_be_part(call.of)
        # A method that the script defines is read statement by statement instead.
        own = call.name in getattr(getattr(call.of, "function", None), "methods", ())
        kinds = (MODEL, PART, TRAINER, OPTIMIZER)
        return of in kinds and not own and not _is_in(call.name, words_of(of))
    if not isinstance(call.function, Name):
        return False
    if call.library == "torch" and _is_in(call.function.dotted, words_of("torch switches")):
        return True
    known = _is_in(call.name, words_of("functions")) or kind_of(call) or call.name in ARGUMENTS
    return not known and any(kind_of(value) in (MODEL, OPTIMIZER) for value in call.arguments)


def _is_relevant_assignment(one: Assignment) -> bool:
    if isinstance(one.target, Name):
        if one.target.dotted == "os.environ":
            return not _is_in(one.name, words_of("environment"))
        dotted = f"{one.target.dotted}.{one.name}"
        return dotted.startswith("torch.") and not _is_in(dotted, words_of("torch attributes"))
    kind = kind_of(one.target)
    if kind == TOKENIZER:
        return False
    if isinstance(getattr(one.target, "function", None), Class):  # `self` in a trainer's methods
        return one.name in (MODEL, OPTIMIZER)
    if not kind and one.name == "requires_grad":
        return may_be_part(one.target)
    return kind in (MODEL, PART, TRAINER, OPTIMIZER) and not _is_in(one.name, words_of("attributes"))


def _is_in(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


NO_PLAIN_LOOP = "Give the model itself: snugfit predict MODEL --task TASK --batch-size N --recipe ..."


def reason_against(name: str, library: str, *, is_trainer: bool) -> str | None:
    """Return the reason why snugfit cannot predict a script's trainer, an argument of it or an adapter; None
    if it can.
    """
    if library == "peft" and name.endswith("Config") and name not in words_of("configs of lora"):
        return "is not predicted. Among peft's methods, only LoraConfig is."
    is_config = name.endswith("Config") and name not in (*words_of("configs of scripts"), *ARGUMENTS)
    if not is_config and not (is_trainer and name not in TRAINERS):
        return None
    stem = name.removesuffix("Trainer").removesuffix("Config")
    if stem in words_of("trainers on generated texts"):
        return "trains on texts that it generates, which snugfit does not support yet."
    if stem in words_of("trainers on preferences"):
        return "trains on preferences, which snugfit does not support yet."
    read = f"Read are {', '.join(TRAINERS)} and classes derived from them."
    own = f"runs passes of its own, which are not read. {read}"
    return f"{own} {NO_PLAIN_LOOP}" if is_trainer else None
