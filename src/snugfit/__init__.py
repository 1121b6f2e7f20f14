"""snugfit: predict, plan, train and measure training steps within the memory of a GPU.

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
    from snugfit.cli.notebook import predict
    from snugfit.cli.plan_cache import plan
    from snugfit.comparison.compare import Comparison, compare
    from snugfit.data.lengths import Lengths
    from snugfit.errors import SnugfitError
    from snugfit.frontends.custom_loop.accelerate import accelerate
    from snugfit.frontends.custom_loop.run import HandRun
    from snugfit.frontends.own import train
    from snugfit.frontends.trainer.fit import fit
    from snugfit.job.gpu import Gpu, all_gpus, find_gpu
    from snugfit.job.job import Job, Phase, Task
    from snugfit.job.model import Model
    from snugfit.measurement.measure import measure
    from snugfit.measurement.watch import watch
    from snugfit.planning.fleet.gpu_plans import GpuPlans
    from snugfit.planning.fleet.search_gpus import plan_gpus
    from snugfit.planning.lengths.length_plan import LengthPlan
    from snugfit.planning.lengths.lengths import plan_lengths
    from snugfit.planning.plan import Plan
    from snugfit.planning.search.ways_out import ways_out
    from snugfit.planning.several_gpus.search import plan_several_gpus
    from snugfit.results.footprint import Footprint, Timing
    from snugfit.results.measurement import Measurement
    from snugfit.results.prediction import Prediction
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.run.trained import Trained
    from snugfit.versions import __version__ as __version__

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
    "plan_several_gpus",
    "predict",
    "Prediction",
    "Recipe",
    "SnugfitError",
    "Task",
    "Timing",
    "train",
    "Trained",
    "watch",
    "ways_out",
]

_HOMES = {
    "cli.notebook": ("predict",),
    "cli.plan_cache": ("plan",),
    "comparison.compare": ("Comparison", "compare"),
    "frontends.custom_loop.accelerate": ("accelerate",),
    "frontends.custom_loop.run": ("HandRun",),
    "frontends.own": ("train",),
    "frontends.trainer.fit": ("fit",),
    "errors": ("SnugfitError",),
    "job.gpu": ("Gpu", "all_gpus", "find_gpu"),
    "job.job": ("Job", "Phase", "Task"),
    "data.lengths": ("Lengths",),
    "job.model": ("Model",),
    "measurement.measure": ("measure",),
    "results.measurement": ("Measurement",),
    "measurement.watch": ("watch",),
    "planning.search.ways_out": ("ways_out",),
    "planning.fleet.gpu_plans": ("GpuPlans",),
    "planning.lengths.length_plan": ("LengthPlan",),
    "planning.lengths.lengths": ("plan_lengths",),
    "planning.plan": ("Plan",),
    "planning.fleet.search_gpus": ("plan_gpus",),
    "planning.several_gpus.search": ("plan_several_gpus",),
    "results.prediction": ("Prediction",),
    "results.footprint": ("Footprint", "Timing"),
    "techniques.recipe": ("Recipe",),
    "training.run.trained": ("Trained",),
    "versions": ("__version__",),
}
_SHOWN = ("cli", "comparison", "measurement", "planning", "prediction", "results")
"""Names of the classes whose results print themselves, by a function of `report`."""


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
