"""Settings of peft's low-rank adapters: the weights are frozen, and small matrices that are added to some of
them are trained.

W' = W + s B A with A (r x in) and B (out x r); Hu et al., arXiv 2106.09685, section 4.1. Only A and B have
gradients and optimizer states. Activations are saved as without adapters, because gradients pass through the
frozen weights. Memory falls by optimizer states and gradients, and not by activations.

The scale s is alpha / r, and alpha / sqrt(r) with `rslora` (Kalajdzievski, arXiv 2312.03732). It is a
constant and takes no time or memory. `dora` (Liu et al., arXiv 2402.09353) trains the length of each row of
W' separately from its direction. In each pass it computes the whole W' once more to get the lengths of its
rows, which takes time and memory.

Defaults are peft's own (`LoraConfig`): rank 8, alpha 8 and no dropout. The modules to adapt come from peft's
table of architectures (BERT: query and value). If the table does not have an architecture, all its linear
layers are adapted. This module reads the table and passes the names to peft. peft itself looks up only the
architecture's own name. Gemma 3, for example, is in the table under its text model's name. For models whose
weights transformers stores in another shape (Mixtral's experts), peft renames modules and does not use the
table.

Dropout saves two tensors for each adapted matrix: the input after dropout, and the mask. The backward pass of
A needs both. Adapters of a model in half precision are fp32, as peft creates them (`autocast_adapter_dtype`).
The heads of classification models train whole, as peft's task types define.

The modules to adapt (`targets`) are given by suffixes of their names, or by one quoted regular expression.
`parameters` are weights outside of linear layers, such as all experts in one tensor. peft adds their whole
update to the weight in each pass. `save` names modules of which peft trains a full copy.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from snugfit.errors import RecipeError
from snugfit.hub_kernels import no_hub_kernels
from snugfit.techniques.counterpart import Setting
from snugfit.techniques.setting import Pattern, between, is_word
from snugfit.techniques.setup import Call, Setup
from snugfit.techniques.technique import ALL_LINEAR, Technique

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.job.model import Model

_PEFTS_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"

ARGUMENTS: Mapping[str, Setting] = {
    "lora.r": Setting("r"),
    "lora.lora_alpha": Setting("alpha"),
    "lora.target_modules": Setting("targets"),
    "lora.lora_dropout": Setting("dropout"),
    "lora.use_dora": Setting("dora"),
    "lora.use_rslora": Setting("rslora"),
    "lora.modules_to_save": Setting("save"),
    "lora.exclude_modules": Setting("exclude"),
    "lora.target_parameters": Setting("parameters"),
    "lora.layers_to_transform": Setting("layers"),
    "lora.rank_pattern": Setting("rank_pattern"),
    "lora.alpha_pattern": Setting("alpha_pattern"),
    "lora.bias": Setting("bias"),
}
"""Arguments of peft's `LoraConfig`, each mapped to the setting of `lora` with the same meaning."""

_MORE = {
    "dora": "use_dora", "rslora": "use_rslora", "save": "modules_to_save", "exclude": "exclude_modules",
    "parameters": "target_parameters", "layers": "layers_to_transform", "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern", "bias": "bias", "alpha": "lora_alpha",
}  # fmt: skip
"""Optional settings of `lora`, each mapped to the argument of `LoraConfig` with the same meaning."""

_PATTERNS = {
    "rank_pattern": r"[1-9]\d{0,3}",
    "alpha_pattern": r"(?=[\d.]*[1-9])\d{1,5}(\.\d+)?",
}
"""Optional settings that map names of modules to numbers, and the regular expression of their numbers."""

