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
    from snugfit.cli.notebook import predict as predict
    from snugfit.cli.plan_cache import plan as plan
    from snugfit.comparison.compare import Comparison as Comparison
    from snugfit.comparison.compare import compare as compare
    from snugfit.errors import SnugfitError as SnugfitError
    from snugfit.features.distributed.plan.search import plan_several_gpus as plan_several_gpus
    from snugfit.features.lengths.dataset import Lengths as Lengths
    from snugfit.features.lengths.length_plan import LengthPlan as LengthPlan
    from snugfit.features.lengths.search import plan_lengths as plan_lengths
    from snugfit.features.loops.custom_loop.accelerate import accelerate as accelerate
    from snugfit.features.loops.custom_loop.run import HandRun as HandRun
    from snugfit.features.loops.trainer.fit import fit as fit
    from snugfit.frontends.own import train as train
    from snugfit.job.gpu import Gpu as Gpu
    from snugfit.job.gpu import all_gpus as all_gpus
    from snugfit.job.gpu import find_gpu as find_gpu
    from snugfit.job.job import Job as Job
    from snugfit.job.job import Phase as Phase
    from snugfit.job.job import Task as Task
    from snugfit.job.model import Model as Model
    from snugfit.measurement.measure import measure as measure
    from snugfit.measurement.watch import watch as watch
    from snugfit.planning.fleet.gpu_plans import GpuPlans as GpuPlans
    from snugfit.planning.fleet.search_gpus import plan_gpus as plan_gpus
    from snugfit.planning.plan import Plan as Plan
    from snugfit.planning.search.ways_out import ways_out as ways_out
    from snugfit.results.footprint import Footprint as Footprint
    from snugfit.results.footprint import Timing as Timing
    from snugfit.results.measurement import Measurement as Measurement
    from snugfit.results.prediction import Prediction as Prediction
    from snugfit.techniques.recipe import Recipe as Recipe
    from snugfit.training.run.trained import Trained as Trained
    from snugfit.versions import __version__ as __version__


_HOMES = {
    "cli.notebook": ("predict",),
    "cli.plan_cache": ("plan",),
    "comparison.compare": ("Comparison", "compare"),
    "frontends.own": ("train",),
    "errors": ("SnugfitError",),
    "job.gpu": ("Gpu", "all_gpus", "find_gpu"),
    "job.job": ("Job", "Phase", "Task"),
    "job.model": ("Model",),
    "measurement.measure": ("measure",),
    "results.measurement": ("Measurement",),
    "measurement.watch": ("watch",),
    "planning.search.ways_out": ("ways_out",),
    "planning.fleet.gpu_plans": ("GpuPlans",),
    "planning.plan": ("Plan",),
    "planning.fleet.search_gpus": ("plan_gpus",),
    "results.prediction": ("Prediction",),
    "results.footprint": ("Footprint", "Timing"),
    "techniques.recipe": ("Recipe",),
    "training.run.trained": ("Trained",),
    "versions": ("__version__",),
}
_SHOWN = ("cli", "comparison", "measurement", "planning", "prediction", "results")
"""Rooms whose results print themselves, with a face from the report room."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        core = {name for names in _HOMES.values() for name in names} - {"__version__"}
        return sorted({*core, *_names_of_features()}, key=str.casefold)
    home = next((home for home, names in _HOMES.items() if name in names), "")
    module = f"snugfit.{home}" if home else "" if name[0] == "_" else _names_of_features().get(name, "")
    if not module:
        raise AttributeError(f"module 'snugfit' has no attribute {name!r}")
    # Results of features print themselves too.
    if not home or home.split(".")[0] in _SHOWN:
        importlib.import_module("snugfit.report.show").attach()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def _names_of_features() -> dict[str, str]:
    """Return the module of each name that a feature adds."""
    return importlib.import_module("snugfit.techniques.registry").public_names()  # type: ignore[no-any-return]


def __dir__() -> list[str]:
    return sorted([*globals(), *__getattr__("__all__")])
