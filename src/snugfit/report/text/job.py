"""A job in one line, for the head of every report."""

from __future__ import annotations

from snugfit.job.job import Job
from snugfit.job.limits import NO_SEQUENCE, WITH_TARGET


def job_line(job: Job) -> str:
    """Model, task, phase, the sizes of a batch, the loaded weights' dtype and why it is that, and how routers
    choose where that was said."""
    routing = "" if job.routing == "balanced" else f" · {job.routing} routing"
    return f"{job.model.name} · {job.task} · {job.phase} · batch {sizes(job)} · {dtype_note(job)}{routing}"


def dtype_note(job: Job) -> str:
    """`bfloat16 weights, as the checkpoint`."""
    text = f"{job.dtype} weights"
    if job.model.module is not None or job.model.dtype is None:
        return text
    return f"{text}, {'as the checkpoint' if job.dtype == job.model.dtype else f'not {job.model.dtype}'}"


def sizes(job: Job) -> str:
    """`4 × 512 → 128`: samples, tokens of a sequence, tokens of a target; the lengths only where the task's
    batches have them."""
    text = f"{job.batch_size}"
    text += "" if job.task in NO_SEQUENCE else f" × {job.sequence_length}"
    return text + (f" → {job.target_length}" if job.task in WITH_TARGET else "")
