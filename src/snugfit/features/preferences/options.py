"""Command-line options of tasks on preferences, and the commands that support them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Annotated, Any

from snugfit.cli import arguments as given
from snugfit.errors import UsageError
from snugfit.features.preferences.settings import FORMS, LOSSES, ON_ROLLOUTS, REFERENCES

COMMANDS = ("predict", "plan", "gpus", "measure", "train")
"""Commands of snugfit that take jobs on preferences."""


def _option(name: str, kind: Any, sentence: str) -> inspect.Parameter:
    annotation = Annotated[kind, given.option(given.JOB, sentence)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


OPTIONS = (
    _option("completion_length", int | None, "with preferences: tokens of each answer. [half]"),
    _option("loss_type", str | None, f"with --task dpo: {', '.join(LOSSES)}. \\[sigmoid]"),
    _option(
        "beta",
        float | None,
        "weight of the loss's margin, or of the teacher, as in TRL.",
    ),
    _option("gamma", float | None, "with --task simpo: margin of the loss. [0.5]"),
    _option("rollouts", int | None, "with --task grpo or rloo: answers generated at once. [batch]"),
    _option("generation", str | None, "with --task grpo or rloo: transformers or vllm. \\[transformers]"),
    _option("vllm_share", float | None, "with --generation vllm: its share of the GPU's memory. [0.3]"),
    _option("old_log_probs", bool | None, "with --task grpo or rloo: a pass of the policy before updates."),
    _option("teacher", str | None, "with --task distill: the model that the student learns from."),
    _option("teacher_dtype", str | None, "with --task distill: dtype of its weights. \\[its config's]"),
    _option("lmbda", float | None, "with --task distill: share of steps on the student's answers. [0.5]"),
    _option("reference", str | None, f"with --task dpo or kto: {', '.join(REFERENCES)}. \\[auto]"),
)
"""Command-line options of the settings."""


def check_request(command: str, request: Any) -> Any:
    """Return the request, with the memory that vLLM leaves. Raises `UsageError` for a command that does not
    support the task, and for several GPUs.
    """
    task, settings = request.job.task, request.job.phase_settings
    if task not in FORMS:
        return request
    few = {"distill": COMMANDS[:-1], **dict.fromkeys(ON_ROLLOUTS, ("predict",))}
    commands = few.get(task, COMMANDS)
    if command not in commands:
        raise UsageError(
            f"snugfit {command} does not support --task {task} yet. Commands: {', '.join(commands)}."
        )
    if request.gpus != 1:
        raise UsageError(f"--task {task} was tried on one GPU only. Leave --gpus and --mesh out.")
    if task not in ON_ROLLOUTS:
        return request
    if request.flags.get("largest"):
        raise UsageError(
            f"--largest: the task {task} has two batches, that of answers and --rollouts. Leave it out."
        )
    whole = request.memory_bytes or (request.gpu and request.gpu.memory_bytes)
    if settings.get("generation") != "vllm" or not whole:
        return request
    return replace(request, memory_bytes=int(whole * (1 - settings["vllm_share"])))
