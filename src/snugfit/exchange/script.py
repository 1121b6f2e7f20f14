"""The Setup's wishes as Python text: what the templates in `scripts/` are filled with.

What a wish is as Python stands with its handler (`step/wishes/`). One that names another library's function
becomes a call of it. Where `install` names a function of snugfit's own, the technique gives the lines that do
the same without snugfit (`Technique.code`); where it gives none, and where a wish has no library behind it,
the technique is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from snugfit.exchange import installed
from snugfit.job.architectures import HEADS
from snugfit.job.model import CLASSIFICATION
from snugfit.step.applier import script_fields
from snugfit.step.wishes.handler import ScriptContext
from snugfit.step.wishes.python_text import CallText, literal

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything a template may write; texts are Python already, unless a template says `literal`."""

    recipe: str
    """As a recipe is written."""

    task: str
    """What the job trains for, by its name."""

    writer: str
    """snugfit and transformers, with their versions."""

    model: str
    """What `from_pretrained` is given."""

    auto: str
    """The auto class of transformers that builds the model."""

    model_arguments: Mapping[str, str]
    """Other arguments of `from_pretrained`, as Python text by name."""

    environment: Mapping[str, str]
    """Variables of the process."""

    adapting: tuple[str, ...] = ()
    """Lines after the model is built."""

    preparing: tuple[str, ...] = ()
    """Lines before the optimizer is made."""

    checkpointing: str = ""
    """A method of the model with its arguments; empty without checkpointing."""

    optimizer: CallText
    """The call that makes the optimizer over `parameters`."""

    matmul: str
    """What torch's `fp32_precision` is set to."""

    autocast: str
    """A dtype; empty without autocast."""

    cast: str
    """The dtype that floating-point inputs are cast to; empty when they are not."""

    scaled: bool
    """Whether gradients are scaled."""

    mixed: str
    """accelerate's word for the precision."""

    pieces: int
    """Micro-batches that the global batch is cut into."""

    shifted: bool
    """Whether the first token of a sequence is not predicted."""

    batch_size: int
    """Samples of a global batch."""

    learning_rate: float
    """The rate that the optimizer begins with."""

    clip: float | None
    """The job's; the scripts clip only when it is more than 0."""

    decay_groups: bool
    """Whether biases and normalisations do not decay."""

    workers: int
    """Processes of the loader that prepare batches."""

    pinned: bool
    """Whether the loader's batches lie in page-locked memory."""

    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What `TrainingArguments` is called with, for the Trainer."""

    @classmethod
    def of(
        cls,
        job: Job,
        recipe: Recipe,
        dotted: Mapping[str, Any],
        *,
        training_arguments: Mapping[str, Any] | None = None,
    ) -> Self:
        """The script of a job and a recipe; with `training_arguments` the loop is the Trainer's."""
        from snugfit.versions import __version__

        context = ScriptContext(
            job=job,
            setup=recipe.setup(),
            recipe=recipe,
            trainer=training_arguments is not None,
            library=installed.version(),
            checkpointing_name=installed.checkpointing_name(),
            checkpointing_options=installed.checkpointing_options(),
        )
        wishes = script_fields(context)
        arguments = {"dtype": "", **wishes["model_arguments"], **_config_arguments(job)}  # dtype stands first
        return cls(
            recipe=str(recipe),
            task=job.task.value,
            writer=f"snugfit {__version__} for {installed.version()}",
            model=_folder_or_id(job),
            auto=HEADS[job.task][0],
            environment={k.partition(".")[2]: v for k, v in dotted.items() if k.startswith("environment.")},
            shifted=job.task == "causal-lm",
            batch_size=job.batch_size,
            learning_rate=job.learning_rate,
            clip=job.clip,
            training_arguments=training_arguments or {},
            **{**wishes, "model_arguments": arguments},
        )


def write_script(template: str, script: Script) -> str:
    """The text of the script; it is Python that compiles."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("snugfit.exchange", "scripts"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = literal
    text = environment.get_template(f"{template}.j2").render(script=script).lstrip("\n")
    compile(text, f"{template}.py", "exec")
    return text


def _folder_or_id(job: Job) -> str:
    """A path without the name of the file, a hub id as it is."""
    name = job.model.name
    if job.model.origin == "path" and name.endswith(".json"):
        return os.path.dirname(name) or "."
    return name


def _config_arguments(job: Job) -> dict[str, str]:
    """What the job's config says and the model's own does not."""
    from transformers import AutoConfig

    config, arguments = job.transformers_config(), dict[str, str]()
    facts = job.model.config
    plain = AutoConfig.for_model(facts.pop("model_type"), **facts)
    if job.task in CLASSIFICATION:
        arguments["num_labels"] = repr(config.num_labels)
    for name in ("pad_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if value is not None and getattr(plain, name, None) is None:
            arguments[name] = repr(value)
    return arguments
