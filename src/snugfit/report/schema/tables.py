"""Documents of the commands, and the sentences about their keys that no docstring holds.

A document is the `to_json` of a dataclass. Most sentences are the docstrings of its fields. The tables here
list the keys that `to_json` adds, the fields that it omits, and the sentences for fields without a docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Cost
from snugfit.planning.plan import Choice, Pace, Plan
from snugfit.prediction.rates import HostLaunchCosts
from snugfit.report.techniques import TechniqueList
from snugfit.results.footprint import Moment
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed
from snugfit.results.step_seconds import StepSeconds


@dataclass(frozen=True, kw_only=True)
class PredictedTiming(StepSpeed, StepSeconds):
    """Seconds of a predicted step, and their causes."""


@dataclass(frozen=True, kw_only=True)
class PlannedTiming(StepSpeed, Pace):
    """Seconds of a step of a plan's best recipe, or of its nearest miss."""


class RunCosts:
    """Costs of a run at the given prices."""


class KnownGpus:
    """GPUs that can be predicted for."""


DOCUMENTS: dict[str, type] = {
    "predict --json": Prediction,
    "predict --compare --json": RecipeComparison,
    "plan --json": Plan,
    "gpus --json": KnownGpus,
    "gpus --for MODEL --json": GpuPlans,
    "measure --json": Measurement,
    "measure --predict --json": Comparison,
    "techniques --json": TechniqueList,
}
"""Documents of the core's commands."""


def heads(word: Any) -> dict[str, tuple[Any, str]]:
    """Return the keys at the head of a JSON document: `schema`, and `what` with the type `word`."""
    return {
        "schema": (int, "Version of the document's form. It rises when a key changes its meaning or goes."),
        "what": (word, "Name of the document."),
    }


ADDED: dict[type, dict[str, tuple[Any, str]]] = {
    Prediction: {
        "timing": (PredictedTiming | None, "Seconds of a step; null without a GPU."),
        "fits": (bool | None, ""),
        "tight": (bool | None, ""),
        "spare_bytes": (int | None, ""),
        "phase_results": (Mapping[str, Any], ""),
    },
    RecipeComparison: {
        "difference_bytes": (tuple[int, ...], "Bytes of each recipe minus those of the first."),
    },
    Plan: {
        "fits": (bool, ""),
        "tight": (bool, ""),
        "nearest_miss": (Choice | None, "The smallest recipe when nothing fits, up to 3 %."),
        "timing": (PlannedTiming | None, "Seconds of a step of the answer; null without rates."),
    },
    KnownGpus: {**heads(Literal["gpus"]), "gpus": (tuple[Gpu, ...], "All GPUs, or those that were named.")},
    GpuPlans: {
        "smallest": (str | None, "The key of the smallest GPU that trains it."),
        "fastest": (str | None, "The key of the fastest."),
        "run": (RunCosts, "Costs of a run; with prices or a run length only."),
    },
    OnGpu: {"timing": (StepSpeed | None, "Seconds of a step; null without rates.")},
    RunCosts: {
        "currency": (str, "Currency of all prices: `USD`."),
        "steps": (int | None, "Optimizer steps of the run; null if they were not given."),
        "cheapest": (str | None, "The key of the cheapest GPU; null without prices."),
        "costs": (tuple[Cost, ...], "Cost on each GPU that trains the job."),
    },
    Measurement: {
        "losses": (tuple[float | None, ...], "The loss of each step; null where it is not finite."),
        "calls": (Mapping[str, Any] | None, ""),
    },
    Comparison: {
        **heads(Literal["comparison"]),
        "errors": (Mapping[str, float], "predicted / measured - 1, by figure."),
    },
    Model: {"config": (Mapping[str, Any], "The keys of its config.json that matter; empty for a module.")},
    HostLaunchCosts: {"foreign": (float, "A kernel that a library launches from Python.")},
    Moment: {"counted_from": (int, "First number of a step: 1. Documents without this key count from 0.")},
}
"""Keys that `to_json` adds to the fields. For an empty sentence, the docstring of the property is used.

A class of a feature has its own table `added_keys`. Its `optional_keys` and `left_out_keys` correspond to the
tables below.
"""

LEFT_OUT: dict[type, set[str]] = {
    Job: {"mixes_samples", "unclear_cut"},
    Comparison: {"lines", "pace"},
    Model: {"facts", "module", "example", "batch_dims", "resized"},
    HostLaunchCosts: {"python_launched"},
}
"""Fields that `to_json` omits."""

OPTIONAL: dict[type, set[str]] = {
    Model: {"dtype"},
    GpuPlans: {"run"},
    Prediction: {"phase_results"},
}
"""Keys that are absent in some documents: keys of an option, or of a model with a declared dtype."""

SENTENCES = {
    "anatomy": "Bytes at the peak by tensor and module, and the kernels of the step.",
    "bytes": "Number of bytes.",
    "count": "Number of tensors.",
    "curve": "Live and reserved bytes through the steady step.",
    "device": "Device of the run.",
    "driver": "The driver's version.",
    "flops": "Their floating-point operations; a multiplication with its addition counts as two.",
    "footprint": "Bytes at the peak.",
    "gpu": "GPU of the prediction.",
    "gradients": "Bytes per parameter.",
    "job": "The training job.",
    "kernels": "Number of kernels.",
    "kind": "Use of the bytes: weights, gradients, optimizer states, activations, ...",
    "kinds": "Bytes by kind at the peak.",
    "largest": "The largest tensors at the peak, the largest first.",
    "live_bytes": "Live bytes at that moment.",
    "loop": "The training loop: `plain`, `accelerate` or `trainer`.",
    "machine": "The GPU of the published figure, or the machine.",
    "measured": "Measured bytes.",
    "measurement": "The measurement.",
    "model": "The model's name.",
    "name": "Its own name.",
    "operator": "The operator that allocated them, by torch's name.",
    "operators": "Kernels of the steady step, by phase and operator group.",
    "phase": "`build`, `load`, `forward`, `backward`, `clip` or `update`.",
    "prediction": "The prediction.",
    "published": "A published figure.",
    "reason": "Reason for the allocation.",
    "recipe": "The recipe, as text.",
    "reserved_bytes": "Bytes that the allocator has reserved at that moment.",
    "samples_per_second": "As published.",
    "smi_nvml_bytes": "NVML's reading at that moment.",
    "states": "States of the optimizer, in bytes per parameter.",
    "timing": "Seconds of a step.",
    "uuid": "UUID of the GPU by NVML; null on a CPU.",
    "versions": "Package versions.",
}
"""Sentences for fields without a docstring."""

UNITS = {
    "_bytes": "bytes",
    "bytes": "bytes",
    "_seconds": "s",
    "seconds": "s",
    "samples_per_second": "1/s",
    "tokens_per_second": "1/s",
    "mib": "MiB",
    "flops": "FLOP",
    "bandwidth": "bytes/s",
    "_hz": "Hz",
    "_mhz": "MHz",
    "reasons": "share",
    "_watts": "W",
    "_gb": "GB",
    "mfu": "share",
    "_memory": "bytes",
    "spread": "share",
    "gain": "share",
    "position": "share",
    "padding": "share",
    "disturbed": "share",
    "per_hour": "USD",
    "per_1000_samples": "USD",
    "run": "USD",
}
"""Units of numbers by the suffix of their names."""
