"""The results of a predicted text generation: the cache, seconds of prefill and decoding, and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snugfit.features.inference.loading import ASSUMPTIONS, LoadingResult, loading_line, loading_results
from snugfit.features.inference.settings import GenerationSettings
from snugfit.features.inference.step import DECODE, PREFILL
from snugfit.job.inputs import has_sequence
from snugfit.prediction.rates import rates_for
from snugfit.results.footprint import Kind
from snugfit.results.step_seconds import LINK
from snugfit.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from snugfit.results.prediction import Prediction

DEVICE_BOUND_SHARE = 0.85
"""Limit of the share of a phase's seconds in which the device works. Below it, the phase is bound by the host
(chosen, as for a step).
"""

HOST, BANDWIDTH, ARITHMETIC = "host", "memory bandwidth", "arithmetic"

LINK_BOUND_SHARE = 0.5
"""Share of the device's seconds in copies to the host, above which the phase is bound by the link (chosen).
"""


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Predicted seconds of the prefill, or of all decoding passes together."""

    phase: str
    """`prefill`, which includes the copy of the prompt, or `decode`, all further passes together."""
    seconds: float
    """Seconds of the phase, from the end of the one before."""
    tokens_per_second: float
    """Tokens per second of all sequences: prompt tokens in `prefill` (0 for sounds), new tokens in `decode`.
    """
    bound: str
    """Resource that limits the phase: `host`, `link`, `memory bandwidth` or `arithmetic`."""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The cache of a predicted generation, and its seconds.

    On three H200 hosts, they differed by 6 to 9 % in prefill and by 11 to 20 % in decoding (medians).
    `results/h200-2026-11-30/generation-again.json` has each.
    """

    cache_bytes: int
    """Largest size of the key/value cache during the call, in bytes."""
    peak_phase: str
    """Phase in which memory peaks: `build`, `load`, `prefill` or `decode`."""
    new_tokens: int
    """Number of tokens that are generated for each sequence."""
    passes: tuple[PassSeconds, ...] = ()
    """Predicted seconds of each phase; empty if seconds are not predicted."""
    host_cache_bytes: int = 0
    """Page-locked host memory of an offloaded cache, in bytes."""
    copy_seconds: float = 0.0
    """Seconds of a call in copies of an offloaded cache to the device. Copies to the host take as long."""
    copied_bytes: int = 0
    """Bytes of these copies in one direction, computed from their seconds and the link's rate."""
    seconds_per_token: float | None = None
    """Seconds of a decode step, which generates one token for each sequence; None if not predicted."""
    loading: tuple[LoadingResult, ...] = ()
    """Memory and seconds for loading the model from a checkpoint: as saved, in 4 and in 8 bits. Empty for a
    module.
    """
    loading_assumptions: tuple[str, ...] = ()
    """Assumptions behind the figures of `loading`."""

    @classmethod
    def of(cls, prediction: Prediction) -> GenerationResult:
        """Return the results of generation in this prediction, such as the size of the key-value cache."""
        settings = GenerationSettings.of(prediction.job)
        new_tokens = settings.new_tokens
        passes = tuple(_passes(prediction))
        decoding = next(
            (pass_seconds.seconds for pass_seconds in passes if pass_seconds.phase == DECODE), None
        )
        copying = prediction.timing.link_seconds if prediction.timing else 0.0
        moment, loading = prediction.footprint.at, loading_results(prediction)
        return cls(
            cache_bytes=max(
                (point.kinds.get(Kind.KEY_VALUES, 0) for point in prediction.anatomy.curve), default=0
            ),
            peak_phase=moment.phase if moment else "",
            new_tokens=new_tokens,
            passes=passes,
            host_cache_bytes=(settings.is_offloaded and prediction.footprint.pinned_bytes) or 0,
            copy_seconds=copying,
            copied_bytes=int(copying * rates_for(prediction.gpu).link) if copying and prediction.gpu else 0,
            seconds_per_token=None if decoding is None else decoding / (new_tokens - 1),
            loading=loading,
            loading_assumptions=ASSUMPTIONS if loading else (),
        )

    def lines(self) -> Mapping[str, str]:
        """Return the lines of a report on this generation, by label."""
        cache = show_bytes(self.cache_bytes)
        lines = {"new tokens": f"{self.new_tokens:,} a sequence, with at most {cache} of cache"}
        if self.host_cache_bytes:
            copies = f"about {show_bytes(self.copied_bytes)} in {show_seconds(self.copy_seconds)}"
            size = show_bytes(self.host_cache_bytes)
            lines["on the host"] = f"{size} page-locked for the cache, copies each way of {copies}"
        for pass_seconds in self.passes:
            per_token = (
                f", {show_seconds(self.seconds_per_token)} a token"
                if pass_seconds.phase == DECODE and self.seconds_per_token
                else ""
            )
            rate = (
                f", {pass_seconds.tokens_per_second:,.0f} tokens/s" if pass_seconds.tokens_per_second else ""
            )
            lines[pass_seconds.phase] = (
                f"about {show_seconds(pass_seconds.seconds)}{per_token}{rate}, bound by {pass_seconds.bound}"
            )
        if self.loading:
            lines["loading"] = loading_line(self.loading)
        return lines


def _passes(prediction: Prediction) -> Sequence[PassSeconds]:
    """Return the seconds of prefill and of decoding, from the simulated timeline of a call of `generate`."""
    timing, job = prediction.timing, prediction.job
    if timing is None or not prediction.timeline:
        return ()
    ends = {
        phase: max((span.end_seconds for span in prediction.timeline if span.phase == phase), default=0.0)
        for phase in (PREFILL, DECODE)
    }
    decoded = GenerationSettings.of(job).new_tokens - 1
    rows = job.batch_size
    prompt = job.sequence_length if has_sequence(job.task) else 0
    rows_by_phase = [(PREFILL, ends[PREFILL], rows * prompt)]
    if decoded:
        rows_by_phase.append((DECODE, timing.step_seconds - ends[PREFILL], rows * decoded))
    return tuple(
        PassSeconds(
            phase=phase,
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            bound=_limit_of(prediction, phase, seconds),
        )
        for phase, seconds, tokens in rows_by_phase
    )


def _limit_of(prediction: Prediction, phase: str, seconds: float) -> str:
    """Return the hardware limit (computation, memory or host) that bounds the seconds of the prefill or of
    decoding.

    It is the link if copies of an offloaded cache to the host take more than `LINK_BOUND_SHARE` of the
    device's seconds. It is the host if the device works for less than `DEVICE_BOUND_SHARE` of the phase.
    Otherwise it is the larger one of the arithmetic and the memory traffic of the kernels, each at the peak
    of the data sheet. See Williams et al., Roofline, CACM 2009.
    """
    timing, gpu = prediction.timing, prediction.gpu
    assert timing is not None
    assert gpu is not None
    busy = sum(
        phase_seconds.device_seconds for phase_seconds in timing.phases if phase_seconds.phase == phase
    )
    if phase == DECODE and timing.link_seconds > LINK_BOUND_SHARE * busy:
        return LINK
    if busy < DEVICE_BOUND_SHARE * seconds:
        return HOST
    dtype = prediction.recipe.setup().product_dtype(prediction.job)
    peak = gpu.peak_dense.get({"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32"))
    flops = sum(line.flops for line in prediction.anatomy.operators if line.phase == phase)
    moved = sum(line.bytes for line in prediction.anatomy.operators if line.phase == phase)
    if not peak or not gpu.bandwidth:
        return BANDWIDTH
    return ARITHMETIC if flops / peak > moved / gpu.bandwidth else BANDWIDTH
