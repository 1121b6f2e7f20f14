"""A job in one line, for the head of every report, and recipes as differences from the best."""

from __future__ import annotations

from collections.abc import Sequence

from snugfit.job.inputs import has_sequence, has_target
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe


def job_line(job: Job) -> str:
    """Return model, task, phase, the sizes of a batch, and the dtype of the loaded weights with its reason.
    The routing of experts follows if it is not balanced."""
    routing = "" if job.routing == "balanced" else f" · {job.routing} routing"
    return f"{job.model.name} · {job.task} · {job.phase} · batch {sizes(job)} · {dtype_note(job)}{routing}"


def dtype_note(job: Job) -> str:
    """Return the dtype of the weights with its reason: `bfloat16 weights, as the checkpoint`."""
    text = f"{job.dtype} weights"
    if job.model.module is not None or job.model.dtype is None:
        return text
    return f"{text}, {'as the checkpoint' if job.dtype == job.model.dtype else f'not {job.model.dtype}'}"


def sizes(job: Job) -> str:
    """Return the sizes of a batch: `4 × 512 → 128` are samples, tokens of a sequence, tokens of a target.
    Lengths appear only for tasks with them."""
    text = f"{job.batch_size}"
    text += "" if not has_sequence(job.task) else f" × {job.sequence_length}"
    return text + (f" → {job.target_length}" if has_target(job.task) else "")


def recipes_beside(recipes: Sequence[str], best: str) -> list[str]:
    """Return the best recipe in full at its first place, then `the same`. Other recipes become `with X + Y`,
    their techniques that differ from the best."""
    return [
        recipe if number == recipes.index(recipe) and recipe == best else _difference(recipe, best)
        for number, recipe in enumerate(recipes)
    ]


def _difference(recipe: str, best: str) -> str:
    pairs = zip(Recipe.parse(recipe), Recipe.parse(best), strict=True)
    other = " + ".join(str(one) for one, of_best in pairs if one != of_best)
    return f"with {other}" if other else "the same"


def beside_note(shown: Sequence[str]) -> str:
    """Return the note under a table with recipes of `recipes_beside`; empty without a `with X`."""
    note = '"with X" is the recipe that is written in full, with X instead of its own technique.'
    return note if any(text.startswith("with ") for text in shown) else ""
