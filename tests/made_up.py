"""Invented results, so that reports can be tested without a rehearsal or a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.results.footprint import Footprint, Kind, Moment, Timing
from snugfit.results.measurement import Device, Measurement
from snugfit.results.prediction import (
    Anatomy,
    CurvePoint,
    KindLine,
    ModuleLine,
    OperatorLine,
    Prediction,
    TensorLine,
)
from snugfit.results.step_seconds import PhaseSeconds, PhaseSpan, StepSeconds
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB, MIB

EVIL = "[a/path]|=cmd()<script>alert(1)</script>\x1b[31m$\\bad{$"
"""A hostile name for a config."""


def job(name: str = "bert-large-uncased") -> Job:
    model = replace(Model.find("bert-large-uncased"), name=name)
    return Job(model=model, task=Task.SEQUENCE_CLASSIFICATION)


def footprint(size: int = 7 * GIB) -> Footprint:
    return Footprint(
        requested_bytes=size - 400 * MIB,
        allocated_bytes=size - 390 * MIB,
        reserved_bytes=size,
        nvml_bytes=size + 600 * MIB,
        context_bytes=600 * MIB,
        host_bytes=3 * GIB,
        at=Moment(phase="backward", module="bert.encoder.layer.23", operator="aten::mm", step=3),
        kinds={
            Kind.WEIGHTS: GIB,
            Kind.GRADIENTS: GIB,
            Kind.OPTIMIZER_STATES: 2 * GIB,
            Kind.ACTIVATIONS: 2 * GIB,
        },
    )


def anatomy(module: str = "bert.encoder.layer.*.attention.self") -> Anatomy:
    phases = ["forward"] * 10 + ["backward"] * 20 + ["update"] * 5
    heights = [*range(10), *range(20, 0, -1), *range(5)]
    return Anatomy(
        kinds=(KindLine(kind="weights", bytes=GIB, reason="335 million parameters of 4 bytes"),),
        largest=(
            TensorLine(
                module=module,
                operator="aten::mm",
                phase="forward",
                kind="activations",
                bytes=300 * MIB,
                count=24,
            ),
        ),
        curve=tuple(
            CurvePoint(
                position=index / 35,
                phase=phase,
                live_bytes=(2 + height) * 100 * MIB,
                reserved_bytes=3 * GIB,
                kinds={"weights": 200 * MIB, "activations": height * 100 * MIB},
            )
            for index, (phase, height) in enumerate(zip(phases, heights, strict=True))
        ),
        operators=(
            OperatorLine(group="tensor contractions", phase="forward", kernels=300, flops=10**12, bytes=GIB),
            OperatorLine(group="element-wise", phase="update", kernels=9, flops=10**9, bytes=4 * GIB),
        ),
        syncs=3,
        modules=tuple(
            ModuleLine(module=name, kind=kind, bytes=size * MIB)
            for name, kind, size in ((module, "activations", 1900), ("bert.embeddings", "weights", 200))
        ),
    )


def prediction(size: int = 7 * GIB, *, name: str = "bert-large-uncased", **changes: Any) -> Prediction:
    gpu = find_gpu("v100-16gb")
    whole = Prediction(
        job=job(name),
        recipe=Recipe(),
        loop="plain",
        gpu=gpu,
        memory_bytes=gpu.memory_bytes,
        footprint=footprint(size),
        anatomy=anatomy(name if name == EVIL else "bert.encoder.layer.*.attention.self"),
        versions={"torch": "2.13.0"},
        doubts=("the context of this GPU was not measured",),
    )
    return replace(whole, **changes)


def measurement(size: int = 7 * GIB, **changes: Any) -> Measurement:
    whole = Measurement(
        job=job(),
        recipe=Recipe(),
        loop="plain",
        device=Device(type="cuda", name="NVIDIA H200", total_bytes=140 * GIB),
        outcome="ok",
        footprint=footprint(size),
        timing=timing(),
        versions={"torch": "2.13.0"},
        when="2026-11-20T14:00:00+00:00",
    )
    return replace(whole, **changes)


def timing(samples_per_second: float = 40.0, **changes: Any) -> Timing:
    return replace(
        Timing(
            step_seconds=4 / samples_per_second, spread=0.01, samples_per_second=samples_per_second, steps=10
        ),
        **changes,
    )


def timed(one: Prediction) -> Prediction:
    """Return the prediction with a step of 0.3 s, which the host launches in 0.1 s."""
    passages = (
        ("host", "forward", 0.0, 0.06), ("device", "forward", 0.02, 0.1),
        ("host", "backward", 0.06, 0.1), ("device", "backward", 0.1, 0.32),
    )  # fmt: skip
    spans = tuple(
        PhaseSpan(lane=lane, phase=phase, start_seconds=start, end_seconds=end, busy_seconds=end - start)
        for lane, phase, start, end in passages
    )
    seconds = StepSeconds(
        step_seconds=0.3, samples_per_second=4 / 0.3, device_seconds=0.3, host_seconds=0.1,
        phases=tuple(
            PhaseSeconds(
                group=line.group,
                phase=line.phase,
                device_seconds=0.15,
                host_seconds=0.05,
                roofline_seconds=0.1,
            )
            for line in one.anatomy.operators
        ),
        bound="tensor contractions", measured_rates=True,
    )  # fmt: skip
    return replace(one, timing=seconds, timeline=spans)


def way(recipe: str = "expandable", **changed: Any) -> WayOut:
    about: dict[str, Any] = {
        "recipe": recipe, "changes": (recipe,), "needed_bytes": 6 * GIB, "spare_bytes": 2 * GIB,
        "step_seconds": 0.2, "slowdown": 0.0, "fidelity": "same",
    }  # fmt: skip
    return WayOut(**about | changed)


WAYS = WaysOut(
    ways=(
        way(),
        way("chunked_loss", slowdown=0.02, fidelity="rounds", spare_bytes=MIB, tight=True),
        way("lion", slowdown=-0.1, fidelity="learns"),
    )
)
LARGER = WaysOut(
    larger_gpu=LargerGpu(
        gpu="H200-SXM", memory_bytes=140 * GIB, recipe="bf16", needed_bytes=90 * GIB, step_seconds=0.5
    )
)
