"""Conversion of a Setup to Python text, for the script templates in `scripts/`.

A Setup has the settings of a recipe. Each field has a handler that returns its Python text (`step/wishes/`).
A field that names another library's function becomes a call of it. For a function of snugfit, the technique
provides equivalent lines without snugfit (`Technique.code`). Without such lines, the technique raises an
error.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.features.exchange import installed
from snugfit.job.architectures import heads
from snugfit.job.inputs import has_classes
from snugfit.step.applier import script_fields
from snugfit.step.wishes.handler import ScriptContext
from snugfit.step.wishes.python_text import literal
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe


def script_values(
    job: Job,
    recipe: Recipe,
    to: str,
    dotted: Mapping[str, Any],
    *,
    training_arguments: Mapping[str, Any] | None = None,
    gpus: int = 1,
) -> dict[str, Any]:
    """Return the values for the placeholders in an exported script's template, by name.

    Values are Python text, unless the template applies `literal`; `to` is the target library. With
    `training_arguments`, the Trainer runs the training loop.
    """
    context = ScriptContext(
        job=job,
        setup=on_gpus(recipe.setup(), gpus),
        recipe=recipe,
        target=to,
        trainer=training_arguments is not None,
        library=installed.version(),
        checkpointing_name=installed.checkpointing_name(),
        checkpointing_options=installed.checkpointing_options(),
    )
    wishes = script_fields(context)
    if to == "deepspeed" and "config" not in wishes:
        raise context.refusal(Slot.SHARDING, "its steps are not those of DeepSpeed's engine")
    wishes.setdefault("parallel", None)
    arguments = {"dtype": "", **wishes["model_arguments"], **_config_arguments(job)}  # the dtype comes first
    return {
        "recipe": str(recipe),
        "task": job.task.value,
        "writer": writer(to),
        "model": folder_or_id(job),
        "auto": heads()[job.task][0],
        "environment": {k.partition(".")[2]: v for k, v in dotted.items() if k.startswith("environment.")},
        "shifted": job.task == "causal-lm",  # the first token of a sequence has no prediction
        "batch_size": job.batch_size,
        "gpus": gpus,
        "joins": to == "deepspeed" or (to == "torch" and wishes["parallel"] is not None),
        "note": "",
        "mixed": "no",
        "learning_rate": job.learning_rate,
        "clip": job.clip,
        "training_arguments": training_arguments or {},
        "quantizing": (),
        "widening": (),
        "adapting": (),
        "preparing": (),
        "kernels": (),
        "converting": (),
        "compiling": (),
        "checkpointing": (),
        **wishes,
        "optimizer": wishes.get("optimizer_of_part") or wishes["optimizer"],
        "model_arguments": arguments,
    }


def samples_at_once(job: Job, recipe: Recipe, gpus: int) -> int:
    """Return the number of samples in a micro-batch on one GPU. Raises `UsageError` for a batch that does not
    split evenly.
    """
    setup = on_gpus(recipe.setup(), gpus)
    return setup.per_piece(job_of_rank(job, setup).batch_size)


def write_script(template: str, script: Mapping[str, Any]) -> str:
    """Return the text of an exported Python script with these `script_values`, after a check that it
    compiles.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("snugfit.features.exchange", "scripts"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = literal
    environment.filters["wrapped"] = lambda line: "\n".join(textwrap.wrap(line, 100, break_on_hyphens=False))
    text = environment.get_template(f"{template}.j2").render(script=script).lstrip("\n")
    compile(text, f"{template}.py", "exec")
    return text


def writer(to: str) -> str:
    """Return a line for the top of an exported file: snugfit's version and the target library."""
    from snugfit.versions import __version__

    return f"snugfit {__version__} (--export {to}) for {installed.version()}"


def folder_or_id(job: Job) -> str:
    """Return the folder of a local config file; for any other path or a hub id, the text itself."""
    name = job.model.name
    if job.model.origin == "path" and name.endswith(".json"):
        return os.path.dirname(name) or "."
    return name


def _config_arguments(job: Job) -> dict[str, str]:
    """Return keyword arguments, as Python text, for values of the job's model config that differ from the
    defaults.
    """
    from transformers import AutoConfig

    config, arguments = job.transformers_config(), dict[str, str]()
    facts = job.model.config
    plain = AutoConfig.for_model(facts.pop("model_type"), **facts)
    if has_classes(job.task):
        arguments["num_labels"] = repr(config.num_labels)
    for name in ("pad_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if value is not None and getattr(plain, name, None) is None:
            arguments[name] = repr(value)
    return arguments
