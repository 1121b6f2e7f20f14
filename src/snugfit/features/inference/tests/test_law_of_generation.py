"""The law on the CPU: a real call of `generate` has the peak of its simulation within 64 bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import transformers
from generating_models import ENCODED, GENERATING, generating_job

from aligned import Event
from cpu_scratch import compared
from reported import foreseen, reports
from snugfit.features.inference.step import DECODE, PREFILL
from snugfit.job.job import Job
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import COPY_BACK, PINNED_ON_HOST, STAGE_OUT, Trace
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from tiers import crossed, slow_but

pytestmark = pytest.mark.whole

APART = 64
"""Largest allowed difference of the peaks in bytes: numbers that Python wraps in tensors for an operator of
the CPU.
"""


def highest(events: Sequence[Event]) -> int:
    """Return the peak of live bytes."""
    live = top = 0
    for event in events:
        live += event.nbytes
        top = max(top, live)
    return top


def hold(job: Job, *, has_scratch: bool = False, recipe: str = "plain") -> Trace:
    """Check the law for a job, and return its trace. The CPU's own kernels may have scratch."""
    setup = Recipe.parse(recipe).setup()
    trace = rehearse(job, setup, CpuPolicy())
    real = reports(job, setup, steps=2)
    if not has_scratch:
        assert abs(highest(real) - highest(foreseen(trace))) <= APART
    # Without buffers of the CPU's own kernels and small numbers, the peaks are equal.
    assert highest(compared(real)) == highest(compared(foreseen(trace)))
    assert not [doubt for doubt in trace.doubts if "assumed" in doubt and "router" not in doubt]
    return trace


