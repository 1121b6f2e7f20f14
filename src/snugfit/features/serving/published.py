"""Published memory figures of vLLM servers at their start, and predictions for the same servers.

`vllm_starts.json` has figures from logs and a report of llm-d-planner (Apache-2.0), with their web address.
Every third model, sorted by name, is used to fit the constants of `vllm.py`; the others test them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from snugfit.features.serving.answer import ServingAnswer
from snugfit.features.serving.predict import predict_serving
from snugfit.features.serving.request import ServingRequest
from snugfit.job.config import check_facts
from snugfit.job.find import read_preset
from snugfit.job.gpu import find_gpu
from snugfit.job.model import Model
from snugfit.units import GIB

FIT_EVERY = 3
"""Every third model, sorted by lower-case name, is used to fit constants. The others test them."""


@dataclass(frozen=True)
class PublishedStart:
    """One published start of a vLLM server: options, logged memory in GiB, and their source."""

    row: Mapping[str, Any]
    model: Model
    fits: bool
    """True if the engine's constants were fitted to this model."""

    @property
    def configuration(self) -> tuple[Any, ...]:
        """The options that change the bytes of the key-value cache. Its dtype and the largest length do
        not.
        """
        keys = ("model", "version", "tensor_parallel", "dtype", "quantization")
        return tuple(self.row.get(key) for key in keys)

    def predict(self) -> ServingAnswer:
        """Return the predicted memory of a server with these published options."""
        document = _document()
        return predict_serving(
            ServingRequest(
                model=self.model,
                gpu=find_gpu(document["gpu"]),
                engine=document["engine"],
                version=self.row.get("version", document["version"]),
                utilization=self.row["utilization"],
                max_model_len=self.row["max_model_len"],
                tensor_parallel=self.row["tensor_parallel"],
                dtype=self.row.get("dtype"),
                quantization=self.row.get("quantization"),
                cache_dtype=self.row.get("cache_dtype", "auto"),
            )
        )


def published_starts(kind: str = "rows") -> tuple[PublishedStart, ...]:
    """Return all published starts of vLLM. With `refused`, return those with which vLLM did not start."""
    document = _document()
    names = sorted(document["models"], key=str.lower)
    fitted = {name for number, name in enumerate(names) if number % FIT_EVERY == 0}
    models = {name: _model(name, document["models"]) for name in names}
    return tuple(PublishedStart(row, models[row["model"]], row["model"] in fitted) for row in document[kind])


def cache_error(start: PublishedStart, answer: ServingAnswer) -> float:
    """Return the relative error of the predicted cache size against the published one."""
    return float(answer.cache_bytes / (start.row["cache_gib"] * GIB) - 1)


def distinct(starts: Iterable[PublishedStart]) -> Sequence[PublishedStart]:
    """Return the first published start of each distinct configuration."""
    starts_by_options: dict[tuple[Any, ...], PublishedStart] = {}
    for start in starts:
        starts_by_options.setdefault(start.configuration, start)
    return tuple(starts_by_options.values())


@cache
def _document() -> dict[str, Any]:
    text = resources.files("snugfit.features.serving").joinpath("vllm_starts.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _model(name: str, entries: Mapping[str, Any]) -> Model:
    entry = entries[name]
    like = entries.get(entry.get("config_of"), entry)
    facts = dict(like.get("config") or read_preset(like["preset"]))
    if "quantization_config" in entry:
        facts["quantization_config"] = entry["quantization_config"]
    return Model.from_config(check_facts(facts, where=name), name=name)
