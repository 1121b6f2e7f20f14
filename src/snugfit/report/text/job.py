"""Text that describes a job in one line, for the head of every report."""

from __future__ import annotations

from snugfit.job.inputs import has_seconds, has_sequence, has_target
from snugfit.job.job import Job


def job_line(job: Job) -> str:
    """Return a line with model, task, phase, the sizes of a batch, and the dtype of the loaded weights with
    its reason. The routing of experts follows if it is not balanced."""
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
    `4 × 30 s` are samples and seconds of sound. Lengths appear only for tasks with them."""
    text = f"{job.batch_size}"
    text += "" if not has_sequence(job.task) else f" × {job.sequence_length}"
    text += f" × {job.seconds:g} s" if has_seconds(job.task) else ""
    # In a phase that a feature adds, the job has no target sequence.
    return text + (f" → {job.target_length}" if has_target(job.task) and job.added_phase is None else "")
