"""Synthesis of long calls from windows: equal to the simulation of every decode step."""

from __future__ import annotations

from typing import Any

import pytest
from generating_models import generating_job

from snugfit.features.inference import long_runs
from snugfit.job.job import Job
from snugfit.prediction.allocator import replay
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from tiers import slow_but


def rehearsed(job: Job) -> Trace:
    return rehearse(job, Recipe().setup(), CudaPolicy())


def whole_and_synthesized(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace, int]:
    """Return the trace of all decode steps, the one from windows, and the number of windows."""
    with monkeypatch.context() as changes:
        changes.setattr(long_runs, "PERIODS", ())
        whole = rehearsed(job)
    with monkeypatch.context() as changes:
        counts = counted_windows(changes)
        trace = rehearsed(job)
    assert counts, "all decode steps were simulated"
    return whole, trace, counts[0]


def counted_windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of windows of each synthesized call."""
    counts: list[int] = []
    synthesize = long_runs.CallWindows.trace

    def count(windows: long_runs.CallWindows) -> Trace:
        trace = synthesize(windows)
        counts.append(windows.count)
        return trace

    monkeypatch.setattr(long_runs.CallWindows, "trace", count)
    return counts


def sizes(trace: Trace) -> list[int]:
    return [trace.blocks[abs(event) - 1].nbytes * (1 if event > 0 else -1) for event in trace.events]


ONE_LAYER = {"num_hidden_layers": 1}
FEW = {"new_tokens": 26}


@pytest.mark.parametrize(
    ("family", "settings"),
    slow_but(
        [
            ("gpt2", {"facts": {"n_layer": 1}, **FEW}),
            ("llama", {"cache": "static", "facts": ONE_LAYER, **FEW}),
            ("llama", {"cache": "offloaded", **FEW}),
            ("llama", {"cache": "quantized", "facts": ONE_LAYER, **FEW}),
            ("mistral", {"facts": ONE_LAYER}),  # a window that fills
            ("qwen3_next", {}),
            ("gemma3_text", {"cache": "offloaded_static"}),
        ],
        2,
    ),
)
def test_every_event_and_kernel_is_equal(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = generating_job(family, **{"new_tokens": 40, **settings})
    whole, trace, windows = whole_and_synthesized(job, monkeypatch)
    # A change of the slope needs further windows.
    assert windows > 3 if family in ("mistral", "gemma3_text") else windows == 3
    assert sizes(trace) == sizes(whole)
    assert [one.kind for one in trace.blocks] == [one.kind for one in whole.blocks]
    assert trace.kernels == whole.kernels
    assert trace.waits == whole.waits
    assert trace.streams == whole.streams
    # A call marks the beginning of its loading twice.
    assert [*dict.fromkeys(trace.marks)] == [*dict.fromkeys(whole.marks)]


@pytest.mark.parametrize(
    ("family", "settings"),
    slow_but(
        [
            # Three windows of single steps would touch the line of its padded masks.
            ("t5", {"new_tokens": 40, "facts": {"num_layers": 1, "num_decoder_layers": 1}}),
            ("llama", {"beams": 3, "new_tokens": 40, "facts": ONE_LAYER}),
            ("t5", {"new_tokens": 70}),
            ("t5", {"beams": 2, "new_tokens": 70, "cache": "static"}),
        ],
        2,
    ),
)
def test_peaks_and_kernels_are_equal(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a call frees blocks in another order here, and an embedding's bytes are interpolated."""
    whole, trace, _ = whole_and_synthesized(generating_job(family, **settings), monkeypatch)
    assert trace.peak().nbytes == whole.peak().nbytes
    assert replay(trace).allocated_peak == replay(whole).allocated_peak
    assert replay(trace).reserved_peak == replay(whole).reserved_peak
    assert [one.operator for one in trace.kernels] == [one.operator for one in whole.kernels]
    moved = [sum(kernel.nbytes for kernel in one.kernels) for one in (trace, whole)]
    assert moved[0] == pytest.approx(moved[1], rel=2e-3)


def test_one_step_represents_several_of_a_long_call(monkeypatch: pytest.MonkeyPatch) -> None:
    job = generating_job("gpt2", new_tokens=90, batch_size=8)
    each = rehearsed(job)
    monkeypatch.setattr(long_runs, "MOST_WRITTEN", 12)
    few = rehearsed(job)
    assert len(few.events) < len(each.events) / 4
    assert few.peak().nbytes == each.peak().nbytes
    # Kernels stay complete, and groups have the mean sizes.
    assert len(few.kernels) == len(each.kernels)
    assert len(few.waits) == len(each.waits)
    moved = [sum(kernel.nbytes for kernel in one.kernels) for one in (few, each)]
    assert moved[0] == pytest.approx(moved[1], rel=1e-3)
