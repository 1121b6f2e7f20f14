"""The Setup's wishes as Python text: what the templates in `scripts/` are filled with.

A wish that names another library's function becomes a call of it. Where `install` names a function of
snugfit's own, the technique gives the lines that do the same without snugfit (`Technique.code`); where it
gives none, and where a wish has no library behind it, the technique is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from snugfit.errors import RecipeError
from snugfit.exchange import installed
from snugfit.exchange.python_call import literal
from snugfit.job.architectures import HEADS, class_of
from snugfit.job.model import CLASSIFICATION
from snugfit.step.accelerate_loop import MIXED
from snugfit.techniques.setup import Call, Setup

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Technique

_OWN = "snugfit."


@dataclass(frozen=True, kw_only=True)
class Factory:
    """A call that makes something."""

    imported: str
    """The line that imports it."""

    called: str
    """The expression that calls it."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything a template may write; texts are Python already, unless a template says `literal`."""

    recipe: str
    """As a recipe is written."""

    task: str
    """The job's."""

    writer: str
    """snugfit and transformers, with their versions."""

    model: str
    """What `from_pretrained` is given."""

    auto: str
    """transformers' auto class."""

    model_arguments: Mapping[str, str]
    """`from_pretrained`'s other arguments."""

    environment: Mapping[str, str]
    """Variables of the process."""

    adapting: tuple[str, ...]
    """Lines after the model is built."""

    preparing: tuple[str, ...]
    """Lines before the optimizer is made."""

    checkpointing: str
    """A method of the model with its arguments; empty without checkpointing."""

    optimizer: Factory
    """Over `parameters`."""

    matmul: str
    """torch's `fp32_precision`."""

    autocast: str
    """A dtype; empty without autocast."""

    cast: str
    """The dtype that floating-point inputs are cast to; empty when they are not."""

    scaled: bool
    """Whether gradients are scaled."""

    mixed: str
    """accelerate's word for the precision."""

    pieces: int
    """Micro-batches."""

    shifted: bool
    """Whether the first token of a sequence is not predicted."""

    batch_size: int
    """The job's."""

    learning_rate: float
    """The job's."""

    clip: float | None
    """The job's; the scripts clip only when it is more than 0."""

    decay_groups: bool
    """The job's."""

    workers: int
    """Of the loader."""

    pinned: bool
    """Of the loader."""

    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the Trainer."""

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

        setup = recipe.setup()
        loop_is_ours = training_arguments is None
        whole = setup.weights_dtype == "float32" or setup.autocast is not None
        return cls(
            recipe=str(recipe),
            task=job.task.value,
            writer=f"snugfit {__version__} for {installed.version()}",
            model=_place(job),
            auto=HEADS[job.task][0],
            model_arguments=_model_arguments(job, setup),
            environment={k.partition(".")[2]: v for k, v in dotted.items() if k.startswith("environment.")},
            adapting=_lines(job, recipe, "adapt", setup.adapt),
            preparing=_lines(job, recipe, "optimizer", setup.optimizer.prepare) if loop_is_ours else (),
            checkpointing=_checkpointing(recipe, setup) if loop_is_ours else "",
            optimizer=_factory(recipe, setup.optimizer.factory),
            matmul=setup.matmul,
            autocast=f"torch.{setup.autocast}" if setup.autocast else "",
            cast="" if whole else f"torch.{setup.weights_dtype}",
            scaled=setup.scale_gradients,
            mixed=MIXED[setup.autocast],
            pieces=setup.micro_batches,
            shifted=job.task == "causal-lm",
            batch_size=job.batch_size,
            learning_rate=job.learning_rate,
            clip=job.clip,
            decay_groups=job.decay_groups and setup.optimizer.weight_decay,
            workers=setup.loader.workers,
            pinned=setup.loader.pinned,
            training_arguments=training_arguments or {},
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


def _place(job: Job) -> str:
    """A path without the name of the file, a hub id as it is."""
    name = job.model.name
    if job.model.origin == "path" and name.endswith(".json"):
        return os.path.dirname(name) or "."
    return name


def _model_arguments(job: Job, setup: Setup) -> dict[str, str]:
    from transformers import AutoConfig

    config = job.transformers_config()
    attention = setup.attention
    if attention == "sdpa" and not getattr(class_of(job.task, config), "_supports_sdpa", True):
        attention = "eager"
    arguments = {"dtype": f"torch.{setup.weights_dtype}", "attn_implementation": literal(attention)}
    facts = job.model.config
    plain = AutoConfig.for_model(facts.pop("model_type"), **facts)
    if job.task in CLASSIFICATION:
        arguments["num_labels"] = repr(config.num_labels)
    for name in ("pad_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if value is not None and getattr(plain, name, None) is None:
            arguments[name] = repr(value)
    return arguments


def _lines(job: Job, recipe: Recipe, wish: str, call: Call | None) -> tuple[str, ...]:
    """What is done to the model by the technique that made this wish."""
    if call is None:
        return ()
    if not call.path.startswith(_OWN):
        module, _, name = call.path.partition(":")
        given = "".join(f", {key}={literal(value)}" for key, value in call.arguments.items())
        return (f"from {module} import {name}", "", f"model = {name}(model{given}) or model")
    wisher = _wisher(recipe, wish)
    lines = wisher.code(job)
    if not lines and wish == "adapt":
        raise _refusal(wisher, "it is done by snugfit's own code, which a script without snugfit has not")
    return lines


def _checkpointing(recipe: Recipe, setup: Setup) -> str:
    wish = setup.checkpoint
    if wish is None:
        return ""
    if wish.layers_per_span != 1:
        raise _refusal(_wisher(recipe, "checkpoint"), "no library computes several layers again as one")
    options = {"every_n_layers": wish.every} if wish.every != 1 else {}
    if not options.keys() <= installed.checkpointing_options():
        raise _refusal(_wisher(recipe, "checkpoint"), f"{installed.version()} knows every layer or none")
    more = "".join(f", {name}={value}" for name, value in options.items())
    return f'{installed.checkpointing_name()}_enable({{"use_reentrant": False}}{more})'


def _factory(recipe: Recipe, call: Call) -> Factory:
    module, _, name = call.path.partition(":")
    if module.startswith(_OWN):
        raise _refusal(_wisher(recipe, "optimizer"), "its optimizer is snugfit's own code")
    arguments = "".join(f", {key}={literal(value)}" for key, value in call.arguments.items())
    return Factory(
        imported=f"from {module} import {name}",
        called=f"{name}(parameters, lr=LEARNING_RATE{arguments})",
    )


def _wisher(recipe: Recipe, wish: str) -> Technique:
    """The technique of the recipe that asks for this, when the others do not."""
    made = [each for each in recipe if getattr(each.install(Setup()), wish) != getattr(Setup(), wish)]
    return made[0] if made else next(iter(recipe))


def _refusal(technique: Technique, why: str) -> RecipeError:
    return RecipeError(f"{technique} cannot be exported: {why}.")