_PEFT_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""peft's task type by the suffix of a transformers class name. From the task type, peft selects the output
head to train in full."""

_TOKEN_HEADS = ("classifier", "score")
"""Names of the output heads of token classifiers. peft trains them in full, and refuses to adapt them too, as
`all-linear` would."""


@dataclass(frozen=True, kw_only=True)
class LowRank(Technique):
    """Base class of techniques with peft's low-rank adapters. It has the settings, and the call that adds
    adapters.
    """

    preloaded: ClassVar = "snugfit.features.adapters.ahead"

    r: int = between(1, 4096, default=8)
    """Rank of the updates: columns of B and rows of A."""

    targets: tuple[Pattern, ...] | None = None
    """Ends of names of the modules to adapt, a quoted pattern of whole names, or `all-linear`; by default
    peft's, or all linear ones."""

    dropout: float = between(0.0, 1.0, default=0.0)
    """Share of the inputs of A that is dropped."""

    dora: bool = False
    """True trains the length of each weight row apart from its direction (DoRA)."""

    rslora: bool = False
    """True scales updates by alpha / sqrt(r), False by alpha / r."""

    save: tuple[str, ...] | None = None
    """Ends of names of modules that train whole too."""

    exclude: tuple[Pattern, ...] | None = None
    """Targets that are not adapted."""

    parameters: tuple[Pattern, ...] | None = None
    """Ends of names of adapted parameters, such as weights of experts."""

    layers: tuple[int, ...] | None = None
    """Numbers of adapted layers; by default all."""

    rank_pattern: tuple[Pattern, ...] | None = None
    """Other ranks, each a quoted pattern, a colon and the rank: `'down_proj:4'`."""

    bias: Literal["all", "lora_only"] | None = None
    """Biases that train too: all, or those of adapted modules."""

    alpha: float = between(1e-6, 1 << 16, default=8)
    """Numerator of the scale."""

    alpha_pattern: tuple[Pattern, ...] | None = None
    """Other numerators, written like `rank_pattern`."""

    def __post_init__(self) -> None:
        """Raise `RecipeError` for a quoted pattern next to names, or for a rank that is not a number."""
        super().__post_init__()
        # Equal recipes have equal texts, which are the keys of stored answers.
        object.__setattr__(self, "alpha", _number(self.alpha))
        for name in ("targets", "exclude"):
            words = getattr(self, name) or ()
            if len(words) > 1 and not all(map(is_word, words)):
                raise RecipeError(
                    f"{self.name}: {name} is a quoted pattern, or names joined by |, and not both. "
                    "Write one of the two."
                )
        if self.layers and (not self.targets or not is_word(self.targets[0]) or ALL_LINEAR in self.targets):
            raise RecipeError(
                f"{self.name}: layers need targets by name: {self.name}(targets=q_proj|v_proj, layers=0|1)."
            )
        if self.parameters and self.dropout:
            raise RecipeError(f"{self.name}: peft adapts parameters without dropout. Leave dropout out.")
        for name, number in _PATTERNS.items():
            for entry in getattr(self, name) or ():
                if not re.fullmatch(rf".+:{number}", entry):
                    raise RecipeError(
                        f"{self.name}: {name} has {entry!r}. Write a name and a positive number, "
                        "'down_proj:4'."
                    )

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason against adapters in a job without training; empty for training."""
        return "" if job.trains else "nothing trains here, so adapters only add work"

    def install(self, setup: Setup) -> Setup:
        """Return the setup with the field `adapt` set to peft's adapters with these settings."""
        arguments = {"r": self.r, "targets": list(self.targets or ()), "dropout": self.dropout}
        changed = self._changed_settings().items()
        more = {name: list(value) if isinstance(value, tuple) else value for name, value in changed}
        return setup.with_fields(adapt=Call(path=f"{__name__}:adapt", arguments=arguments | more))

    def code(self, job: Job) -> tuple[str, ...]:
        """Return the Python lines that wrap a model with peft, with the arguments of `adapt`."""
        from snugfit.job.architectures import class_of

        model = class_of(job.task, job.config_to_read())
        given = _peft_arguments(
            model.__name__,
            inputs=model.main_input_name,
            r=self.r,
            targets=self.targets or (() if chosen_by_peft(job.model) else default_targets(job.model)),
            dropout=self.dropout,
            **self._changed_settings(),
        )
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items() if value is not None)
        shown = shown.replace("'", '"')  # neither peft's words nor recipes contain quotes
        return (
            "from peft import LoraConfig, get_peft_model",
            "",
            f"model = get_peft_model(model, LoraConfig({shown}))",
        )

    def _changed_settings(self) -> dict[str, Any]:
        """Return the optional settings of `lora` that are not peft's default."""
        optional = [declared for declared in fields(self) if declared.name in _MORE]
        values = {declared.name: getattr(self, declared.name) for declared in optional}
        return {one.name: values[one.name] for one in optional if values[one.name] != one.default}

    @property
    def trained_rank(self) -> int:
        """Return the rank of the adapters."""
        return self.r

    def adapted_modules(self, job: Job) -> str | Sequence[str]:
        """Return the suffixes of the names of adapted modules: the setting, or peft's default for the
        architecture."""
        return _as_peft_takes(self.targets or default_targets(job.model))

    def is_never_better_than(self, other: Technique, compute_capability: tuple[int, int] | None) -> bool:
        """Return True if `other` has a lower rank or fewer adapted modules, and the same settings otherwise.
        This technique then takes more memory and time.
        """
        if not isinstance(other, LowRank) or replace(other, r=self.r, targets=self.targets) != self:
            return False
        has_no_fewer = self.targets == other.targets or (
            self.targets == (ALL_LINEAR,) and other.targets is None
        )
        return self != other and self.r >= other.r and has_no_fewer

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning if every linear layer is adapted, because neither the recipe nor peft names
        targets."""
        if not self.targets and not self.parameters and not has_default_targets(job.model):
            what = "a module of your own" if job.model.module is not None else job.model.architecture
            yield (
                f"peft has no default targets for {what}, so all linear layers are adapted, as with "
                f"{self.name}(targets={ALL_LINEAR}). To adapt fewer, give the ends of their names: "
                f"{self.name}(targets=q_proj|v_proj)."
            )


def adapt(
    model: torch.nn.Module,
    *,
    r: int,
    targets: Sequence[str],
    dropout: float = 0.0,
    **more: Any,
) -> torch.nn.Module:
    """Return `model` wrapped by peft, with its own weights frozen. Raises `RecipeError` when no module is a
    target."""
    with no_hub_kernels():
        from peft import LoraConfig, get_peft_model

    name = type(model).__name__
    inputs = str(getattr(model, "main_input_name", "input_ids"))
    chosen = targets or _pefts_choice(model) or (() if more.get("parameters") else ALL_LINEAR)
    if parameters := more.get("parameters"):
        more["parameters"] = [*parameters, *_whole_names(model, parameters)]
    config = LoraConfig(**_peft_arguments(name, inputs=inputs, r=r, targets=chosen, dropout=dropout, **more))
    try:
        with warnings.catch_warnings():
            # GPT-2's Conv1D stores its weight transposed. peft detects that, corrects the argument, and
            # warns.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
            # peft reads an attribute of transformers 4 that transformers 5 has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return get_peft_model(model, config)  # type: ignore[no-any-return]
    except ValueError as error:
        raise RecipeError(
            f"peft finds nothing to adapt in {name} ({str(error).partition('. ')[0].rstrip('.')}). Name "
            "modules that it has, as in targets=q_proj|v_proj, or write targets=all-linear."
        ) from error


def _whole_names(model: torch.nn.Module, ends: Sequence[str]) -> Iterator[str]:
    """Yield the names of packed parameters with one of these ends: peft finds them by whole names only."""
    for name, module in model.named_modules():
        for parameter in getattr(module, "parametrizations", ()):
            if any(f".{name}.{parameter}".endswith(f".{end}") for end in ends):
                yield f"{name}.{parameter}"


def _peft_arguments(
    name: str, *, inputs: str, targets: str | Sequence[str], r: int, dropout: float, **more: Any
) -> dict[str, Any]:
    """Return `LoraConfig`'s arguments for a model of the class `name` with the main input `inputs`."""
    task = next((task for end, task in _PEFT_TASKS.items() if name.endswith(end)), None)
    if inputs != "input_ids":
        task = None  # peft's seq2seq wrapper would pass input_ids twice to Whisper's decoder
    targets = _as_peft_takes(targets)
    everywhere = targets == ALL_LINEAR
    further = {_MORE[name]: value for name, value in more.items() if value}
    for pattern in _PATTERNS:
        if entries := further.get(pattern):
            parts = (entry.rpartition(":") for entry in entries)
            further[pattern] = {key: _number(float(number)) for key, _, number in parts}
    own: dict[str, Any] = {}
    if everywhere and task == "TOKEN_CLS":
        own["exclude_modules"] = list(_TOKEN_HEADS)
    # peft has no task type for images, so the classification head is named explicitly.
    if name.endswith("ForImageClassification"):
        own["modules_to_save"] = ["classifier"]
    for key, words in further.items():
        if isinstance(words, list | tuple):
            further[key] = _as_peft_takes(words) if key == "exclude_modules" else list(words)
        if key in own and isinstance(further[key], list):
            further[key] = list(dict.fromkeys([*own[key], *further[key]]))
    return {
        "r": r,
        "lora_dropout": dropout,
        # With None, peft selects the modules.
        "target_modules": targets if isinstance(targets, str) else list(targets) or None,
        "task_type": task,
        **own,
        **further,
    }


