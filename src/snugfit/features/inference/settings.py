"""Settings of text generation: new tokens, beams, the type of key-value cache, and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from snugfit.errors import JobError, did_you_mean
from snugfit.features.inference.fields import CACHE
from snugfit.job.limits import input_limit, target_limit

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.job.model import Model
    from snugfit.techniques.setup import Setup

CACHES = ("dynamic", "static", "quantized", "offloaded", "offloaded_static")
"""Kinds of transformers' caches, by their names in `GenerationConfig.cache_implementation`."""

MOST_TOKENS, MOST_BEAMS = 1 << 20, 1 << 10

TASKS = ("causal-lm", "seq2seq-lm", "speech-to-text")
"""Tasks whose models generate tokens."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of the phase `generate` (text generation)."""

    new_tokens: int = 128
    """Number of tokens that are generated for each sequence."""
    beams: int = 1
    """Number of beams of each sequence. With 1, the most probable token is taken, or one is drawn."""
    cache: str = "dynamic"
    """Kind of the key/value cache, one of `CACHES`."""
    sample: bool = False
    """True if tokens are drawn at random by their probabilities."""
    top_k: int = 50
    """Number of the most probable tokens that are drawn from; 0 for all."""
    top_p: float = 1.0
    """Total probability of the most probable tokens that are drawn from; 1 for all."""

    @classmethod
    def of(cls, job: Job, setup: Setup | None = None) -> Self:
        """Return the settings of a job in this phase, with the cache of the `Setup` if it has one.

        Decode steps that are recorded as a CUDA graph need a static cache, which then replaces a dynamic one.
        """
        cache = CACHE.of(setup) if setup else ""
        if setup and setup.records_graphs and (cache or job.phase_settings["cache"]) == "dynamic":
            cache = "static"
        return cls(**{**job.phase_settings, **({"cache": cache} if cache else {})})

    @classmethod
    def complete(cls, job: Job, requested: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of text generation by name, with defaults. Raises `JobError` for a value or a
        model that cannot generate.
        """
        names = [entry.name for entry in fields(cls)]
        for name in requested:
            if name not in names:
                raise JobError(
                    f"Unknown setting {name!r} of the phase generate.{did_you_mean(name, names)} "
                    f"Settings: {', '.join(names)}."
                )
        settings = cls(**requested)
        _in_range("new tokens", settings.new_tokens, MOST_TOKENS)
        _in_range("beams", settings.beams, MOST_BEAMS)
        if settings.cache not in CACHES:
            raise JobError(
                f"cache is {settings.cache!r}.{did_you_mean(str(settings.cache), CACHES)} Allowed are "
                f"{', '.join(CACHES)}."
            )
        settings._check_sampling()
        settings._refuse(job)
        return asdict(settings)

    def _check_sampling(self) -> None:
        """Raise `JobError` for invalid sampling settings, such as `top_p`."""
        if not isinstance(self.sample, bool):
            raise JobError(f"sample is {self.sample!r}; allowed are true and false.")
        _in_range("top_k", self.top_k, MOST_TOKENS, low=0)
        if isinstance(self.top_p, bool) or not isinstance(self.top_p, int | float) or not 0 < self.top_p <= 1:
            raise JobError(f"top_p is {self.top_p!r}; allowed are numbers above 0 and up to 1.")
        if not self.sample and (self.top_k, self.top_p) != (
            GenerationSettings.top_k,
            GenerationSettings.top_p,
        ):
            raise JobError("top_k and top_p select tokens of a draw. Add --sample, or leave them out.")

    def _refuse(self, job: Job) -> None:
        """Raise `JobError` for a job whose model cannot generate text with these settings."""
        name = job.model.name
        if job.task not in TASKS:
            raise JobError(
                f"The phase generate needs a model that generates text, and {name} has the task {job.task}. "
                f"Tasks: {', '.join(TASKS)}."
            )
        if job.task != "causal-lm":
            limit, length, subject = (
                target_limit(job.model.config),
                self.new_tokens,
                f"{self.new_tokens} new tokens",
            )
        else:
            # The last generated token is never an input.
            limit, length = input_limit(job.model.config), job.sequence_length + self.new_tokens - 1
            subject = f"a prompt of {job.sequence_length} with {self.new_tokens} new tokens"
        if limit and length > limit[1]:
            raise JobError(
                f"{name}: {subject} need {length} positions, and the model has {limit[1]} (from {limit[0]}). "
                f"Try --new-tokens {max(1, self.new_tokens - length + limit[1])}, or a shorter prompt."
            )
        if self.cache == "quantized" and (lack := _lack_of_quantized(job)):
            raise JobError(
                f"{name}: transformers has no quantized cache for a model with {lack}. Try --cache dynamic."
            )
        if self.is_offloaded and (lack := _lack_of_offloaded(job, self.cache)):
            raise JobError(f"{name}: transformers' cache {self.cache!r} fails {lack}. Try --cache dynamic.")

    @property
    def is_offloaded(self) -> bool:
        """Return True if the cache keeps the keys and values of layers in host memory."""
        return self.cache.startswith("offloaded")

    def prepare(self, model: Any) -> None:
        """Remove the end token from a model's generation defaults, so that no sequence ends early. Import the
        packages that its cache needs.
        """
        model.generation_config.eos_token_id = None
        if self.cache.endswith("static"):
            # If it were imported during a call, it would keep the call's frames and tensors alive.
            import torch._dynamo  # noqa: F401

    def config(self) -> Any:
        """Return the `GenerationConfig` of transformers with these settings."""
        from transformers import GenerationConfig

        further: dict[str, Any] = {"do_sample": self.sample}
        if self.sample:
            further |= {"top_k": self.top_k, "top_p": float(self.top_p), "temperature": 1.0}
        if self.cache == "quantized":
            further["cache_config"] = {"backend": quantized_backend()}
        return GenerationConfig(
            max_new_tokens=self.new_tokens,
            min_new_tokens=None,
            num_beams=self.beams,
            pad_token_id=0,
            eos_token_id=None,
            # transformers would compile the model for a static cache; `compiled` is a separate technique.
            disable_compile=True,
            cache_implementation=None if self.cache == "dynamic" else self.cache,
            **further,
        )


def default_prompt(model: Model, task: str, given: Mapping[str, Any]) -> int | None:
    """Return the longest prompt, in tokens, that a decoder's positions leave beside the new tokens, if it is
    shorter than the default of `Job`. Otherwise return None.
    """
    from snugfit.job.job import Job

    new_tokens, limit = given.get("new_tokens", GenerationSettings.new_tokens), input_limit(model.config)
    if limit is None or not isinstance(new_tokens, int):
        return None
    # As in `_refuse`, the last generated token is never an input.
    longest = max(1, limit[1] - (new_tokens - 1 if task == "causal-lm" else 0))
    return longest if longest < Job.sequence_length else None


def _lack_of_quantized(job: Job) -> str:
    """Return the reason why transformers' quantized cache does not support the model; empty if it does."""
    if job.task != "causal-lm":
        return "an encoder"
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    # Caches of other kinds have layers that do not keep all keys and values.
    cache = DynamicCache(config=job.transformers_config().get_text_config(decoder=True))
    return "" if all(type(layer) is DynamicLayer for layer in cache.layers) else "windows or states"


def _lack_of_offloaded(job: Job, cache: str) -> str:
    """Return the reason why transformers' offloaded cache raises an error on a GPU; empty if it works.

    Source: `EncoderDecoderCache` and `Cache.prefetch` of `cache_utils.py` (transformers 5.17 to 5.23).
    """
    if job.task != "causal-lm":
        return "for a model with an encoder, whose decoder reads keys on the host"
    if cache == "offloaded":
        return ""
    from transformers import StaticCache

    config = job.transformers_config().get_text_config(decoder=True)
    layers = StaticCache(config=config, max_cache_len=1).layers
    # Layers that only have a state (Mamba) are not moved.
    windows = [layer.is_sliding for layer in layers if hasattr(layer, "is_sliding")]
    return "if all layers have a window, since it moves none of them" if windows and all(windows) else ""


def quantized_backend() -> str:
    """Return the backend of transformers' quantized cache. Raises `JobError` if none is installed."""
    import importlib.util

    from transformers import cache_utils

    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        return "fp8"
    for backend, package in (("quanto", "optimum.quanto"), ("hqq", "hqq")):
        if importlib.util.find_spec(package.split(".")[0]) is not None:
            return backend
    raise JobError(
        "The quantized cache needs the package optimum-quanto or hqq with this transformers. Install one, "
        "or try --cache dynamic."
    )


def _in_range(setting: str, value: object, high: int, low: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise JobError(f"{setting} is {value!r}; allowed are whole numbers from {low} to {high:,}.")
