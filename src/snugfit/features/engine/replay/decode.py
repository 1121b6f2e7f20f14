"""Decode steps of transformers' `generate` as a CUDA graph: one launch of the host in place of thousands.

With a static cache of keys and values, the forward pass for one token has the same shapes in each decode
step. The first such pass runs without a graph, in the graph's memory. The second is recorded, and all later
ones are replayed, also in later calls. The choice of the token and the cache's mask are not part of the
graph.

A graph reads fixed memory addresses. All calls therefore use the same cache, and inputs are copied to the
graph's input memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from snugfit.features.engine.replay.batch import layout_of
from snugfit.features.engine.replay.graphs import NotRecorded
from snugfit.job.batch_layout import map_leaves

if TYPE_CHECKING:
    from snugfit.features.engine.replay.graphs import Graphs
    from snugfit.job.job import Job

CACHE = "past_key_values"
"""Name of the model's argument for the cache of keys and values."""

LENGTH_ON_HOST = "cumulative_length_int"
"""Attribute of a sliding window's cache layer: its number of tokens, as a Python int."""


@dataclass(eq=False)
class DecodeGraph:
    """The recorded forward pass of one token, with the tensors that it reads and writes."""

    inputs: dict[str, Any]
    """Inputs of the model on the device, except for the cache of keys and values."""
    outputs: Any = None
    """Outputs of the model, with logits (B, 1, vocabulary)."""
    recorded: Any = None
    """Outputs at the memory addresses of the CUDA graph, which stay allocated."""
    play: Callable[[], None] | None = None


@dataclass(eq=False)
class RecordedDecoding:
    """Forward pass of a model that records and replays decode steps, and the cache that they share."""

    model: Any
    graphs: Graphs
    forward: Callable[..., Any]
    """Forward pass of the model that launches each kernel, without CUDA graphs."""
    make_cache: Callable[..., Any]
    """transformers' constructor of a static cache."""
    tell: Callable[[str], None]
    """Callback that receives the reason if a decode step cannot be recorded. It is called at most once."""
    why_not: str = ""
    """Reason why decode steps run without CUDA graphs; empty if they are recorded."""
    cache: Any = None
    _made_with: Hashable = None
    _has_prompt: bool = False
    """True once the current call of `generate` has computed the prompt (prefill)."""
    _met: set[Hashable] = field(default_factory=set)
    _recordings: dict[Hashable, DecodeGraph] = field(default_factory=dict)

    def prepare_cache(self, **options: Any) -> Any:
        """Return the static cache of a call of `generate`: the earlier one, without tokens, if its size is
        the same.
        """
        made_with = tuple(options[name] for name in ("cache_implementation", "batch_size", "max_cache_len"))
        self._has_prompt = False
        if self.cache is None or made_with != self._made_with:
            self._recordings.clear()
            self.cache, self._made_with = self.make_cache(**options), made_with
        else:
            _empty(self.cache)
        return self.cache

    def run(self, *arguments: Any, **inputs: Any) -> Any:
        """Return the outputs of a forward pass: by a replayed graph for a decode step, else by the model."""
        decodes, self._has_prompt = self._has_prompt, True
        if not decodes or arguments or self.why_not or inputs.get(CACHE) is not self.cache:
            return self.forward(*arguments, **inputs)
        given = {name: value for name, value in inputs.items() if name != CACHE}
        key = layout_of(given)
        if key not in self._recordings and key in self._met:
            self._record(key, given)
        graph = self._recordings.get(key)
        if graph is None or graph.play is None:
            self._met.add(key)
            # The run before the recording loads kernels, in the memory that the recording uses later.
            with self.graphs.own_memory():
                return self.forward(**inputs)
        _copy(graph.inputs, given)
        with self._counted_once():
            graph.play()
        return graph.outputs

    def _record(self, key: Hashable, inputs: Mapping[str, Any]) -> None:
        """Record the forward pass with these inputs; without success, leave all later ones to the model."""
        import torch

        graph = DecodeGraph(
            map_leaves(inputs, lambda _, value: value.clone() if isinstance(value, torch.Tensor) else value)
        )

        def work() -> None:
            graph.outputs = self.forward(**graph.inputs, **{CACHE: self.cache})
            graph.recorded = graph.recorded or graph.outputs

        try:
            with self._counted_once(times=0):
                graph.play = self.graphs.record(work)
        except NotRecorded as fault:
            self.why_not = str(fault)
            self.tell(f"Decode steps run without CUDA graphs: {fault}.")
        else:
            self._recordings[key] = graph

    @contextlib.contextmanager
    def _counted_once(self, times: int = 1) -> Iterator[None]:
        """Context after which Python has counted so many more tokens in windows of the cache. A replay
        counts none, and a recording one.
        """
        layers = [layer for layer in self.cache.layers if hasattr(layer, LENGTH_ON_HOST)]
        lengths = [getattr(layer, LENGTH_ON_HOST) for layer in layers]
        try:
            yield
        finally:
            for layer, length in zip(layers, lengths, strict=True):
                setattr(layer, LENGTH_ON_HOST, length + times)


def record_decoding(model: Any, graphs: Graphs, tell: Callable[[str], None]) -> None:
    """Let a model of transformers replay decode steps of `generate` from now on."""
    forward = model.forward
    recorded = RecordedDecoding(model, graphs, forward, model._prepare_static_cache, tell)
    # `generate` reads the names of the forward method's arguments, which `wraps` preserves.
    model.forward = functools.wraps(forward)(functools.partial(recorded.run))
    model._prepare_static_cache = recorded.prepare_cache


def objections_to_decoding(job: Job, cache: str) -> Iterator[str]:
    """Yield objections to a job that generates text with this kind of cache, as clauses."""
    if job.task != "causal-lm":
        yield f"only decode steps of causal-lm models are recorded, and the task is {job.task}. Leave it out."
        return
    if job.phase_settings.get("beams", 1) != 1:
        yield "beams move the cache to other addresses in each step. Leave --beams out."
    if cache not in ("static", "dynamic"):
        yield f"a recorded decode step has a static cache, and the job a {cache} one. Leave --cache out."
        return
    if lack := _lack_of_fixed_sizes(job):
        yield f"{lack}. Leave it out."


def _lack_of_fixed_sizes(job: Job) -> str:
    """Return the reason for which decode steps of a job differ with a static cache; empty without one."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    positions = job.sequence_length + job.phase_settings["new_tokens"] - 1
    config = job.transformers_config().get_text_config(decoder=True)
    layers = StaticCache(config=config, max_cache_len=positions).layers
    if not all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers):
        return "the model's cache has states, and such a decode step was not tried with it"
    window = min(layer.max_cache_len for layer in layers)
    # In a full sliding window, Python code selects other operators than those recorded.
    return f"its {positions:,} tokens fill a sliding window of {window:,}" if window < positions else ""


def _empty(cache: Any) -> None:
    """Remove all tokens from a static cache, whose tensors keep their addresses."""
    for layer in cache.layers:
        layer.reset()
        # A prefill treats a cache layer with tensors differently, so the layer is marked as new.
        layer.lazy_initialization = MethodType(_keep_tensors, layer)
        layer.is_initialized = False


def _keep_tensors(layer: Any, keys: Any, values: Any) -> None:
    layer.is_initialized = True


def _copy(target: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Copy the tensors of nested inputs to those of a graph, which keep their addresses."""
    for name, value in source.items():
        if isinstance(value, Mapping):
            _copy(target[name], value)
        elif hasattr(target[name], "copy_"):
            target[name].copy_(value)