def _number(value: float) -> float:
    """Return a whole number as an int, and another number unchanged."""
    return int(value) if float(value).is_integer() else value


def _as_peft_takes(targets: str | Sequence[str]) -> str | Sequence[str]:
    """Convert the adapted modules to peft's form: `all-linear` and a pattern as text, other names as a
    list.
    """
    if isinstance(targets, str):
        return targets
    is_text = list(targets) == [ALL_LINEAR] or (len(targets) == 1 and not is_word(targets[0]))
    return targets[0] if is_text else list(targets)


def default_targets(model: Any) -> str | list[str]:
    """Return the default modules to adapt, for a built module or a `Model`.

    They are suffixes of module names, a regular expression, or `ALL_LINEAR`.
    """
    return _pefts_choice(model) or ALL_LINEAR


def has_default_targets(model: Model) -> bool:
    """Return True if peft's table has default modules to adapt for the model's architecture, or for its text
    model's.
    """
    return _pefts_choice(model) is not None


def chosen_by_peft(model: Model) -> bool:
    """Return True if peft itself finds the default modules to adapt for this architecture."""
    return model.architecture in pefts_table() and not any("expert" in key for key in model.config)


def _pefts_choice(model: Any) -> str | list[str] | None:
    """Return the default modules to adapt in peft's table, for a built module or a `Model`; None without an
    entry.
    """
    # A snugfit `Model` has `facts`, unlike a torch module.
    if hasattr(model, "facts") and model.module is None:
        config = model.config
        names = _names(config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
    else:
        config = getattr(model.module if hasattr(model, "facts") else model, "config", None)
        part = getattr(config, "text_config", None)
        names = _names(getattr(config, "model_type", None), getattr(part, "model_type", None))
    table = pefts_table()
    return next((table[name] for name in names if name in table), None)


def _names(architecture: str | None, part: str | None) -> Iterator[str]:
    yield from filter(None, (architecture, f"{architecture}_text", part))


@cache
def pefts_table() -> Mapping[str, str | list[str]]:
    """Return peft's default modules to adapt by architecture, read from its source, because importing peft
    imports torch.

    The table is empty where peft is missing or its source has another form.
    """
    spec = find_spec("peft")
    if spec is None or spec.origin is None:
        return {}
    try:
        source = Path(spec.origin).with_name("utils").joinpath("constants.py").read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == _PEFTS_TABLE:
                return dict(ast.literal_eval(statement.value))
    except (OSError, ValueError):  # another version of peft computes its table in code
        pass
    return {}
