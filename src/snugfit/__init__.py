"""snugfit: predict, plan, train and measure what has to fit a GPU.

    import snugfit

    job = snugfit.Job(model=snugfit.Model.find("bert-large-uncased"), task="sequence-classification")
    print(snugfit.predict(job, "bf16 + every_layer", gpu="h200"))
    print(snugfit.measure(job, "bf16 + every_layer"))
    print(snugfit.plan(job, gpu="v100-16gb"))
    snugfit.train(job, "bf16", "reviews.jsonl", tokenizer="./bert", weights="./bert", output_dir="out")

    with snugfit.watch() as seen:
        trainer.train()
    print(seen)

Names are loaded when they are first used, so that importing snugfit costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.comparison.compare import Comparison, compare
    from snugfit.doors.hand_loop import accelerate
    from snugfit.doors.hand_run import HandRun
    from snugfit.doors.own_loop import train
    from snugfit.doors.trainer import fit
    from snugfit.errors import SnugfitError
    from snugfit.job.gpu import Gpu, all_gpus, find_gpu
    from snugfit.job.job import Job, Phase, Task
    from snugfit.job.lengths import Lengths
    from snugfit.job.model import Model
    from snugfit.measurement.measure import measure
    from snugfit.measurement.measurement import Measurement
    from snugfit.measurement.watch import watch
    from snugfit.planning.gpu_plans import GpuPlans
    from snugfit.planning.length_plan import LengthPlan
    from snugfit.planning.lengths import plan_lengths
    from snugfit.planning.plan import Plan
    from snugfit.planning.search import plan
    from snugfit.planning.search_gpus import plan_gpus
    from snugfit.prediction.predict import predict
    from snugfit.prediction.prediction import Prediction
    from snugfit.step.footprint import Footprint, Timing
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.trained import Trained

__version__ = "0.1.0"

__all__ = [
    "accelerate",
    "all_gpus",
    "compare",
    "Comparison",
    "find_gpu",
    "fit",
    "Footprint",
    "Gpu",
    "GpuPlans",
    "HandRun",
    "Job",
    "LengthPlan",
    "Lengths",
    "measure",
    "Measurement",
    "Model",
    "Phase",
    "plan",
    "Plan",
    "plan_gpus",
    "plan_lengths",
    "predict",
    "Prediction",
    "Recipe",
    "SnugfitError",
    "Task",
    "Timing",
    "train",
    "Trained",
    "watch",
]

_HOMES = {
    "comparison.compare": ("Comparison", "compare"),
    "doors.hand_loop": ("accelerate",),
    "doors.hand_run": ("HandRun",),
    "doors.own_loop": ("train",),
    "doors.trainer": ("fit",),
    "errors": ("SnugfitError",),
    "job.gpu": ("Gpu", "all_gpus", "find_gpu"),
    "job.job": ("Job", "Phase", "Task"),
    "job.lengths": ("Lengths",),
    "job.model": ("Model",),
    "measurement.measure": ("measure",),
    "measurement.measurement": ("Measurement",),
    "measurement.watch": ("watch",),
    "planning.gpu_plans": ("GpuPlans",),
    "planning.length_plan": ("LengthPlan",),
    "planning.lengths": ("plan_lengths",),
    "planning.plan": ("Plan",),
    "planning.search": ("plan",),
    "planning.search_gpus": ("plan_gpus",),
    "prediction.predict": ("predict",),
    "prediction.prediction": ("Prediction",),
    "step.footprint": ("Footprint", "Timing"),
    "techniques.recipe": ("Recipe",),
    "training.trained": ("Trained",),
}
_SHOWN = ("comparison", "measurement", "planning", "prediction")
"""Rooms whose results print themselves, with a face from the report room."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            if home.split(".")[0] in _SHOWN:
                importlib.import_module("snugfit.report.show").attach()
            value = getattr(importlib.import_module(f"snugfit.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'snugfit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
