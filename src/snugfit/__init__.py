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

# The command imports this file first, and Ctrl-C during the import of typing would print a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
    from snugfit.features.loops.trainer.callback import SnugfitCallback as SnugfitCallback
    from snugfit.features.loops.trainer.fit import fit as fit
    from snugfit.features.watch.watch import watch as watch
    from snugfit.features.ways_out.search import ways_out as ways_out
    from snugfit.frontends.own import train as train
    from snugfit.job.gpu import Gpu as Gpu
    from snugfit.job.gpu import all_gpus as all_gpus
    from snugfit.job.gpu import find_gpu as find_gpu
    from snugfit.job.job import Job as Job
    from snugfit.job.job import Phase as Phase
    from snugfit.job.job import Task as Task
    from snugfit.job.model import Model as Model
    from snugfit.measurement.measure import measure as measure
    from snugfit.planning.fleet.gpu_plans import GpuPlans as GpuPlans
    from snugfit.planning.fleet.search_gpus import plan_gpus as plan_gpus
    from snugfit.planning.plan import Plan as Plan
    from snugfit.results.footprint import Footprint as Footprint
    from snugfit.results.footprint import Timing as Timing
    from snugfit.results.measurement import Measurement as Measurement
    from snugfit.results.prediction import Prediction as Prediction
    from snugfit.techniques.recipe import Recipe as Recipe
    from snugfit.training.run.trained import Trained as Trained
    from snugfit.versions import __version__ as __version__

_HOMES = {
    "__version__": "versions",
    "all_gpus": "job.gpu",
    "compare": "comparison.compare",
    "Comparison": "comparison.compare",
    "find_gpu": "job.gpu",
    "Footprint": "results.footprint",
    "Gpu": "job.gpu",
    "GpuPlans": "planning.fleet.gpu_plans",
    "Job": "job.job",
    "measure": "measurement.measure",
    "Measurement": "results.measurement",
    "Model": "job.model",
    "Phase": "job.job",
    "plan": "cli.plan_cache",
    "Plan": "planning.plan",
    "plan_gpus": "planning.fleet.search_gpus",
    "predict": "cli.notebook",
    "Prediction": "results.prediction",
    "Recipe": "techniques.recipe",
    "SnugfitError": "errors",
    "Task": "job.job",
    "Timing": "results.footprint",
    "train": "frontends.own",
    "Trained": "training.run.trained",
}
"""Modules of the core by the public name that each defines. Features have their own names
(`Feature.public_names`).
"""

_SHOWN = ("cli", "comparison", "features", "measurement", "planning", "prediction", "results")
"""Packages whose functions return results with their own text form, which `report` defines."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*_HOMES, *_of_features()} - {"__version__"}, key=str.casefold)
    home = f"snugfit.{_HOMES[name]}" if name in _HOMES else ""
    # Features have no such names, but the import system reads several of them.
    home = home or ("" if name.startswith("__") else _of_features().get(name, ""))
    if not home:
        raise AttributeError(f"module 'snugfit' has no attribute {name!r}")
    if home.split(".")[1] in _SHOWN:
        importlib.import_module("snugfit.report.show").attach()
    globals()[name] = value = getattr(importlib.import_module(home), name)
    return value


def _of_features() -> dict[str, str]:
    """Return the module of each public name of a feature."""
    modules: dict[str, str] = importlib.import_module("snugfit.techniques.registry").public_names()
    return modules


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
