"""Conversion of a script's calls and assignments to arguments of `TrainingArguments` and related calls.

Arguments of related calls have the prefixes `model.` and `lora.`; settings of the training job have `job.`.
Other statements that touch the model, trainer, optimizer or torch's switches are listed as not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from snugfit.errors import UsageError
from snugfit.features.exchange import installed
from snugfit.features.exchange.account import UnsupportedJobError
from snugfit.features.exchange.dialect import dialect, words_of
from snugfit.features.exchange.python.compiled_layers import OWN_LOOPS, cache_of_layers, is_limit
from snugfit.features.exchange.python.evaluate import PARSERS, Evaluation
from snugfit.features.exchange.python.frozen_parts import FrozenParts, takes_a_part
from snugfit.features.exchange.python.objects import (
    ACCELERATOR,
    ARGUMENTS,
    LIGER,
    LOADER,
    LOADERS,
    MODEL,
    NO_PLAIN_LOOP,
    OPTIMIZER,
    PART,
    TOKENIZER,
    TRAINER,
    UNSLOTH,
    base_trainer,
    calls_in,
    config_name,
    dialect_of,
    file_of,
    kind_of,
    makes_model,
    model_class,
    preferences_of,
    reason_against,
    task_of_class,
    touches,
)
from snugfit.features.exchange.python.values import (
    Assignment,
    Class,
    ForeignCall,
    Member,
    Name,
    Option,
    Record,
    Unknown,
    is_known,
)
from snugfit.job.architectures import heads

WIDENS = "prepare_model_for_kbit_training"
"""Name of peft's function that casts unquantized weights to float32. It also checkpoints layers unless
switched off.
"""

READ_AS_VALUES = ("BitsAndBytesConfig", "ParallelismConfig")
"""Classes whose constructor arguments are read if another argument is an object of the class."""

IN_PYTHON = (
    "Models of transformers are read; give a module in Python: snugfit.Model.from_module(module, batch)"
)

OTHER_MODELS = ("diffusers", "timm", "torchvision", "sentence_transformers")
"""Libraries with models of their own, which snugfit refuses."""


@dataclass
class Script:
    """The training arguments and the job's settings that follow from a user's training script."""

    dialect: str
    """Kind of the script: `trainer`, `sft`, `accelerate` or `loop`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    unread: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of statements that may affect the prediction and were not read."""
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    """Line, text and reason of statements that affect the run and are not predicted."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the script's command-line options that were used."""


def read_meaning(done: Evaluation, where: str, *, bfloat16: bool | None = None) -> Script:
    """Convert an evaluated script to training arguments and job settings. `bfloat16` is the GPU's support for
    it. Raises `UsageError` for a script that snugfit cannot read.
    """
    return _Meaning(done, where, bfloat16).read()


