"""A job in one line, for the head of every report."""

from __future__ import annotations

from snugfit.job.job import Job
from snugfit.job.limits import NO_SEQUENCE, WITH_TARGET


def job_line(job: Job) -> str:
    """Model, task, phase, the sizes of a batch, and how routers choose where that was said."""
    routing = "" if job.routing == "balanced" else f" · {job.routing} routing"
    return f"{job.model.name} · {job.task} · {job.phase} · batch {sizes(job)}{routing}"


def sizes(job: Job) -> str:
    """`4 × 512 → 128`: samples, tokens of a sequence, tokens of a target; the lengths only where the task's
    batches have them."""
    text = f"{job.batch_size}"
    text += "" if job.task in NO_SEQUENCE else f" × {job.sequence_length}"
    return text + (f" → {job.target_length}" if job.task in WITH_TARGET else "")