@pytest.fixture(autouse=True)
def _experts_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the other kernel of experts for decoding, which transformers takes on every device but the
    CPU."""
    if hasattr(transformers.GenerationMixin, "_optimize_model_for_decode"):
        nothing: Any = lambda model: contextlib.nullcontext()  # noqa: E731
        monkeypatch.setattr(transformers.GenerationMixin, "_optimize_model_for_decode", nothing)


NEW = 4
"""Number of generated tokens, with which the cache grows in three decode steps."""

DYNAMIC, STATIC = [*GENERATING][::2], [*GENERATING][1::2]
"""Model types whose `test_greedy` in `make test` has a dynamic, or a static, cache."""


@pytest.mark.parametrize(("family", "cache"), crossed(GENERATING, ("dynamic", "static")))
def test_greedy(family: str, cache: str) -> None:
    hold(generating_job(family, cache=cache, new_tokens=NEW))


QUANTIZED = ["gpt2", "llama", "mixtral", "deepseek_v3"]
"""Model types with a quantized cache: transformers has none for windows, states and encoders."""


@pytest.mark.parametrize("family", slow_but(QUANTIZED, 2))
def test_a_quantized_cache(family: str) -> None:
    hold(generating_job(family, cache="quantized", new_tokens=NEW))


BEAMS = [
    # An encoder, windows and states reorder their caches in code of their own.
    *(("llama", "static"), ("t5", "dynamic"), ("gemma3_text", "dynamic"), ("mamba2", "dynamic")),
    *((family, "dynamic") for family in (*STATIC, *DYNAMIC)),
    *((family, "static") for family in GENERATING if family != "llama"),
    *((family, "quantized") for family in QUANTIZED),
]


@pytest.mark.parametrize(("family", "cache"), slow_but(dict.fromkeys(BEAMS), 4))
def test_beams(family: str, cache: str) -> None:
    hold(generating_job(family, cache=cache, beams=3, batch_size=2, new_tokens=NEW))


OFFLOADED = [
    ("llama", "offloaded", 3),
    ("gemma3_text", "offloaded_static", 1),
    ("qwen3_next", "offloaded", 1),
    *(
        (family, cache, beams)
        for family in GENERATING
        for cache in ("offloaded", "offloaded_static")
        for beams in (1, 3)
        # transformers raises an error in these two cases.
        if family not in ENCODED and (family, cache) != ("mistral", "offloaded_static")
    ),
]


@pytest.mark.parametrize(("family", "cache", "beams"), slow_but(dict.fromkeys(OFFLOADED), 2))
def test_an_offloaded_cache(family: str, cache: str, beams: int) -> None:
    """The CPU's copies to the host leave torch's allocator, as those of a GPU leave its memory."""
    hold(generating_job(family, cache=cache, beams=beams, batch_size=2, new_tokens=NEW))


def test_an_offloaded_cache_is_on_the_host() -> None:
    sizes = {"batch_size": 4, "prompt": 24, "new_tokens": 20}
    job = generating_job("llama", cache="offloaded", facts={"num_hidden_layers": 6}, **sizes)
    trace = rehearse(job, Recipe().setup(), CpuPolicy())
    config = job.transformers_config()
    token = job.batch_size * config.num_key_value_heads * config.head_dim * 4
    copied = {
        name: [one.nbytes // 2 for one in trace.kernels if one.operator == name]
        for name in (STAGE_OUT, COPY_BACK, PINNED_ON_HOST)
    }
    # All 12 tensors are copied to the host in each of 20 passes. In the first pass, only two of the first
    # layer are copied back.
    assert len(copied[STAGE_OUT]) == 20 * 12
    assert len(copied[COPY_BACK]) == 19 * 12 + 2
    assert copied[STAGE_OUT][-1] == (24 + 20 - 1) * token
    # torch rounds each block up to a power of two, and keeps the one for up to 32 tokens.
    assert copied[PINNED_ON_HOST] == [12 * (32 + 64) * token]


@pytest.mark.parametrize(
    ("family", "new_tokens"),
    slow_but([("gpt2", 16), ("t5", 16), ("mistral", 40)], 1),  # its window fills
)
def test_a_peak_in_the_last_decode_step(family: str, new_tokens: int) -> None:
    """With a short prompt, the cache grows until the peak is in a decode step."""
    job = generating_job(family, prompt=2, new_tokens=new_tokens, batch_size=8)
    trace = hold(job)
    peak = trace.blocks[abs(trace.events[trace.peak().position]) - 1]
    assert peak.phase == DECODE


DRAWS: list[dict[str, Any]] = [{"top_p": 0.9}, {"beams": 3, "batch_size": 2}, {}, {"top_k": 0}]


@pytest.mark.parametrize("draw", slow_but(DRAWS, 2), ids=str)
def test_draws_of_tokens(draw: dict[str, Any]) -> None:
    """With many words, the peak is in the choice of a token."""
    trace = hold(generating_job("llama", sample=True, facts={"vocab_size": 4000}, new_tokens=NEW, **draw))
    peak = trace.blocks[abs(trace.events[trace.peak().position]) - 1]
    assert (peak.phase, peak.module) == (DECODE, "")
    # Without this, a device's checks and random numbers would be missing.
    assert "aten::exponential" in {one.operator.rstrip("_") for one in trace.kernels}


@pytest.mark.parametrize(
    ("family", "changes"), crossed(["llama", "t5"], [{"padding": 0.25}, {"dtype": "bfloat16"}]), ids=str
)
def test_padding_and_bfloat16(family: str, changes: dict[str, Any]) -> None:
    hold(replace(generating_job(family, new_tokens=NEW), **changes), has_scratch=True)


def test_adapters_generate() -> None:
    pytest.importorskip("peft")
    hold(generating_job("llama", new_tokens=4), recipe="lora")


def test_bytes_have_kinds_of_their_own() -> None:
    job = generating_job("llama", prompt=8, new_tokens=9)
    trace = rehearse(job, Recipe().setup(), CpuPolicy())
    config = job.transformers_config()
    token = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    last = next(at for at in reversed(range(len(trace.events))) if trace.events[at] > 0)
    kinds = {
        kind: sum(trace.blocks[one].nbytes for one in trace.alive_at(last) if trace.blocks[one].kind == kind)
        for kind in (Kind.WEIGHTS, Kind.KEY_VALUES)
    }
    # The last new token is never an input.
    assert kinds[Kind.KEY_VALUES] == pytest.approx(job.batch_size * (8 + 9 - 1) * token, abs=16)
    assert kinds[Kind.WEIGHTS] > 0
    logits = [block for block in trace.blocks if block.kind == Kind.LOGITS]
    assert {block.phase for block in logits} == {PREFILL, DECODE}
    assert max(block.nbytes for block in logits) == job.batch_size * config.vocab_size * 4


def test_another_batch_is_noticed() -> None:
    real = reports(generating_job("llama", batch_size=4), Recipe().setup(), steps=2)
    trace = rehearse(generating_job("llama", batch_size=3), Recipe().setup(), CpuPolicy())
    assert abs(highest(real) - highest(foreseen(trace))) > APART


def test_other_models_have_no_quantized_cache() -> None:
    for family in GENERATING.keys() - set(QUANTIZED):
        with pytest.raises(Exception, match="no quantized cache"):
            generating_job(family, cache="quantized")
