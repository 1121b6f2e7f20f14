"""Made-up plans and their choices."""

from __future__ import annotations

from made_up import footprint, job
from snugfit.job.gpu import find_gpu
from snugfit.planning.plan import Choice, Counts, Plan


def choice(recipe: str, seconds: float) -> Choice:
    shape = footprint()
    assert shape.requested_bytes
    assert shape.allocated_bytes
    assert shape.reserved_bytes
    assert shape.context_bytes
    return Choice(
        recipe=recipe,
        requested_bytes=shape.requested_bytes,
        allocated_bytes=shape.allocated_bytes,
        reserved_bytes=shape.reserved_bytes,
        context_bytes=shape.context_bytes,
        step_seconds=seconds,
        samples_per_second=4 / seconds,
    )


def planned(count: int, memory: int | None = None) -> Plan:
    ranked = (choice("bf16", 0.05), choice("bf16 + every_layer", 0.07), choice("plain", 0.09))
    fits = memory is None or ranked[0].needed_bytes <= memory
    return Plan(
        job=job(),
        gpu=find_gpu("h200"),
        memory_bytes=memory,
        fidelity="rounds",
        objective="speed",
        front=ranked[:1],
        best=ranked[0] if fits else None,
        ranked=ranked[:count] if fits else (),
        counts=Counts(recipes=9, tapes=8, footprints=7, passes=6, replayed=5),
        versions={"torch": "2.13.0"},
    )