class _Meaning:
    def __init__(self, done: Evaluation, where: str, bfloat16: bool | None) -> None:
        self.done, self.where, self.bfloat16 = done, where, bfloat16
        self.calls = done.calls
        self.script = Script("trainer")
        self.last: ForeignCall | None = None
        self.read_events: set[int] = set()
        self.frozen = FrozenParts()
        self.model: ForeignCall | None = None

    def read(self) -> Script:
        every = [call for call in self.calls if kind_of(call) == TRAINER]
        self._refuse_other_loops(every)
        trainers = self._last_run(every)
        main = self._main_call(trainers)
        script = self.script
        trainer = trainers[0] if trainers else None
        base = self._trainer_name(trainer) if trainer else ""
        of_trainer = dialect_of(base)
        self._dialect(main, trainer, of_trainer)
        self.events = _before_training(self.done, self.last)
        self.model = model = self._model(trainer)
        if model is None:
            self._refuse_other_model()
        if script.dialect == "loop" and not self._is_loop(model):
            self._refuse_without_a_run()
        if trainer is not None:
            # An SFTTrainer with plain TrainingArguments (older TRL) also trains a causal language model.
            self._of_trainer(trainer, of_trainer == "sft" and script.dialect == "trainer")
        if model is not None:
            script.arguments |= self._of_model(model)
        # The loss of a trainer on preferences is another task of the model's class.
        for key, value in preferences_of(trainer, script.dialect if trainer is None else of_trainer).items():
            script.arguments |= dialect(of_trainer).translate(key, self.value(value)) or {key: value}
        for event in self.events:
            self._read_event(event)
        if isinstance(main, Record):
            self._note_options(main)
        script.arguments |= cache_of_layers(self.done, script.dialect, script.arguments)
        script.arguments |= self.frozen.settings()
        if self.frozen.trains_nothing:
            line, text = self.frozen.whole[0]
            script.refused.append((line, text, "all parameters are frozen here, and which train is not read"))
        self._of_loop()
        self._casts()
        self._gpus()
        self._lengths()
        self._optimizer(trainer)
        self._other_loops()
        for event in self.events:
            self._account(event)
        script.defaults = dict(self.done.defaults)
        script.unread = list(dict.fromkeys(script.unread))
        return script

    def _dialect(
        self, main: ForeignCall | Record | None, trainer: ForeignCall | None, of_trainer: str
    ) -> None:
        """Store the library whose trainer the script uses, and the arguments of that trainer."""
        script = self.script
        if isinstance(main, Record):
            script.dialect = dialect_of(main.base)
            script.arguments |= self._of_options(main)
        elif main is not None:
            script.dialect = dialect_of(main.name)
            script.arguments |= self.values(main, first="output_dir")
        elif trainer is not None:
            script.dialect = of_trainer
        elif accelerator := next((call for call in self.calls if call.name == "Accelerator"), None):
            script.dialect = "accelerate"
            script.arguments |= self.values(accelerator, first="device_placement")
        else:
            script.dialect = "loop"

    # ---- what runs -----------------------------------------------------------------------------------------

    def _last_run(self, trainers: list[ForeignCall]) -> list[ForeignCall]:
        """Return the trainers of a script's last run. Earlier runs of a notebook are listed as not read."""
        started = [call.of for call in self.calls if call.name == "train" and call.of in trainers]
        if len(set(map(id, started))) < 2:
            return trainers
        last = started[-1]
        earlier = {id(one): one for one in started if one is not last}.values()
        self.script.unread += [(one.line, f"{one.text} (another run)") for one in earlier]
        self.last = last
        return [last]

    def _refuse_other_loops(self, trainers: list[ForeignCall]) -> None:
        """Raise `UsageError` for a trainer whose step snugfit cannot predict."""
        for call in [*trainers, *self.calls]:
            name, library = (self._trainer_name(call) if call in trainers else call.name), call.library
            if library in ("pytorch_lightning", "lightning") and name == "Trainer":
                self._refuse(call, f"{name} of Lightning is not read. {self._facts()}{NO_PLAIN_LOOP}")
            reason = reason_against(name, library, is_trainer=call in trainers)
            if reason:
                self._refuse(call, f"{name} {reason}")

    def _refuse_other_model(self) -> None:
        """Raise `UsageError` for a model of another library, or of a class without a task."""
        for call in self.calls:
            of_other = call.library in OTHER_MODELS and (call.name in LOADERS or "model" in call.name.lower())
            # The name `DataCollatorForLanguageModeling` looks like that of a model class.
            own = call.library == "transformers" and re.fullmatch(
                r"(?!DataCollator)[A-Z]\w+For[A-Z]\w+", call.name
            )
            if of_other:
                why = f"{call.library} makes this model, and only models of transformers are read."
                self._refuse(call, f"{why} Give the model itself: snugfit predict MODEL.")
            if own and task_of_class(call.name) is None:
                why = f"{call.name} has no task here."
                self._refuse(call, f"{why} Give the model itself: snugfit predict MODEL.")

    def _refuse(self, call: ForeignCall, why: str) -> NoReturn:
        raise UnsupportedJobError(f"{self.where}, line {call.line}: {why}")

    def _trainer_name(self, call: ForeignCall) -> str:
        return base_trainer(call.function) if isinstance(call.function, Class) else call.name

    def _main_call(self, trainers: list[ForeignCall]) -> ForeignCall | Record | None:
        """Return the call, or the parsed command-line options, with the trainer's arguments; None for
        neither.
        """
        main = [call for call in self.calls if call.name in ARGUMENTS]
        # Trainer takes its arguments as `args`, or as its second positional argument.
        used = [value for call in trainers for value in (call.named.get("args"), *call.positional[1:2])]
        if chosen := [call for call in main if any(call is value for value in used)]:
            main = chosen[:1] if len(set(map(id, chosen))) == 1 else chosen
        if parsed := next((one for one in used if isinstance(one, Record) and one.of_options), None):
            return parsed
        own_loop = any(call.name == "Accelerator" for call in self.calls)
        if not main and not own_loop and any(call.name in PARSERS for call in self.calls):
            raise self._of_command_line()
        if len(main) > 1:
            lines = ", ".join(str(call.line) for call in main)
            raise UsageError(
                f"{self.where}: {main[0].name} is called on the lines {lines}, and which call counts is "
                "decided while the script runs. Keep one of them."
            )
        return main[0] if main else None

    def _of_command_line(self) -> UsageError:
        return UsageError(
            f"{self.where}: this script reads its arguments from the command line. Give the shell file "
            "that starts it, or the arguments: snugfit predict --model_name_or_path ..."
        )

    def _model(self, trainer: ForeignCall | None) -> ForeignCall | None:
        """Return the call that creates the trained model; None if there is none."""
        models = [call for call in self.calls if makes_model(call)]
        if trainer is not None:
            given = trainer.argument("model")
            if isinstance(given, str | Option):
                return None  # the trainer loads the model itself
            inner = [call for call in calls_in(given) if makes_model(call)]
            if inner:
                return inner[-1]
        return models[0] if models else None

    def _is_loop(self, model: ForeignCall | None) -> bool:
        trains = any(call.name in ("backward", "zero_grad") for call in self.calls)
        return model is not None and (trains or any(kind_of(call) == OPTIMIZER for call in self.calls))

    def _refuse_without_a_run(self) -> NoReturn:
        """Raise `UsageError` for a script that trains no model of transformers."""
        for call in self.calls:
            if call.library == "tokenizers":
                self._refuse(call, "the script trains a tokenizer, which takes no memory of a GPU.")
            if isinstance(call.function, Class) and "Module" in call.function.library_bases:
                self._refuse(call, f"{call.function.node.name} is a module of the script's own. {IN_PYTHON}")
        raise UsageError(
            f"{self.where}: a script must call TrainingArguments, Accelerator, or train a model of "
            f"transformers in a loop, but this one does not. {self._facts()}{NO_PLAIN_LOOP}"
        )

    def _facts(self) -> str:
        """Return a sentence on the model that the script loads, for error messages; empty without a model."""
        names = [
            call.positional[0]
            for call in self.calls
            if call.name in LOADERS and call.positional and isinstance(call.positional[0], str)
        ]
        return f"It loads {names[0]}. " if names else ""

    # ---- values --------------------------------------------------------------------------------------------

    def values(self, call: ForeignCall, *, first: str = "") -> dict[str, Any]:
        """Return the arguments of a call in the script by name. `first` is the name of its first positional
        argument.
        """
        arguments = {first: self.value(call.positional[0])} if first and call.positional else {}
        for key, value in call.named.items():
            if key.startswith("**") and (file := file_of(value)):
                raise UsageError(
                    f"{self.where}, line {call.line}: the arguments come from {file}. Give that file: "
                    f"--arguments {file}"
                )
            arguments[key] = self.value(value)
        return _without_options(arguments)

    def _of_options(self, parsed: Record) -> dict[str, Any]:
        """Return the values of the script's command-line options: set by the script, or the defaults."""
        known = {*installed.defaults(), *dialect("sft").becomes}
        return _without_options(
            {key: self.value(one) for key, one in parsed.attributes.items() if key in known}
        )

    def _note_options(self, parsed: Record) -> None:
        """List the script's argument parsers in the report as assumptions, since the defaults of their
        options are used.

        Raises `UsageError` for a library's dataclass, whose defaults are not in the script.
        """
        if not parsed.own:
            raise self._of_command_line()
        for call in self.calls:
            if call.name in PARSERS:
                self._not_read(call, f"{call.text} (options have their defaults here)")

    def value(self, value: Any) -> Any:
        """Convert a value of the script to the form of a configuration file. Command-line options without a
        value are omitted.
        """
        if isinstance(value, Mapping):
            return _without_options({key: self.value(one) for key, one in value.items()})
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        if isinstance(value, Name):
            return _word(value)
        if isinstance(value, ForeignCall) and value.name in READ_AS_VALUES:
            return self.values(value)
        if getattr(value, "name", "") == "Mxfp4Config" and value.named.get("dequantize") is True:
            return None  # weights are dequantized to 16 bits
        return value if is_known(value) or isinstance(value, Unknown) else Unknown(repr(value))

    def _of_model(self, call: ForeignCall) -> dict[str, Any]:
        """Return the arguments of the call that creates the model, and the training task of its class."""
        if call.owner in UNSLOTH:
            return {}
        inner = self.values(call, first="pretrained_model_name_or_path")
        name = inner.pop("pretrained_model_name_or_path", inner.pop("config", None))
        task = task_of_class(model_class(call))
        if task is None:
            known = ", ".join(auto for auto, _ in heads().values())
            self._refuse(
                call, f"{model_class(call)} has no task here. Models of these tasks are predicted: {known}."
            )
        self._mark(call)
        labels = next((call.named[key] for key in ("id2label", "label2id") if key in call.named), None)
        if labels is not None:
            # A loop in the script fills a dict that is empty here.
            counted = len(labels) if isinstance(labels, dict) and labels else Unknown("len(id2label)")
            inner.setdefault("num_labels", counted)
        quantized = call.named.get("quantization_config")
        if (
            isinstance(quantized, ForeignCall)
            and quantized.library in ("transformers", "torchao")
            and quantized.name not in (*READ_AS_VALUES, "Mxfp4Config")
        ):
            of_others = "makes weights of a format that is not predicted. Those of bitsandbytes are."
            self._refuse(quantized, f"{quantized.name} {of_others}")
        # A model that is created from a config object is named in the config's own call.
        if isinstance(name, Unknown) and (config := config_name(call)):
            name = config
        facts: dict[str, Any] = {"job.task": task, **({"job.model": name} if isinstance(name, str) else {})}
        facts |= {f"model.{key}": value for key, value in inner.items() if key != "device_map"}
        if call.owner == LIGER:
            facts["use_liger_kernel"] = True
        if call.name != "from_pretrained":
            facts |= self._of_config(call)
        if call.name != "from_pretrained" and not {"model.dtype", "model.torch_dtype"} & set(facts):
            read = any(one.name == "from_pretrained" and one.owner.endswith("Config") for one in self.calls)
            facts |= {} if read and call.name in LOADERS else {"job.dtype": "float32"}
        return facts

    def _of_config(self, call: ForeignCall) -> dict[str, Any]:
        """Return the job's settings that the script changes by arguments of a model config. Other changed
        sizes are listed as not read.
        """
        configs = [one for value in call.arguments for one in calls_in(value)]
        facts: dict[str, Any] = {}
        for one in configs:
            if one.name != "from_pretrained" or not one.owner.endswith("Config"):
                continue
            for key, value in one.named.items():
                if key == "vocab_size" and type(value) is int:
                    facts["job.vocab_size"] = str(value)
                elif not (key.endswith(("_id", "2id", "2label")) or key in words_of("arguments of files")):
                    self._not_read(one, f"{key}={self.value(value)} in the config")
        return facts

    def _of_trainer(self, call: ForeignCall, old_sft: bool) -> None:
        """Store the arguments of the trainer's constructor in the script."""
        self._mark(call)
        arguments = self.script.arguments
        given = call.argument("model")
        # TRL loads a model given by name in float32, unless `model_init_kwargs` sets a dtype.
        if isinstance(given, str | Option):
            options = arguments.get("model_init_kwargs")
            arguments |= {"job.model": given} if isinstance(given, str) else {}
            if isinstance(options, Unknown):
                arguments["job.dtype"] = options
            elif not {"dtype", "torch_dtype"} & set(options or ()):
                arguments["job.dtype"] = "float32"
        elif given is not None and self.model is None:
            self._not_read(call, f"model={given!r} (made elsewhere)")
        if isinstance(quantized := self.value(call.named.get("quantization_config")), dict):
            arguments |= {f"model.quantization_config.{key}": one for key, one in quantized.items()}
        adapters = call.named.get("peft_config")
        if adapters is not None and not any(one.name == "LoraConfig" for one in self.calls):
            self._not_read(call, f"peft_config={adapters!r}")
        if "max_seq_length" in call.named:
            arguments.setdefault("job.sequence_length", self.value(call.named["max_seq_length"]))
        if old_sft:
            arguments.setdefault("job.task", "causal-lm")
        if isinstance(call.function, Class):
            methods = call.function.methods
            for name in words_of("methods of a step"):
                if name in methods:
                    self.script.unread.append((methods[name], f"{call.function.node.name}.{name}"))

    # ---- statements ----------------------------------------------------------------------------------------

    def _read_event(self, event: ForeignCall | Assignment) -> None:
        """Convert one statement of the script to training arguments and store them."""
        read = self._read_call(event) if isinstance(event, ForeignCall) else self._read_assignment(event)
        if read is None:
            return
        self._mark(event)
        # A statement in a branch that may not run is accepted if it repeats the current value.
        if (
            event.unsure
            and read
            and any(self.script.arguments.get(key, value) != value for key, value in read.items())
        ):
            self._not_read(event)
            return
        self.script.arguments |= read

    def _not_read(self, event: ForeignCall | Assignment, text: str = "") -> None:
        self.script.unread.append((event.line, text or event.text))

    def _not_predicted(self, event: ForeignCall | Assignment, says: str) -> None:
        self.script.refused.append((event.line, event.text, says))

    def _mark(self, event: ForeignCall | Assignment) -> None:
        self.read_events.add(id(event))

    def _read_call(self, call: ForeignCall) -> dict[str, Any] | None:
        """Return the training arguments that a call sets; None for a call without effect on training
        arguments.
        """
        of = kind_of(call.of)
        read: Callable[[ForeignCall], dict[str, Any] | None] | None = None
        if call.owner in UNSLOTH and call.name in words_of("defaults of unsloth"):
            read = self._of_unsloth
        elif of == MODEL and call.name in _METHODS:
            read = getattr(self, _METHODS[call.name])
        elif call.owner == "PeftModel" and call.named.get("is_trainable") is True and not call.unsure:
            read = self._of_stored_adapters
        elif of in (MODEL, PART) and (
            call.name == "requires_grad_" or call.name in words_of("freezing methods")
        ):
            read = self._of_freezing
        elif call.name.startswith("apply_liger_kernel_to"):
            read = self._of_liger
        elif call.name in _FUNCTIONS:
            read = getattr(self, _FUNCTIONS[call.name])
        return read(call) if read else None

    def _of_checkpointing(self, call: ForeignCall) -> dict[str, Any]:
        options = call.argument("gradient_checkpointing_kwargs")
        inner = options if isinstance(options, Mapping) else {}
        inner_options = {
            f"gradient_checkpointing_kwargs.{key}": self.value(one) for key, one in inner.items()
        }
        return {"gradient_checkpointing": call.name != "gradient_checkpointing_disable", **inner_options}

    def _of_freezing(self, call: ForeignCall) -> dict[str, Any] | None:
        trains = call.name not in words_of("freezing methods")
        return self._freeze(call, [*call.positional, call.named.get("requires_grad", trains)][0])

    def _of_lora(self, call: ForeignCall) -> dict[str, Any]:
        inner = self.values(call)
        # A call without arguments adds adapters too, so at least one key must represent it.
        return {f"lora.{key}": value for key, value in inner.items()} or {"lora.task_type": None}

    def _of_stored_adapters(self, call: ForeignCall) -> dict[str, Any]:
        """Raise `UsageError` for adapters that a script loads from a checkpoint, because only its files
        contain their rank and targets.
        """
        says = "the adapters are in files that are not read. Write lora(r=..., targets=...) instead"
        self._not_predicted(call, says)
        return {}

    def _of_widening(self, call: ForeignCall) -> dict[str, Any]:
        on = call.named.get("use_gradient_checkpointing", True) is True
        return {WIDENS: True, f"{WIDENS}.use_gradient_checkpointing": on}

    def _of_liger(self, call: ForeignCall) -> dict[str, Any]:
        options = {
            key: value for key, value in self.values(call).items() if key in words_of("parts of Liger")
        }
        return {
            "use_liger_kernel": True,
            **{f"liger_kernel_config.{key}": one for key, one in options.items()},
        }

    def _of_precision(self, call: ForeignCall) -> dict[str, Any] | None:
        # On CUDA, torch uses tf32 for both `high` and `medium`.
        return {"tf32": call.positional[0] != "highest"} if call.positional else None

    def _of_clip(self, call: ForeignCall) -> dict[str, Any]:
        return {
            "max_grad_norm": self.value([*call.positional[1:2], *call.named.values(), Unknown("max_norm")][0])
        }

    def _read_assignment(self, one: Assignment) -> dict[str, Any] | None:
        target = one.target
        if isinstance(target, Name):
            if target.dotted == "os.environ" and one.name in _ALLOCATOR:
                return {"environment.PYTORCH_ALLOC_CONF": self.value(one.value)}
            if target.dotted == "torch.backends.cuda.matmul" and one.name in ("allow_tf32", "fp32_precision"):
                return {"tf32": one.value in (True, "tf32")}
            if one.name == "activation_memory_budget":
                return {"functorch.activation_memory_budget": self.value(one.value)}
        if is_limit(one):
            return {}
        if one.name == "requires_grad" and kind_of(target) == PART:
            return self._freeze(one, one.value)
        return None

    def _of_unsloth(self, call: ForeignCall) -> dict[str, Any]:
        """Return the arguments of unsloth's `from_pretrained` or `get_peft_model`."""
        loads = call.name == "from_pretrained"
        inner = {
            **words_of("defaults of unsloth")[call.name],
            **self.values(call, first="model_name" if loads else ""),
        }
        meant: dict[str, Any] = {"job.task": "causal-lm"} if loads else {"lora.peft_type": "LORA"}
        name = inner.get("model_name")
        # The name's ending shows a checkpoint in 4 bits, regardless of `load_in_4bit`.
        if isinstance(name, str) and name.endswith("-bnb-4bit"):
            inner["load_in_4bit"] = True
        # unsloth then loads weights in the dtype that the GPU supports.
        if loads and inner.get("dtype") is None and self.bfloat16 is False:
            inner["dtype"] = "float16"
        # Without `fp16` or `bf16`, unsloth's trainer takes the precision of the weights.
        if loads and inner.get("dtype") == "float16":
            meant["fp16"] = True
        return {**meant, **{f"unsloth.{key}": value for key, value in inner.items()}}

    def _cast(self, call: ForeignCall) -> dict[str, Any]:
        values = [call.name, *(self.value(one) for one in call.arguments)]
        dtypes = [
            _SHORT.get(one, one) for one in values if isinstance(one, str) and one in words_of("dtypes")
        ]
        return {"job.dtype": dtypes[0]} if dtypes else {}

    def _freeze(self, event: ForeignCall | Assignment, value: Any) -> dict[str, Any] | None:
        """Record a statement that freezes parameters. If adapters are trained, the statement is ignored.

        Raise `UsageError` if the parameters are not known.
        """
        target = event.target if isinstance(event, Assignment) else event.function
        makers = [call for call in calls_in(target) if makes_model(call)]
        if makers and self.model is not None and makers[-1] is not self.model:
            return None  # another model of the script, such as a teacher
        if any(call.name == "LoraConfig" for call in self.calls):
            if self._is_after_adapters(event) and "lora" not in " ".join((event.text, *event.tests)):
                says = "it changes which weights train in addition to adapters. Write lora(save=...) instead"
                self._not_predicted(event, says)
            return {}
        if isinstance(value, Unknown | ForeignCall):  # `parameter.requires_grad = "classifier" in name`
            event, value = replace(event, tests=(*event.tests, f"not ({value})")), False
        if type(value) is not bool or not self.frozen.add(event, value):
            says = "which parameters train is computed here. Write frozen(parts=...) or frozen(only=...)"
            self._not_predicted(event, says)
        return {}

    def _is_after_adapters(self, event: ForeignCall | Assignment) -> bool:
        """Return True for a statement after the creation of adapters, which freezes all other weights."""
        added = False
        for one in self.events:
            if one is event:
                return added
            added |= isinstance(one, ForeignCall) and one.name in ("get_peft_model", "add_adapter")
        return False

    def _resize(self, call: ForeignCall) -> dict[str, Any]:
        """Return the job's number of embedding rows after `resize_token_embeddings`. A number from an unknown
        tokenizer is listed as not read.
        """
        rows = call.argument("new_num_tokens")
        multiple = call.named.get("pad_to_multiple_of")
        if type(rows) is not int:
            self._not_read(call)
            return {"job.vocab_size": f"x{multiple}"} if type(multiple) is int else {}
        step = multiple if type(multiple) is int else 1
        return {"job.vocab_size": str(-(-rows // step) * step)}

    def _of_compile(self, call: ForeignCall) -> dict[str, Any] | None:
        """Return the arguments for torch.compile in the script, applied to layers, to the forward pass, or to
        the model.
        """
        first = call.function.of if isinstance(call.function, Member) else [*call.positional, None][0]
        kind = kind_of(first)
        if isinstance(first, Member) and first.name == "forward" and kind == PART:
            key = "forward.compile"
        elif kind == MODEL:
            key = "torch_compile"
        elif kind == PART:
            key = "layers.compile"
        else:
            return None
        said = {
            f"{key}_{name}": self.value(call.named[name])
            for name in ("mode", "backend")
            if name in call.named
        }
        return {key: True, **{k: v for k, v in said.items() if v not in (None, "default", "inductor")}}

    def _of_float8(self, call: ForeignCall) -> dict[str, Any]:
        named = [
            call.positional[0] for call in self.calls if call.name == "from_recipe_name" and call.positional
        ]
        return {"layers.float8": self.value(named[0]) if named else "tensorwise"}

    def _of_autocast(self, call: ForeignCall) -> dict[str, Any] | None:
        if self.script.dialect != "loop":
            return None
        given = call.named.get("dtype", next((one for one in call.positional if isinstance(one, Name)), None))
        if call.named.get("enabled", True) is False:
            return {}
        # Without a dtype, torch's autocast on CUDA uses float16.
        dtype = self.value(given) if given is not None else "float16"
        return {"bf16": True} if dtype == "bfloat16" else {"fp16": True} if dtype == "float16" else None

    # ---- facts from several statements ---------------------------------------------------------------------

    def _of_loop(self) -> None:
        """Store the global batch size of a hand-written loop. It is the first loader's batch size times the
        number by which the loss is divided.
        """
        if self.script.dialect not in OWN_LOOPS:
            return
        arguments = self.script.arguments
        loaders = [call for call in self.calls if kind_of(call) == LOADER]
        if loaders:
            # A loader for evaluation may come first. Only the one for training shuffles.
            first = next((one for one in loaders if one.named.get("shuffle") is True), loaders[0])
            size = self.values(first).get("batch_size", [*first.positional[1:2], 1][0])
            arguments.setdefault("per_device_train_batch_size", size)
        pieces = self.done.globals.get("MICRO_BATCHES")
        of_loss = [number for of, number in self.done.divisions if number > 1 and _is_loss(of)]
        if type(pieces) is int and pieces > 1:
            arguments.setdefault("gradient_accumulation_steps", pieces)
        elif of_loss:
            arguments.setdefault("gradient_accumulation_steps", of_loss[0])

    def _casts(self) -> None:
        """Store the training argument for float32 adapters if the script casts adapters, as TRL's example
        scripts do.
        """
        widened = any(
            one.name == "data" and isinstance(one.value, ForeignCall) and one.value.name == "float"
            for one in self.done.assignments
        )
        if self.script.dialect == "sft" and widened:
            self.script.arguments["adapters_dtype"] = "float32"

    def _gpus(self) -> None:
        """Store the number of training processes that the script declares, as exported scripts do."""
        number = self.done.globals.get("GPUS")
        if type(number) is int and number != 1:
            key = "parallel.elsewhere" if self.script.dialect in OWN_LOOPS else "job.gpus"
            self.script.arguments[key] = number

    def _lengths(self) -> None:
        """Store the sequence length of the script's tokenizer calls, unless the training arguments have
        one.
        """
        arguments = self.script.arguments
        if {"job.sequence_length", "max_length", "max_seq_length"} & set(arguments):
            return
        lengths: dict[int, int] = {}
        for call in self.calls:
            if TOKENIZER in (kind_of(call), kind_of(call.function), kind_of(call.of)):
                size = call.named.get("max_length", call.named.get("model_max_length"))
                lengths |= {call.line: size} if type(size) is int else {}
        for one in self.done.assignments:
            if one.name == "model_max_length" and type(one.value) is int and kind_of(one.target) == TOKENIZER:
                lengths[one.line] = one.value
        sizes_in_order = [*lengths.values()]
        # A function that tokenizes pairs starts with the inputs, followed by the targets.
        if arguments.get("job.task") == "seq2seq-lm" and len(sizes_in_order) == 2:
            arguments["tokenizer.target_length"] = sizes_in_order.pop()
        if sizes_in_order:
            arguments["tokenizer.max_length"] = max(sizes_in_order)

    def _optimizer(self, trainer: ForeignCall | None) -> None:
        """Store the optimizer that the script passes to the trainer or uses in its loop."""
        optimizer: Any = None
        if trainer is not None:
            pair = trainer.named.get("optimizers")
            optimizer = pair[0] if isinstance(pair, list | tuple) and pair else None
            if pair is not None and not isinstance(optimizer, ForeignCall):
                self._not_read(trainer, "optimizers=...")
        elif self.script.dialect in OWN_LOOPS:
            optimizer = next((call for call in self.calls if kind_of(call) == OPTIMIZER), None)
        if not isinstance(optimizer, ForeignCall):
            return
        self._mark(optimizer)
        optim = words_of("optimizers").get(optimizer.name)
        if optim is None:
            self._not_predicted(optimizer, f"the optimizer {optimizer.name} is not predicted")
            return
        if optim == "adamw_torch" and optimizer.named.get("fused") is True:
            optim = "adamw_torch_fused"
        self.script.arguments["optim"] = optim
        if "frozen" not in self.script.arguments and takes_a_part(optimizer):
            self._not_read(optimizer, f"{optimizer.text} (for a part of the parameters)")
        if "lr" in optimizer.named and self.script.dialect in OWN_LOOPS:
            self.script.arguments["learning_rate"] = self.value(optimizer.named["lr"])
        if optim == "sgd" and "momentum" in optimizer.named:
            self.script.arguments["optim_args.momentum"] = self.value(optimizer.named["momentum"])

    def _other_loops(self) -> None:
        """List optimizers outside of the trainer, and objects that accelerate prepares, as not read."""
        for call in self.calls if self.script.dialect not in OWN_LOOPS else ():
            prepares = call.name == "prepare" and kind_of(call.of) == ACCELERATOR
            if prepares or (kind_of(call) == OPTIMIZER and id(call) not in self.read_events):
                self._not_read(call, f"{call.text} (not the trainer's)")

    # ---- unread statements ---------------------------------------------------------------------------------

    def _account(self, event: ForeignCall | Assignment) -> None:
        """List a statement of the script as not read, if it may affect the predicted step."""
        if id(event) in self.read_events:
            return
        if touches(event):
            self._not_read(event)


_METHODS: Mapping[str, str] = {
    "gradient_checkpointing_enable": "_of_checkpointing",
    "activation_checkpointing_enable": "_of_checkpointing",
    "gradient_checkpointing_disable": "_of_checkpointing",
    "half": "_cast", "bfloat16": "_cast", "float": "_cast", "to": "_cast",
    "resize_token_embeddings": "_resize", "compile": "_of_compile",
}  # fmt: skip
"""Names of this class's methods that interpret a call, by the called method of a model."""

_FUNCTIONS: Mapping[str, str] = {
    "LoraConfig": "_of_lora", WIDENS: "_of_widening", "prepare_model_for_int8_training": "_of_widening",
    "set_float32_matmul_precision": "_of_precision", "clip_grad_norm_": "_of_clip",
    "compile": "_of_compile", "convert_to_float8_training": "_of_float8", "autocast": "_of_autocast",
}  # fmt: skip
"""Names of this class's methods that interpret a call, by the called function or method of a model's part."""

_SHORT = {"half": "float16", "float": "float32"}
"""Full dtype names by torch's short ones, which are also methods of a model that cast."""

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _without_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without options that have no default."""
    return {key: one for key, one in arguments.items() if not isinstance(one, Option)}


def _word(name: Name) -> Any:
    """Return a dtype or an enumeration's member as it is written in configuration files, such as
    `bfloat16`.
    """
    if name.dotted.startswith("torch.") and name.last in words_of("dtypes"):
        return _SHORT.get(name.last, name.last)
    is_enumeration = name.dotted.startswith(("transformers.", "trl."))
    return name.last.lower() if is_enumeration else Unknown(name.dotted)


def _before_training(done: Evaluation, trainer: ForeignCall | None) -> list[ForeignCall | Assignment]:
    """Return a script's statements before this trainer starts training, or before the first trainer does. For
    a hand-written loop return all statements.
    """
    for number, event in enumerate(done.events):
        of = event.of if isinstance(event, ForeignCall) and event.name == "train" else None
        if of is not None and (of is trainer if trainer else kind_of(of) == TRAINER):
            return done.events[:number]
    return done.events


def _is_loss(value: Any) -> bool:
    names = []
    while isinstance(value, Member):
        names.append(value.name)
        value = value.of
    return bool(names) and names[0] in ("loss", "[0]")
